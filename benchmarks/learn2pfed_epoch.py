"""One outer epoch of Learn2pFed (10 cells, exact gradient, all numbers learned) against a loop over the clients.

    python benchmarks/learn2pfed_epoch.py [--json FILE]

10 and 100 clients: medians, interleaved with the same equations written client by client in plain torch. 10^4 and
10^5 clients of 16 parameters: seconds per epoch and the most memory of a process that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fedtailor.algorithms.learn2pfed import Learn2pFed
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.engines import machine, make
from fedtailor.models import build
from fedtailor.training.solver import Solver

CELLS, REPEATS = 10, 7
F64 = torch.float64


def data(clients: int, samples: int, features: int) -> FederatedData:
    """Linear tasks with noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((clients * samples, features), generator=generator, dtype=F64)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn((clients * samples, 1), generator=generator, dtype=F64)
    rows = Rows(x, y, torch.arange(clients + 1) * samples)
    empty = Rows(x[:0], y[:0], torch.zeros(clients + 1, dtype=torch.int64))
    names = tuple(f"c{i}" for i in range(clients))
    return FederatedData("noise", "regression", names, rows, empty, empty, 1)


def ours(task: FederatedData) -> Callable[[], None]:
    """An epoch on the engine that stacks clients."""
    model = build("linear", task.shape, 1, seed=0, options={"bias": False}, dtype=F64)
    algorithm = Learn2pFed(outer="train", pull=0.0, cells=CELLS)
    engine = make("vmap", Experiment(algorithm, model, task, Solver(lr=0.1), 0), 4096)
    engine.start()
    federation = Federation(engine)
    server = algorithm.server_init(model)
    everybody = range(len(task.clients))

    def epoch() -> None:
        nonlocal server
        server = federation.run_round(1, everybody, server)

    return epoch


def client_by_client(task: FederatedData) -> Callable[[], None]:
    """The same equations as a loop over the clients, with autograd."""
    k = task.shape[0]
    x, y = zip(*(task.train.of(i) for i in range(len(task.clients))), strict=True)
    a, b = [u.mT @ u for u in x], [u.mT @ t for u, t in zip(x, y, strict=True)]
    eye, w0 = torch.eye(k, dtype=F64), torch.zeros(k, 1, dtype=F64)
    raw = [
        {"lam": torch.zeros(k, 1, dtype=F64, requires_grad=True)}
        | {s: torch.zeros((), dtype=F64, requires_grad=True) for s in ("p", "rho", "eta", "gamma", "theta")}
        for _ in x
    ]

    def epoch() -> None:
        w, state = w0, [(w0, w0, w0) for _ in x]
        for _ in range(CELLS):
            top, bottom = torch.zeros_like(w), torch.zeros((), dtype=F64)
            for i, (v, z, dual) in enumerate(state):
                n = {s: r.exp() for s, r in raw[i].items()}
                dual = dual + n["theta"] * (z - v + w)
                v = torch.linalg.solve(a[i] + n["rho"] * eye, n["rho"] * (w + z + dual) + b[i])
                z = n["eta"] / (n["lam"] + n["eta"]) * (v - w - dual)
                state[i] = v, z, dual
                top, bottom = top + n["p"] * n["gamma"] * (v - z - dual), bottom + n["p"] * n["gamma"]
            w = top / bottom
        errors: list[Tensor] = [(x[i] @ v - y[i]).square().sum() for i, (v, _, _) in enumerate(state)]
        numbers = [r for own in raw for r in own.values()]
        gradient = torch.autograd.grad(torch.stack(errors).sum() / len(task.train.x), numbers)
        with torch.no_grad():
            for r, g in zip(numbers, gradient, strict=True):
                r -= 1e-3 * g

    return epoch


def timed(epoch: Callable[[], None], times: int = 1) -> float:
    """Seconds per epoch of several in a row, as they are run."""
    begun = time.perf_counter()
    for _ in range(times):
        epoch()
    return (time.perf_counter() - begun) / times


def against_loop(clients: int) -> dict[str, float | str]:
    task = data(clients, 100, 4)
    fast, slow = ours(task), client_by_client(task)
    for epoch in (fast, slow):
        epoch()
    pairs = [(timed(fast, 20), timed(slow, 3)) for _ in range(REPEATS)]
    ours_s, loop_s = (statistics.median(side) for side in zip(*pairs, strict=True))
    return {"workload": f"{clients} clients", "ours_s": ours_s, "loop_s": loop_s, "times_as_fast": loop_s / ours_s}


def large(clients: int) -> dict[str, float | str]:
    torch.set_num_threads(2)
    epoch = ours(data(clients, 20, 16))
    epoch()
    seconds = statistics.median(timed(epoch) for _ in range(5))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"workload": f"{clients} clients", "ours_s": seconds, "peak_gb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--large", type=int)
    options = parser.parse_args()
    if options.large:
        with machine.freed_memory_kept():  # as a run has it
            print(json.dumps(large(options.large)))
        return
    torch.set_num_threads(1)
    with machine.freed_memory_kept():
        found = [against_loop(n) for n in (10, 100)]
    for n in (10_000, 100_000):
        done = subprocess.run(
            [sys.executable, __file__, "--large", str(n)], check=True, capture_output=True, text=True
        ).stdout
        found.append(json.loads(done))
    found[-1]["growth"] = float(found[-1]["ours_s"]) / float(found[-2]["ours_s"])
    for row in found:
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
