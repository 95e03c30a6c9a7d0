"""The line that no method can cross: regret to the exact Bayes risk, python -m benchmarks.oracle

Linear clients v_i ~ N(w, R^2/k I), y = x'v_i + noise N(0, 1), x ~ N(0, I): the Bayes risk of a client's coefficients
is known in closed form, for a reader who is told R and the noise but not w. Methods are run over a grid of R^2 and of n
samples per client; the regret is their squared error of the coefficients over that risk, minus 1. At R^2 = k m/N (m
clients, N samples; Chen, Zheng, Long, Su, arXiv 2103.01901, Theorem 1, up to constants) the better of FedAvg and Local
changes. Finished cells are kept in the folder --out; the last call writes docs/results/oracle.md and oracle.svg.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from math import log10
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from benchmarks import records
from fedtailor import algorithms, engines
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.random import stream
from fedtailor.models import build
from fedtailor.training.solver import Solver

F64, CLIENTS, FEATURES = torch.float64, 20, 5
SPREADS = (0.01, 0.1, 0.3, 1.0, 3.0, 30.0)  # R^2
SAMPLES = (10, 50)
SEEDS = tuple(range(30))
METHODS: dict[str, tuple[str, dict[str, Any], int]] = {  # title -> name, options, rounds
    "FedAvg": ("fedavg", {"epochs": 2}, 40),
    "Local": ("local", {"epochs": 2}, 40),
    "FedAvg+FT": ("fedavg+ft", {"epochs": 2, "tune_epochs": 5}, 40),
    "Ditto": ("ditto", {"epochs": 2, "personal_epochs": 2, "lam": 1.0}, 40),
    "EmpiricalBayes": ("empiricalbayes", {}, 20),
    "Learn2pFed": ("learn2pfed", {}, 100),
    "Tailor": ("tailor", {"epochs": 2}, 40),
}
ENVELOPE = ("FedAvg", "Local")  # whose better one, cell by cell, the methods that learn a degree are measured against
LEARNED = ("EmpiricalBayes", "Learn2pFed", "Tailor")
COLOURS = ("#777777", "#000000", "#d95f02", "#7570b3", "#1b9e77", "#e7298a", "#1f78b4")


def draw(spread: float, samples: int, seed: int) -> tuple[FederatedData, Tensor]:
    """A federation with a fifth of the samples to validate on, and the true coefficients [clients, features]."""
    rng = stream(seed, "oracle", repr(spread), samples)
    truth = rng.normal(size=FEATURES) + (spread / FEATURES) ** 0.5 * rng.normal(size=(CLIENTS, FEATURES))
    x = rng.normal(size=(CLIENTS, samples, FEATURES))
    y = (x * truth[:, None]).sum(-1, keepdims=True) + rng.normal(size=(CLIENTS, samples, 1))
    inputs, targets, coefficients = (torch.from_numpy(v) for v in (x, y, truth))
    kept = samples - samples // 5
    parts = {"train": slice(0, kept), "val": slice(kept, samples), "test": slice(0, 0)}
    made = {}
    for name, part in parts.items():
        starts = torch.arange(CLIENTS + 1) * inputs[0, part].shape[0]
        made[name] = Rows(inputs[:, part].flatten(0, 1), targets[:, part].flatten(0, 1), starts)
    names = tuple(f"client-{i:02}" for i in range(CLIENTS))
    return FederatedData("oracle", "regression", names, made["train"], made["val"], made["test"], 1), coefficients


def bayes_risk(data: FederatedData, spread: float) -> float:
    """Mean over clients of E|v_i - E[v_i | everybody's training data]|^2, exactly: w has a flat prior."""
    tau, eye = spread / FEATURES, torch.eye(FEATURES, dtype=F64)
    known, own = torch.zeros(FEATURES, FEATURES, dtype=F64), []
    for i in range(len(data.clients)):
        x = data.train.of(i)[0]
        cover = tau * x @ x.mT + torch.eye(len(x), dtype=F64)  # of y given w
        known = known + x.mT @ torch.linalg.solve(cover, x)
        own.append(torch.linalg.inv(x.mT @ x + eye / tau))  # of v_i given w
    of_w = torch.linalg.inv(known)
    return mean(float(torch.trace(c + c @ of_w @ c / tau**2)) for c in own)


def squared_error(title: str, data: FederatedData, truth: Tensor, seed: int) -> float:
    """Mean over clients of |v_i - truth|^2; with x ~ N(0, I) that is the excess error of a prediction."""
    name, options, rounds = METHODS[title]
    model = build("linear", data.shape, 1, seed=seed, options={"bias": False}, dtype=F64)
    made = Experiment(algorithms.make(name, options), model, data, Solver(lr=0.1, batch_size=0), seed)
    with engines.open_engine("vmap", made) as engine:
        fed, server = Federation(engine), made.algorithm.server_init(model)
        for round in range(1, rounds + 1):
            server = fed.run_round(round, range(CLIENTS), server)
        probes = torch.eye(FEATURES, dtype=F64)
        errors = []
        for clients, _, served in engine.evaluate(range(CLIENTS), rounds, server, []):
            for row, client in enumerate(clients):
                own = {k: v[row] for k, v in served.items()}
                errors.append(float((made.algorithm.predict(model, own, probes)[:, 0] - truth[client]).square().sum()))
    return mean(errors)


def cell(folder: Path, title: str, spread: float, samples: int, seed: int) -> dict[str, float]:
    """The error and the Bayes risk of one run; computed once."""
    path = folder / f"{title}-{spread}-{samples}-{seed}.json"
    if not path.exists():
        data, truth = draw(spread, samples, seed)
        found = {"error": squared_error(title, data, truth, seed), "bayes": bayes_risk(data, spread)}
        path.write_text(json.dumps(found), encoding="utf-8")
    loaded: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def table(errors: dict[tuple[str, float, int], list[dict[str, float]]], titles: Iterable[str], samples: int) -> str:
    """Rows of R^2: the Bayes risk, the regret of every method, and the envelope of FedAvg and Local."""
    titles = list(titles)
    lines = [f"| R^2 | Bayes risk | {' | '.join(titles)} |", "|---:|---:|" + "---:|" * len(titles)]
    for spread in SPREADS:
        runs = {t: errors[t, spread, samples] for t in titles}
        risk = mean(r["bayes"] for r in runs[titles[0]])
        cells = []
        for t in titles:
            regrets = [r["error"] / r["bayes"] - 1 for r in runs[t]]
            cells.append(f"{mean(regrets):.2f} ± {stdev(regrets):.2f}" if len(regrets) > 1 else f"{regrets[0]:.2f}")
        mark = " *" if spread <= FEATURES / samples else ""
        lines.append(f"| {spread:g}{mark} | {risk:.3g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def behind(errors: dict[tuple[str, float, int], list[dict[str, float]]], title: str) -> dict[tuple[float, int], float]:
    """Error over that of the better of FedAvg and Local, of the mean over seeds, cell by cell."""
    means = {k: mean(r["error"] for r in runs) for k, runs in errors.items()}
    return {
        (s, n): means[title, s, n] / min(means[other, s, n] for other in ENVELOPE) for n in SAMPLES for s in SPREADS
    }


def envelope(errors: dict[tuple[str, float, int], list[dict[str, float]]]) -> str:
    """How far the methods that learn how much to share are from the lower envelope."""
    lines = ["| method | cells within 10 % | mean | worst | at |", "|---|---:|---:|---:|---|"]
    for title in LEARNED:
        found = behind(errors, title)
        (spread, samples), worst = max(found.items(), key=lambda item: item[1])
        within = sum(v <= 1.1 for v in found.values())
        place = f"R^2 = {spread:g}, n = {samples}"
        lines.append(f"| {title} | {within} of {len(found)} | {mean(found.values()):.2f} | {worst:.2f} | {place} |")
    return "\n".join(lines)


def figure(errors: dict[tuple[str, float, int], list[dict[str, float]]]) -> str:
    """Regret over R^2, both on a scale of logarithms, a panel for each n; the threshold is dashed."""
    width, height, parts = 380, 300, []
    for panel, samples in enumerate(SAMPLES):
        left = 50 + panel * (width + 50)

        def at(spread: float, regret: float, left: float = left) -> str:
            across = (log10(spread) - log10(SPREADS[0])) / (log10(SPREADS[-1]) - log10(SPREADS[0]))
            up = (log10(min(max(regret, 0.01), 1000)) + 2) / 5
            return f"{left + across * width:.1f},{30 + (1 - up) * height:.1f}"

        x = at(FEATURES / samples, 1).split(",")[0]
        parts.append(f'<text x="{left}" y="18">regret over R², n = {samples} samples per client</text>')
        parts.append(f'<rect x="{left}" y="30" width="{width}" height="{height}" fill="none" stroke="#ccc"/>')
        parts.append(f'<line x1="{x}" x2="{x}" y1="30" y2="{30 + height}" stroke="#999" stroke-dasharray="4"/>')
        parts.append(f'<text x="{float(x) + 4:.1f}" y="44" fill="#777">R² = km/N</text>')
        for tick in (0.01, 0.1, 1, 10, 100, 1000):
            y = at(SPREADS[0], tick).split(",")[1]
            parts.append(f'<text x="{left - 6}" y="{y}" text-anchor="end" fill="#777">{tick:g}</text>')
        for spread in SPREADS:
            across = at(spread, 1).split(",")[0]
            parts.append(f'<text x="{across}" y="{height + 45}" text-anchor="middle" fill="#777">{spread:g}</text>')
        for title, colour in zip(METHODS, COLOURS, strict=True):
            means = [mean(r["error"] / r["bayes"] - 1 for r in errors[title, s, samples]) for s in SPREADS]
            points = " ".join(at(s, m) for s, m in zip(SPREADS, means, strict=True))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for i, (title, colour) in enumerate(zip(METHODS, COLOURS, strict=True)):
        parts.append(f'<text x="{50 + 115 * i}" y="{height + 68}" fill="{colour}">{title}</text>')
    size = f'width="{80 + 2 * (width + 50)}" height="{height + 80}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">\n{body}\n</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/oracle"))
    parser.add_argument("--page", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # small matrices
    errors = {
        (title, spread, samples): [cell(args.out, title, spread, samples, seed) for seed in SEEDS]
        for title in METHODS
        for samples in SAMPLES
        for spread in SPREADS
    }
    tables = "\n\n".join(f"n = {n}:\n\n{table(errors, METHODS, n)}" for n in SAMPLES)
    intro = (args.page / "oracle.intro.md").read_text(encoding="utf-8")
    made = records.note("oracle", "python -m benchmarks.oracle", SEEDS)
    near = f"Error over that of the better of FedAvg and Local, over the whole grid:\n\n{envelope(errors)}"
    body = "\n\n".join([intro.rstrip(), made, "![Regret of every method over R^2](oracle.svg)", near, tables])
    (args.page / "oracle.md").write_text(f"{body}\n", encoding="utf-8")
    (args.page / "oracle.svg").write_text(figure(errors), encoding="utf-8")


if __name__ == "__main__":
    main()
