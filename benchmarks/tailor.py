"""Tailor beside strong baselines on thirteen federations: python -m benchmarks.tailor [--seeds 3] [--columns NAME ...]

Federations are small, so that the table can be made on one core: MLPs with one hidden layer on images, linear models on
schools and meters; every method has the same local steps. Finished runs are kept in the folder --out, seed by seed, and
docs/results/tailor.md is written from those seeds of a column that all its methods have. What Tailor's options are was
settled on data that no column uses: MNIST (canonical test images), superclasses of CIFAR-100, drawn linear clients;
seeds from 100.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch

from benchmarks import records
from fedtailor import engines
from fedtailor.core.data import FederatedData
from fedtailor.core.engine import Engine
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.random import stream
from fedtailor.core.trees import Tree
from fedtailor.errors import ConfigError
from fedtailor.experiments.building import assemble, load
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.studies.significance import LEVEL, holm, signed_ranks

ROUNDS, EPOCHS = 12, 2
TURNS = 3  # trainings of a run, of which the quickest counts as its time: the first one warms up,
LONG = 5.0  # which is little in a training of so many seconds: then one is enough
IMAGES = {"clients": 10, "test": 0.3, "val": 0.15, "max_samples": 200, "use": "train"}
FMNIST, CIFAR = {"source": "fashion-mnist"} | IMAGES, {"source": "cifar10"} | IMAGES
LOCAL = {"lr": 0.03, "momentum": 0.9, "batch_size": 32}
MLP, LINEAR = {"name": "mlp", "hidden": [32]}, {"name": "linear"}
COLUMNS: dict[str, dict[str, Any]] = {
    "FMNIST 0.1": {"data": FMNIST | {"alpha": 0.1}, "model": MLP},
    "FMNIST 0.5": {"data": FMNIST | {"alpha": 0.5}, "model": MLP},
    "half permuted": {"data": FMNIST | {"alpha": 0.5, "permuted": 0.5}, "model": MLP},
    "School": {"data": {"source": "school"}, "model": LINEAR},
    "writers": {
        "data": {"source": "qmnist", "clients": 20, "test": 0.3, "val": 0.15, "max_samples": 100},
        "model": MLP,
    },
    "ECL": {  # 800 samples per client: drawn linear clients with as many asked for smaller steps
        "data": {"source": "electricity", "clients": 20, "window": 24},
        "model": LINEAR,
        "local": LOCAL | {"lr": 0.003},
    },
    "PACS": {"data": {"source": "pacs", "test": 0.3, "val": 0.15, "max_samples": 300}, "model": MLP},
    "CIFAR-10 0.1": {"data": CIFAR | {"alpha": 0.1}, "model": MLP},
    "CIFAR-10 0.5": {"data": CIFAR | {"alpha": 0.5}, "model": MLP},
    "100 clients": {
        "data": FMNIST | {"alpha": 0.5, "clients": 100, "max_samples": 60},
        "model": MLP,
        "federation": {"clients_per_round": 20},
        "rounds": 24,
    },
    "hospitals": {"data": {"source": "heart-disease", "test": 0.3, "val": 0.15}, "model": MLP},
    "quantity": {  # all draw from the same images; from about ten to a thousand each
        "data": {"source": "fashion-mnist", "use": "test", "clients": 20, "test": 0.3, "val": 0.15}
        | {"partition": "quantity", "min_samples": 10, "max_samples": 500},
        "model": MLP,
    },
    "text": {
        "data": {"source": "shakespeare", "clients": 10, "test": 0.3, "val": 0.15, "max_samples": 200},
        "model": {"name": "transformer", "width": 16, "heads": 2, "layers": 2},
    },
}
METHODS: dict[str, dict[str, Any]] = {
    "Tailor": {"name": "tailor", "epochs": EPOCHS},
    "Local": {"name": "local", "epochs": EPOCHS},
    "FedAvg": {"name": "fedavg", "epochs": EPOCHS},
    "FedAvg+FT": {"name": "fedavg+ft", "epochs": EPOCHS},
    "FedAvg+prior": {"name": "fedavg", "epochs": EPOCHS},  # with the label prior of the model
    "FedPer": {"name": "fedper", "epochs": EPOCHS},
    "FedRep": {"name": "fedrep", "head_epochs": EPOCHS, "body_epochs": EPOCHS},
    "Ditto": {"name": "ditto", "epochs": EPOCHS, "personal_epochs": EPOCHS},
    "kNN-Per": {"name": "knn-per", "epochs": EPOCHS},
    "EmpiricalBayes": {"name": "empiricalbayes"},
}
WRONG = {"share": 0.5, "head_share": 0.9, "tune_step": 1.0}  # half a body, a common head, all of it fine-tuned
ABLATIONS: dict[str, dict[str, Any]] = {
    "nothing learned": {"learned": []},
    "no label prior": {"prior": 0.0, "learned": ["share", "step"]},
    "no own deviation": {"evidence": 1e9},
    "no fine-tuning": {"tune_epochs": 0},
    "begins wrong": WRONG,
    "begins wrong, nothing learned": WRONG | {"learned": []},
    "no mixture": {"mixes": False},
    "no mixture, nothing learned": {"mixes": False, "learned": []},
    "no mixture, begins wrong": WRONG | {"mixes": False},
    "no mixture, begins wrong, nothing learned": WRONG | {"mixes": False, "learned": []},
}
PAIRS = {  # what learning is worth: with it, and with the same beginning kept
    "as it is": ("Tailor", "nothing learned"),
    "begins wrong": ("begins wrong", "begins wrong, nothing learned"),
    "no mixture": ("no mixture", "no mixture, nothing learned"),
    "no mixture, begins wrong": ("no mixture, begins wrong", "no mixture, begins wrong, nothing learned"),
}
SAME = ("ECL",)  # columns whose clients and samples are the same for every seed: they count once
ABLATED = ("FMNIST 0.5", "half permuted", "100 clients")  # columns


@dataclass(frozen=True)
class Outcome:
    """One run: for each client the loss of every test sample (1 for a wrong class, or a squared error)."""

    losses: list[list[float]]
    seconds: float  # of processor time, training only
    up: int = 0  # bytes, of all clients together

    @property
    def by_client(self) -> list[float]:
        return [mean(each) for each in self.losses if each]


def configured(column: str, title: str, seed: int) -> RunConfig:
    """One method on one column; ConfigError where it does not fit."""
    options = METHODS.get(title) or METHODS["Tailor"] | ABLATIONS[title]
    tables: dict[str, Any] = {"rounds": ROUNDS, "seed": seed, "local": LOCAL} | COLUMNS[column] | {"algorithm": options}
    if title == "FedAvg+prior":
        tables["model"] = tables["model"] | {"prior": "label"}
    return parse(tables)


def run(config: RunConfig, data: FederatedData) -> Outcome:
    """Train for all rounds, and predict every client's test samples; the time is the least of a few trainings."""
    experiment = assemble(config, data)
    clients = len(data.clients)
    seconds = []
    for turn in range(TURNS):
        began = time.process_time()
        with engines.open_engine("vmap", experiment) as engine:
            fed, server = trained(config, experiment, engine)
            seconds.append(time.process_time() - began)
            if turn < TURNS - 1 and seconds[-1] < LONG:
                continue
            losses: list[list[float]] = [[] for _ in range(clients)]
            for members, _, served in engine.evaluate(range(clients), config.rounds, server, []):
                for row, client in enumerate(members):
                    losses[client] = wrong(experiment, {k: v[row] for k, v in served.items()}, client)
        break
    return Outcome(losses, min(seconds), fed.traffic.up)


