"""What equilibrium layers cost and save: memory, iterations, the angle of cheap gradients, time against torchdeq.

    python benchmarks/equilibrium.py [--json FILE]

On MNIST where FEDTAILOR_DATA names a folder that has it, on scikit-learn's digits elsewhere. Memory is the largest
number of bytes in live tensors during a forward and a backward pass. torchdeq is compared where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor import algorithms, data
from fedtailor.core.data import FederatedData
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.engines import make
from fedtailor.experiments.config import parse
from fedtailor.metrics.memory import megabytes
from fedtailor.models import build
from fedtailor.models.deq import ResidualCell
from fedtailor.numerics.equilibrium import Equilibrium, fixed_point
from fedtailor.numerics.solve_log import Report, watched
from fedtailor.training.solver import Solver

BATCH, REPEATS, ROUNDS = 32, 15, 3
Figures = dict[str, Any]


def images() -> FederatedData:
    """Four clients of 300 images with unequal labels."""
    source = "mnist" if "FEDTAILOR_DATA" in os.environ else "digits"
    table = {"source": source, "clients": 4, "partition": "dirichlet", "max_samples": 300}
    return data.load(parse({"data": table}).data, seed=0).to(torch.float32)


class Explicit(nn.Module):
    """Blocks of their own weights, one after the other: what an equilibrium replaces."""

    def __init__(self, channels: int, inner: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualCell(channels, inner) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for block in self.blocks:
            z = block(z, x)
        return z


def settled(cell: nn.Module, x: Tensor, how: Equilibrium, start: Tensor | None = None) -> tuple[Tensor, Report]:
    """The equilibrium of a cell, from 0 or from `start`."""
    names, values = zip(*cell.named_parameters(), strict=True)

    def g(z: Tensor, x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(cell, dict(zip(names, values, strict=True)), (z, x))

    return fixed_point(g, torch.zeros_like(x) if start is None else start, (x, *values), how)


def memory() -> list[Figures]:
    """The block of DEQ-ResNet-S with a spent budget of 8 to 64 iterations, and untied blocks."""
    torch.manual_seed(0)
    x, figures = torch.randn(BATCH, 64, 14, 14), []
    for gradient in ("jfb", "neumann-4", "implicit"):
        for iterations in (8, 16, 32, 64):
            how = Equilibrium(1e-30, iterations, gradient=gradient)
            cell = ResidualCell(64, 128)
            peak = megabytes(lambda cell=cell, how=how: settled(cell, x, how)[0])  # type: ignore[misc]
            figures.append({"what": f"equilibrium, {gradient}", "depth": iterations, "peak_mb": round(peak, 1)})
    for blocks in (8, 16):
        untied = Explicit(64, 128, blocks)
        peak = megabytes(lambda untied=untied: untied(x))  # type: ignore[misc]
        figures.append({"what": "explicit, own weights", "depth": blocks, "peak_mb": round(peak, 1)})
    return figures


def trained(name: str, federated: FederatedData, warm: bool) -> tuple[Figures, Model]:
    """Some rounds of FeDEQ (3 head epochs, 5 body epochs); counts evaluations of g in training."""
    model = build(name, federated.shape, federated.outputs, seed=0, options={"warm_start": warm})
    setting = Experiment(algorithms.make("fedeq", {}), model, federated, Solver(lr=0.01, batch_size=BATCH), 0)
    engine = make("loop", setting)
    engine.start()
    federation, server = Federation(engine), setting.algorithm.server_init(model)
    everybody = range(len(federated.clients))
    begun = time.process_time()
    with watched() as reports:
        for round in range(ROUNDS):
            server = federation.run_round(round, everybody, server)
    seconds = time.process_time() - begun
    found = list(engine.evaluate(everybody, ROUNDS, server, ("test",)))
    iterations = torch.cat([r.iterations for r in reports]).double()
    converged = torch.cat([r.converged for r in reports]).double()
    accuracy = torch.cat([metrics["test"]["accuracy"] for _, metrics, _ in found]).mean()
    model.params = {k: v[0] for k, v in found[0][2].items()}
    return {
        "model": name,
        "start": "warm" if warm else "cold",
        "iterations": round_(iterations.mean()),
        "converged": round_(converged.mean(), 4),
        "accuracy": round_(accuracy, 4),
        "cpu_s": round_(seconds, 1),
    }, model


def round_(value: Any, digits: int = 2) -> float:
    return round(float(value), digits)


def angles(model: Model, federated: FederatedData, params: dict[str, Tensor], when: str) -> list[Figures]:
    """Between the gradient of the body and the implicit one, solved to 1e-6, on one batch."""
    x, y = federated.train.x[:BATCH], federated.train.y[:BATCH]
    layer: Any = model.module.get_submodule("equilibrium")
    kept = layer.how
    directions = {}
    for gradient in ("implicit", "jfb", "neumann-2", "neumann-4", "neumann-8"):
        layer.how = replace(kept, tolerance=1e-6, max_iterations=200, gradient=gradient)
        leaves = {k: v.detach().clone().requires_grad_() for k, v in params.items()}
        loss = F.cross_entropy(model(leaves, x), y)
        body = [leaves[k] for k in model.body]
        directions[gradient] = torch.cat([g.flatten() for g in torch.autograd.grad(loss, body)])
    layer.how = kept
    exact = directions.pop("implicit")
    return [
        {"gradient": k, "when": when, "cosine": round_(F.cosine_similarity(v, exact, dim=0), 4)}
        for k, v in directions.items()
    ]


def against_torchdeq(images: Tensor) -> list[Figures]:
    """Forward and backward of the block of deq-resnet-xs to the same tolerance, from 0 and from the fixed point."""
    if importlib.util.find_spec("torchdeq") is None:
        return []
    torchdeq = importlib.import_module("torchdeq")
    cell, x = block_and_input(images)
    limits = {f"{way}_{k}": v for way in "fb" for k, v in (("max_iter", 30), ("tol", 1e-3), ("stop_mode", "rel"))}
    solution = settled(cell, x, Equilibrium(1e-5, 100))[0].detach()
    figures = []
    for gradient, options in (("jfb", {"grad": 1}), ("implicit", {"ift": True})):
        deq = torchdeq.get_deq(f_solver="anderson", b_solver="anderson", **limits, **options)
        how = Equilibrium(1e-3, 30, gradient=gradient)
        for start, z in (("cold", torch.zeros_like(x)), ("warm", solution)):
            rivals: dict[str, Callable[[], Tensor]] = {
                "ours": lambda z=z, how=how: settled(cell, x, how, z)[0],  # type: ignore[misc]
                "torchdeq": lambda z=z, deq=deq: deq(lambda z: cell(z, x), z)[0][0],  # type: ignore[misc]
            }
            seconds, calls = _interleaved(cell, rivals)
            row = {"gradient": gradient, "start": start, "ratio": round_(seconds["ours"] / seconds["torchdeq"])}
            row |= {f"{k}_ms": round_(1e3 * v, 1) for k, v in seconds.items()}
            figures.append(row | {f"{k}_calls": v for k, v in calls.items()})
    return figures


def block_and_input(images: Tensor) -> tuple[nn.Module, Tensor]:
    """The block of deq-resnet-xs, and images as a stem hands them to it."""
    torch.manual_seed(0)
    cell, stem = ResidualCell(32, 32), torch.randn(32, images.shape[1], 3, 3) / 3
    return cell, F.max_pool2d(F.group_norm(F.softplus(F.conv2d(images, stem, None, 2, 1)), 8), 3, 2, 1)


def calls_by_tolerance(images: Tensor) -> list[Figures]:
    """Calls of g until all samples have converged, in double precision."""
    cell, x = block_and_input(images)
    cell, x = cell.double(), x.double()
    calls: list[int] = []
    cell.register_forward_pre_hook(lambda *_: calls.append(1))
    torchdeq = importlib.import_module("torchdeq") if importlib.util.find_spec("torchdeq") else None
    figures = []
    for tolerance in (1e-3, 1e-5, 1e-8):
        row: Figures = {"tolerance": tolerance}
        for name, history in (("ours", 5), ("plain", 0)):
            calls.clear()
            settled(cell, x, Equilibrium(tolerance, 200, history))
            row[name] = len(calls)
        if torchdeq is not None:
            calls.clear()
            deq = torchdeq.get_deq(f_solver="anderson", f_max_iter=200, f_tol=tolerance, f_stop_mode="rel", grad=1)
            deq(lambda z: cell(z, x), torch.zeros_like(x))
            row["torchdeq"] = len(calls)
        figures.append(row)
    return figures


def _interleaved(cell: nn.Module, rivals: dict[str, Callable[[], Tensor]]) -> tuple[dict[str, float], dict[str, int]]:
    """Median CPU seconds of forward and backward, and calls of the cell."""
    times: dict[str, list[float]] = {k: [] for k in rivals}
    calls = dict.fromkeys(rivals, 0)
    for repetition in range(REPEATS + 1):
        for name, forward in rivals.items():
            seen: list[int] = []
            handle = cell.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
            begun = time.process_time()
            forward().square().mean().backward()
            if repetition:  # the first is for warming up
                times[name].append(time.process_time() - begun)
            handle.remove()
            calls[name] = len(seen)
    return {k: statistics.median(v) for k, v in times.items()}, calls


def print_table(title: str, rows: list[Figures]) -> None:
    """Columns as wide as their widest entry."""
    print(f"\n{title}")
    if not rows:
        print("  not measured")
        return
    lines = [list(rows[0]), *([str(v) for v in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for first, *rest in lines:
        cells = [v.rjust(w) for v, w in zip(rest, widths[1:], strict=True)]
        print("  ".join(["", first.ljust(widths[0]), *cells]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    federated = images()
    figures: dict[str, list[Figures]] = {"memory": memory()}
    print_table("peak memory of forward and backward, batch 32, 64 channels of 14x14 (MB)", figures["memory"])
    figures["warm start"], figures["angle"] = [], []
    for name in ("deq-resnet-xs", "deq-mlp"):
        first = build(name, federated.shape, federated.outputs, seed=0)
        (cold, _), (warm, model) = (trained(name, federated, w) for w in (False, True))
        warm["saved"] = f"{1 - warm['iterations'] / cold['iterations']:.0%}"
        figures["warm start"] += [cold | {"saved": ""}, warm]
        for params, when in ((first.params, "at first"), (model.params, f"after {ROUNDS} rounds")):
            figures["angle"] += [{"model": name} | row for row in angles(first, federated, params, when)]
    print_table(f"iterations per sample in {ROUNDS} rounds of FeDEQ on {federated.name}", figures["warm start"])
    print_table("cosine of the body's gradient to the implicit one", figures["angle"])
    figures["torchdeq"] = against_torchdeq(federated.train.x[:BATCH])
    print_table("against torchdeq (CPU time of forward and backward, calls of g)", figures["torchdeq"])
    figures["calls"] = calls_by_tolerance(federated.train.x[:BATCH])
    print_table("calls of g by tolerance (budget 200)", figures["calls"])
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
