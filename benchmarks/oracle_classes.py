"""How far classifiers are from a reader who knows every client's truth: python -m benchmarks.oracle_classes

Twenty clients with two classes of five features: x ~ N(+-m_i + b_i, I), so that the best rule of a client is logistic
and its error is known. Three sliders, one moved at a time, the others at 0:

- label skew: the log odds of the classes at a client are N(0, s^2);
- concept shift: m_i = m + s N(0, I): what separates the classes differs;
- feature shift: b_i = s N(0, I): the same classes, moved.

The regret of a method is its error on 1000 fresh samples per client minus that of the best rule, in points of accuracy.
Finished cells are kept in the folder --out; the last call writes docs/results/oracle-classes.md and its picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch

from benchmarks import records
from benchmarks.tailor import run
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.random import stream
from fedtailor.experiments.config import parse

CLIENTS, FEATURES, TRAIN, VAL, TEST, ROUNDS, EPOCHS = 20, 5, 24, 8, 1000, 18, 2
SLIDERS = {
    "label skew": (0.0, 1.0, 2.0, 4.0),
    "concept shift": (0.0, 0.3, 0.6, 1.2),
    "feature shift": (0.0, 0.5, 1.0, 2.0),
}
SEEDS = (0, 1, 2)
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "fedavg", "epochs": EPOCHS},
    "Local": {"name": "local", "epochs": EPOCHS},
    "FedAvg+FT": {"name": "fedavg+ft", "epochs": EPOCHS, "tune_epochs": 5},
    "FedAvg+prior": {"name": "fedavg", "epochs": EPOCHS},  # with the label prior of the model
    "Ditto": {"name": "ditto", "epochs": EPOCHS, "personal_epochs": EPOCHS},
    "Tailor": {"name": "tailor", "epochs": EPOCHS},
}
ENVELOPE = ("FedAvg", "Local")
COLOURS = ("#777777", "#000000", "#d95f02", "#e7298a", "#7570b3", "#1f78b4")


def draw(slider: str, s: float, seed: int) -> tuple[FederatedData, float]:
    """A federation, and the mean error of the clients' best rules on the same test samples."""
    rng = stream(seed, "oracle-classes", slider, repr(s))
    m = rng.normal(size=FEATURES)
    m = m / np.linalg.norm(m) * np.ones((CLIENTS, 1))
    m = m + (s * rng.normal(size=m.shape) / FEATURES**0.5 if slider == "concept shift" else 0)
    b = s * rng.normal(size=m.shape) if slider == "feature shift" else np.zeros_like(m)
    odds = s * rng.normal(size=CLIENTS) if slider == "label skew" else np.zeros(CLIENTS)
    n = TRAIN + VAL + TEST
    y = rng.random((CLIENTS, n)) < 1 / (1 + np.exp(-odds))[:, None]
    x = rng.normal(size=(CLIENTS, n, FEATURES)) + b[:, None] + np.where(y, 1, -1)[..., None] * m[:, None]
    best = 2 * np.einsum("cnf,cf->cn", x - b[:, None], m) + odds[:, None] > 0
    inputs, labels = torch.from_numpy(x).float(), torch.from_numpy(y).long()
    parts = {"train": slice(0, TRAIN), "val": slice(TRAIN, TRAIN + VAL), "test": slice(TRAIN + VAL, n)}
    rows = {}
    for name, part in parts.items():
        starts = torch.arange(CLIENTS + 1) * len(range(n)[part])
        rows[name] = Rows(inputs[:, part].flatten(0, 1), labels[:, part].flatten(), starts)
    names = tuple(f"client-{i:02}" for i in range(CLIENTS))
    data = FederatedData("oracle", "classification", names, rows["train"], rows["val"], rows["test"], 2)
    return data, float((best != y)[:, parts["test"]].mean())


def cell(folder: Path, title: str, slider: str, s: float, seed: int) -> float:
    """The regret of one run in points; computed once."""
    path = folder / f"{title}-{slider}-{s}-{seed}.json"
    if not path.exists():
        data, least = draw(slider, s, seed)
        model = {"name": "linear"} | ({"prior": "label"} if title == "FedAvg+prior" else {})
        local = {"lr": 0.1, "batch_size": 0}
        config = parse({"rounds": ROUNDS, "seed": seed, "model": model, "local": local, "algorithm": METHODS[title]})
        path.write_text(json.dumps(100 * (mean(run(config, data).by_client) - least)), encoding="utf-8")
    return float(json.loads(path.read_text(encoding="utf-8")))