def trained(config: RunConfig, experiment: Experiment, engine: Engine) -> tuple[Federation, Tree]:
    """The federation and the server's state after all rounds."""
    clients = len(experiment.data.clients)
    asked = config.federation.clients_per_round or clients
    fed, server = Federation(engine), experiment.algorithm.server_init(experiment.model)
    for round in range(1, config.rounds + 1):
        cohort = sorted(stream(config.seed, round, "cohort").permutation(clients)[:asked].tolist())
        server = fed.run_round(round, cohort, server)
    return fed, server


def wrong(experiment: Experiment, personal: dict[str, Any], client: int) -> list[float]:
    """The loss of each test sample of a client."""
    x, y = experiment.data.test.of(client)
    if not len(y):
        return []
    outputs = experiment.algorithm.predict(experiment.model, personal, x)
    if experiment.data.task == "classification":
        return (outputs.argmax(-1) != y).double().tolist()
    return [round(v, 5) for v in (outputs - y).square().mean(-1).tolist()]


def finished(folder: Path, column: str, title: str, seed: int) -> Outcome | None:
    """A run that was made before."""
    path = folder / f"{column}-{title}-{seed}.json"
    return Outcome(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def make(folder: Path, column: str, titles: Sequence[str], seed: int) -> None:
    """Runs of a column that are missing."""
    data: FederatedData | None = None
    for title in titles:
        if finished(folder, column, title, seed) is not None:
            continue
        config = configured(column, title, seed)
        data = data or load(config)
        try:
            outcome = run(config, data)
        except ConfigError:  # a method for other tasks or models
            continue
        path = folder / f"{column}-{title}-{seed}.json"
        path.write_text(json.dumps(vars(outcome)), encoding="utf-8")
        print(f"{column}, seed {seed}, {title}: {mean(outcome.by_client):.4f}, {outcome.seconds:.1f} s", flush=True)


class Column:
    """What is known of a column: runs of the seeds that all its methods have."""

    def __init__(self, folder: Path, name: str, titles: Sequence[str], seeds: int) -> None:
        found = {(t, s): r for t in titles for s in range(seeds) if (r := finished(folder, name, t, s)) is not None}
        self.name = name
        self.titles = [t for t in titles if any(title == t for title, _ in found)]
        self.seeds = [s for s in range(seeds) if all((t, s) in found for t in self.titles)]
        self.runs = {(t, s): r for (t, s), r in found.items() if s in self.seeds}
        self.is_percent = COLUMNS[name]["model"] != LINEAR

    def pooled(self, title: str) -> np.ndarray[Any, Any]:
        """A loss for each client of each seed; the mean over seeds where they deal the same samples."""
        by_seed = [np.array(self.runs[title, s].by_client) for s in self.seeds]
        return np.mean(by_seed, axis=0) if self.name in SAME else np.concatenate(by_seed)

    def figure(self, title: str) -> float:
        """Accuracy in percent, or mean squared error: over clients, then seeds."""
        loss = mean(mean(self.runs[title, s].by_client) for s in self.seeds)
        return 100 * (1 - loss) if self.is_percent else loss

    def text(self, title: str) -> str:
        if title not in self.titles:
            return ""
        each = [mean(self.runs[title, s].by_client) for s in self.seeds]
        scale, form = (100, "{:.1f}") if self.is_percent else (1, "{:.3f}")
        spread = " ± " + form.format(scale * stdev(each)) if len(each) > 1 else ""
        return form.format(self.figure(title)) + spread

    @property
    def best(self) -> str:
        return min(self.titles, key=lambda t: float(self.pooled(t).mean()))

    def hurt(self) -> tuple[int, int]:
        """Clients that Tailor serves worse than Local beyond noise (paired over test samples, 5 %), and all."""
        worse = total = 0
        for seed in self.seeds[:1] if self.name in SAME else self.seeds:
            pairs = zip(self.runs["Tailor", seed].losses, self.runs["Local", seed].losses, strict=True)
            for ours, own in pairs:
                apart = np.array(ours) - np.array(own)
                if len(apart) < 2:
                    continue
                total += 1
                error = apart.std(ddof=1) / len(apart) ** 0.5
                worse += bool(apart.mean() > 1.645 * error and apart.mean() > 0)
        return worse, total

    def against(self) -> dict[str, tuple[float, float]]:
        """Every other method: Holm's p, and the mean difference of the loss (below 0: Tailor is better)."""
        others = [t for t in self.titles if t != "Tailor"]
        apart = [self.pooled("Tailor") - self.pooled(t) for t in others]
        ps = holm([signed_ranks(d) for d in apart])
        return {t: (p, float(d.mean())) for t, p, d in zip(others, ps, apart, strict=True)}


def table(columns: Sequence[Column]) -> list[str]:
    """Figures of all methods; the best of a column is bold."""
    lines = ["| | " + " | ".join(c.name for c in columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    lines.append("| seeds | " + " | ".join(str(len(c.seeds)) for c in columns) + " |")
    for title in METHODS:
        cells = [f"**{c.text(title)}**" if c.best == title else c.text(title) for c in columns]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def verdicts(columns: Sequence[Column]) -> list[str]:
    """Per column: Tailor against the best of the others and against FedAvg+FT, hurt clients, cost."""
    heads = ("column", "best other", "Tailor against it", "p (Holm)", "against FedAvg+FT", "p (Holm)", "hurt", "time")
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|---:|---|---:|---:|---:|"]
    for c in columns:
        tests = c.against()
        best = min(tests, key=lambda t: float(c.pooled(t).mean()))
        cells = [c.name, best]
        for other in (best, "FedAvg+FT"):
            p, apart = tests[other]
            said = "level" if p >= LEVEL else ("ahead" if apart < 0 else "behind")
            cells += [said, f"{p:.3f}"]
        worse, total = c.hurt()
        cost = mean(c.runs["Tailor", s].seconds / c.runs["FedAvg", s].seconds for s in c.seeds)
        lines.append(f"| {' | '.join([*cells, f'{worse} of {total}', f'{cost:.1f}'])} |")
    return lines


def ablated(folder: Path, seeds: int) -> list[Column]:
    """Columns with Tailor's rows alone."""
    columns = [Column(folder, name, ("Tailor", *ABLATIONS), seeds) for name in ABLATED]
    return [c for c in columns if c.seeds and len(c.titles) > 1]


def ablations(columns: Sequence[Column]) -> list[str]:
    """Tailor without one part, or what else is different."""
    lines = ["| | " + " | ".join(c.name for c in columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    return lines + [f"| {t} | {' | '.join(c.text(t) for c in columns)} |" for t in ("Tailor", *ABLATIONS)]


def learning(columns: Sequence[Column]) -> list[str]:
    """What learning gains over the beginning that is kept, in points, with Holm's p over all of these tests."""
    cells = [(name, c, pair) for name, pair in PAIRS.items() for c in columns if set(pair) <= set(c.titles)]
    apart = [c.pooled(kept) - c.pooled(learned) for _, c, (learned, kept) in cells]
    ps = iter(holm([signed_ranks(d) for d in apart]))
    texts = {
        (name, c.name): f"{100 * d.mean():+.1f} ({next(ps):.3f})" for (name, c, _), d in zip(cells, apart, strict=True)
    }
    lines = ["| | " + " | ".join(c.name for c in columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    return lines + [f"| {name} | {' | '.join(texts.get((name, c.name), '') for c in columns)} |" for name in PAIRS]


def record(columns: Sequence[Column]) -> str:
    """What other pages are made of: by column and method each client's loss, seconds and bytes up of a run."""
    found = {}
    for c in columns:
        found[c.name] = {
            "clients": {t: [round(float(v), 5) for v in c.pooled(t)] for t in c.titles},
            "seconds": {t: round(mean(c.runs[t, s].seconds for s in c.seeds), 2) for t in c.titles},
            "up": {t: round(mean(c.runs[t, s].up for s in c.seeds)) for t in c.titles},
        }
    return json.dumps(found) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/tailor"))
    parser.add_argument("--page", type=Path, default=Path("docs/results"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--columns", nargs="*", default=list(COLUMNS), choices=list(COLUMNS), metavar="NAME")
    parser.add_argument("--page-only", action="store_true", help="write the page from what is there")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if not args.page_only:
        for seed in range(args.seeds):
            for name in args.columns:
                make(args.out, name, list(METHODS), seed)
            for name in [n for n in args.columns if n in ABLATED]:
                make(args.out, name, list(ABLATIONS), seed)
    found = [c for name in COLUMNS if (c := Column(args.out, name, list(METHODS), args.seeds)).seeds]
    columns = [c for c in found if "Tailor" in c.titles and len(c.titles) > 2]
    intro = (args.page / "tailor.intro.md").read_text(encoding="utf-8").rstrip()
    made = records.note("tailor", "python -m benchmarks.tailor", range(args.seeds))
    parts = [intro, "", made, "", "## Figures", "", *table(columns), "", "## Tests", "", *verdicts(columns)]
    without = ablated(args.out, args.seeds)
    parts += ["", "## Ablations", "", *ablations(without)]
    parts += ["", "Points that learning gains over the same beginning, kept (Holm's p):", "", *learning(without)]
    (args.page / "tailor.json").write_text(record(columns), encoding="utf-8")
    (args.page / "tailor.md").write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
