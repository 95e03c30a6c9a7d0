"""Clients that lie: methods x attacks x means. python -m benchmarks.attacks writes docs/results/attacks.md

Digits dealt equally to 20 clients (at most 24 training samples each), an MLP of 32, 60 rounds; a fifth of the
clients lie in every round. Test accuracy of the honest ones in the last round, mean over clients and seeds. "alone" is
Local. A mean keeps so much of the gain: (with lies - alone) / (without lies, weighted mean - alone). With a backdoor
also how often a test sample with the trigger, of another class, is taken for the class that the liars chose.

Goes on where it was interrupted: every cell is kept in build/attacks.json.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import records
from fedtailor.core.data import FederatedData
from fedtailor.engines.attacked import with_trigger
from fedtailor.errors import RunError
from fedtailor.experiments import runner
from fedtailor.experiments.building import attack_of, load
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.experiments.store import RunFolder, write_atomically
from fedtailor.models import build

METHODS = ("fedavg", "ditto", "fedrep", "learn2pfed-net:average")  # with a consensus other than its default, ADMM
ATTACKS = ("none", "sign-flip", "scaling", "noise", "label-flip", "backdoor")
MEANS = ("weighted", "median", "trimmed", "krum", "clipped")
PAGE = Path("docs/results/attacks.md")
Cells = dict[str, dict[str, float]]


def config(method: str, attack: str, means: str, seed: int, rounds: int, alpha: float | None) -> RunConfig:
    """One run."""
    dealt = {"partition": "iid"} if alpha is None else {"partition": "dirichlet", "alpha": alpha}
    tables: dict[str, Any] = {
        "rounds": rounds,
        "data": {"source": "digits", "clients": 20, "max_train": 24} | dealt,
        "model": {"name": "mlp", "hidden": [32]},
        "local": {"lr": 0.1, "batch_size": 8},
        "evaluation": {"every": rounds},
        "checkpoint": {"every": 1000},
    }
    name, _, consensus = method.partition(":")
    algorithm = {"name": name} | ({"consensus": consensus} if consensus else {})
    tables |= {"seed": seed, "algorithm": algorithm, "attack": {"name": attack}, "aggregation": {"mean": means}}
    made: RunConfig = parse(tables)
    return made


def cell(made: RunConfig) -> dict[str, float]:
    """Accuracy of those who are honest in every attack of this seed, in percent; of a backdoor also its success."""
    always = made.model_copy(update={"attack": made.attack.model_copy(update={"name": "sign-flip"})})
    liars = attack_of(always).clients(20)
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = runner.start(made, Path(folder, "run"))
        except RunError:  # numbers ran away, and every reply is refused
            return {"accuracy": math.nan, "success": math.nan}
        assert run.results is not None
        each = run.results["last"]["clients"]["accuracy"]
        honest = [i for i in range(20) if i not in liars]
        found = {"accuracy": 100 * mean(each[i] for i in honest if each[i] == each[i])}
        if made.attack.name == "backdoor":
            found["success"] = success(run, load(made, None), honest)
    return found


def success(run: RunFolder, data: FederatedData, honest: list[int]) -> float:
    """Share of the honest clients' test samples of other classes that the trigger turns into class 0."""
    model = build("mlp", data.shape, data.outputs, seed=0, options={"hidden": [32]})
    turned = []
    for i in honest:
        rows = slice(int(data.test.starts[i]), int(data.test.starts[i + 1]))
        x, y = with_trigger(data.test.x[rows], data.train.x), data.test.y[rows]
        taken = model(run.personal(run.about["clients"][i], "last"), x.float()).argmax(1)
        turned += (taken[y != 0] == 0).tolist()
    return 100 * mean(turned)


def spread(values: list[float]) -> str:
    if any(math.isnan(value) for value in values):
        return "does not finish"
    return f"{mean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def page(cells: Cells, methods: list[str], seeds: list[int], made: str) -> str:
    """The two tables, as far as there are cells for them."""

    def values(method: str, attack: str, means: str, what: str) -> list[float]:
        return [cells[key][what] for s in seeds if (key := f"{method}/{attack}/{means}/{s}") in cells]

    alone = values("local", "none", "weighted", "accuracy")
    lines = [f"{made} Training alone: {spread(alone)}.", ""]
    lines += [f"| method | attack | {' | '.join(MEANS)} |", f"|---|---|{'---|' * len(MEANS)}"]
    for method in methods:
        clean = values(method, "none", "weighted", "accuracy")
        for attack in ATTACKS:
            row = []
            for means in MEANS:
                got = values(method, attack, means, "accuracy")
                kept = 100 * (mean(got) - mean(alone)) / (mean(clean) - mean(alone)) if got and clean else 0.0
                shown = f"{spread(got)} ({kept:.0f} %)" if kept == kept else spread(got)
                row.append(shown if len(got) == len(seeds) else "")
            if any(row):
                lines.append(f"| {method} | {attack} | {' | '.join(row)} |")
    lines += [
        "",
        "Success of the backdoor: test samples of other classes that the trigger turns into class 0, in percent:",
        "",
    ]
    lines += [f"| method | {' | '.join(MEANS)} |", f"|---|{'---|' * len(MEANS)}"]
    for method in methods:
        each = [values(method, "backdoor", means, "success") for means in MEANS]
        if any(len(got) == len(seeds) for got in each):
            lines.append(f"| {method} | {' | '.join(spread(v) if len(v) == len(seeds) else '' for v in each)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--alpha", type=float, help="digits dealt by Dirichlet with this alpha, not equally")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, default=Path("build/attacks.json"))
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    cells: Cells = json.loads(given.json.read_text()) if given.json.exists() else {}
    todo = [("local", "none", "weighted", seed) for seed in given.seeds]
    todo += [(m, a, w, s) for s in given.seeds for m in given.methods for a in ATTACKS for w in MEANS]
    for method, attack, means, seed in todo:
        if (key := f"{method}/{attack}/{means}/{seed}") not in cells:
            cells[key] = cell(config(method, attack, means, seed, given.rounds, given.alpha))
            print(key, cells[key], flush=True)
            write_atomically(given.json, json.dumps(cells, indent=1).encode())
    intro = given.page.with_suffix(".intro.md")
    made = records.note("attacks", "python -m benchmarks.attacks", given.seeds)
    text = page(cells, given.methods, given.seeds, made)
    write_atomically(given.page, ((intro.read_text() + "\n" if intro.exists() else "") + text).encode())


if __name__ == "__main__":
    main()