def table(regrets: dict[tuple[str, str, float], list[float]], slider: str) -> str:
    """A row for each place of the slider."""
    lines = [f"| s | {' | '.join(METHODS)} |", "|---:|" + "---:|" * len(METHODS)]
    for s in SLIDERS[slider]:
        cells = [regrets[title, slider, s] for title in METHODS]
        lines.append(f"| {s:g} | " + " | ".join(f"{mean(c):.1f} ± {stdev(c):.1f}" for c in cells) + " |")
    return "\n".join(lines)


def envelope(regrets: dict[tuple[str, str, float], list[float]]) -> str:
    """How far each method is from the better of FedAvg and Local, in points."""
    lines = ["| method | cells within a point | mean | worst | at |", "|---|---:|---:|---:|---|"]
    for title in METHODS:
        apart = {
            (slider, s): mean(regrets[title, slider, s]) - min(mean(regrets[o, slider, s]) for o in ENVELOPE)
            for slider, places in SLIDERS.items()
            for s in places
        }
        (slider, s), worst = max(apart.items(), key=lambda item: item[1])
        within = sum(v <= 1 for v in apart.values())
        cells = [title, f"{within} of {len(apart)}", f"{mean(apart.values()):.1f}", f"{worst:.1f}", f"{slider}, {s:g}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(regrets: dict[tuple[str, str, float], list[float]], most: float = 30.0) -> str:
    """Regret over the slider, a panel each."""
    width, height, parts = 250, 260, []
    for panel, (slider, places) in enumerate(SLIDERS.items()):
        left = 40 + panel * (width + 45)
        parts.append(f'<text x="{left}" y="18">{slider}: points behind the best rule</text>')
        parts.append(f'<rect x="{left}" y="30" width="{width}" height="{height}" fill="none" stroke="#ccc"/>')
        for tick in range(0, int(most) + 1, 10):
            y = 30 + (1 - tick / most) * height
            parts.append(f'<text x="{left - 6}" y="{y:.1f}" text-anchor="end" fill="#777">{tick}</text>')
        across = [left + i * width / (len(places) - 1) for i in range(len(places))]
        for x, s in zip(across, places, strict=True):
            parts.append(f'<text x="{x:.1f}" y="{height + 45}" text-anchor="middle" fill="#777">{s:g}</text>')
        for title, colour in zip(METHODS, COLOURS, strict=True):
            means = [min(max(mean(regrets[title, slider, s]), 0), most) for s in places]
            points = " ".join(f"{x:.1f},{30 + (1 - v / most) * height:.1f}" for x, v in zip(across, means, strict=True))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for i, (title, colour) in enumerate(zip(METHODS, COLOURS, strict=True)):
        parts.append(f'<text x="{40 + 125 * i}" y="{height + 70}" fill="{colour}">{title}</text>')
    size, body = f'width="{60 + 3 * (width + 45)}" height="{height + 80}"', "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">\n{body}\n</svg>\n'


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/oracle-classes"))
    parser.add_argument("--page", type=Path, default=Path("docs/results"))
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    regrets = {
        (title, slider, s): [cell(args.out, title, slider, s, seed) for seed in SEEDS]
        for slider, places in SLIDERS.items()
        for s in places
        for title in METHODS
    }
    intro = (args.page / "oracle-classes.intro.md").read_text(encoding="utf-8").rstrip()
    made = records.note("oracle-classes", "python -m benchmarks.oracle_classes", SEEDS)
    near = f"Points behind the better of FedAvg and Local, over all cells:\n\n{envelope(regrets)}"
    tables = [f"{slider[0].upper()}{slider[1:]}:\n\n{table(regrets, slider)}" for slider in SLIDERS]
    picture = "![Regret of every method over each slider](oracle-classes.svg)"
    body = "\n\n".join([intro, made, picture, near, *tables])
    (args.page / "oracle-classes.md").write_text(f"{body}\n", encoding="utf-8")
    (args.page / "oracle-classes.svg").write_text(figure(regrets), encoding="utf-8")


if __name__ == "__main__":
    main()
