"""Private parts that are served on a newer common part: python benchmarks/stale_heads.py COLUMN [...] [--seeds 3]

A client fits its head (or its own entries) to the common model that it was sent. Then the server averages, and the
client is served with its part on the new average, which it has never seen. Test accuracy, mean over clients and seeds:

- served: what `personal` gives, the private part on the newest common part;
- before: the client's model as it was at the end of its local training in its last round, before the average;
- refit k: served with `local.refit = k`, after k further epochs of the private part with the common part held still.

Columns: "digits", 10 clients with Dirichlet 0.3 that all take part in each of 30 rounds, an MLP of 32; "cifar10", 20
clients with two classes each and at most 100 images, of which 5 take part in each of 60 rounds, a small CNN (FeDEQ: its
equilibrium network); "qmnist", the same with 20 writers; "cifar10-100" and "cifar100-100", 100 clients (two classes of
ten, five of a hundred) of which 10 take part, as in FeDEQ's Table 1; "resnet-group" and "resnet-batch", FedSelect's
Table 1 with a ResNet-18 of a quarter of the width. A run is trained once; only what is served differs. FedAvg+FT, Local
and kNN-Per have no private part that could be stale, and are there to compare with. Columns under SEARCHED try each of
their settings for a few rounds with another seed and keep the one with the best validation accuracy; the others have
untuned steps. Below a table, Wilcoxon's tests of three epochs against none and of the best method against the
others, each with three epochs where it has a private part, paired over clients of all seeds, with Holm's correction.
Finished runs, a file each, are kept beside the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor import engines
from fedtailor.core.algorithm import PARTIAL
from fedtailor.core.client import Call
from fedtailor.core.context import ClientContext
from fedtailor.core.engine import Reply
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.errors import UserError
from fedtailor.experiments.building import build_experiment
from fedtailor.experiments.config import parse
from fedtailor.metrics.evaluation import evaluate
from fedtailor.studies.significance import holm, signed_ranks

Kept = TypeVar("Kept")
METHODS = ("fedavg+ft", "knn-per", "fedper", "fedrep", "lg-fedavg", "fedpac", "fedeq", "fedselect")
REFITS, TESTED = (1, 3, 10), "refit 3"
DIGITS, ROUNDS = 30, 60  # rounds of the column of digits, and of the others
KEPT = Path("docs/results/stale-heads")
CNN = {"name": "cnn", "channels": [16, 32], "hidden": 256}
DEALT_100 = {"use": "train", "clients": 100, "max_samples": 100, "partition": "classes"}
RESNET = {"name": "resnet18", "width": 16, "stem": "imagenet"}
TWO_CLASSES = {"source": "cifar10", "clients": 10, "partition": "classes", "classes_per_client": 2} | {
    "samples_per_client": 1000,
    "test": 0.5,
    "val": 0.1,
    "max_train": 100,
}
COLUMNS: dict[str, dict[str, Any]] = {
    "digits": {
        "data": {"source": "digits", "clients": 10, "partition": "dirichlet", "alpha": 0.3},
        "model": {"name": "mlp", "hidden": [32]},
    },
    "cifar10": {
        "data": {"source": "cifar10", "use": "train", "clients": 20, "max_samples": 100}
        | {"partition": "classes", "classes_per_client": 2},
        "model": {"name": "cnn", "channels": [8, 16], "hidden": 64},
        "local": {"lr": 0.05, "batch_size": 20},
        "federation": {"clients_per_round": 5},
    },
    "qmnist": {
        "data": {"source": "qmnist", "use": "train", "clients": 20, "max_samples": 100},
        "model": {"name": "cnn", "channels": [8, 16], "hidden": 64},
        "local": {"lr": 0.05, "batch_size": 10},
        "federation": {"clients_per_round": 5},
    },
    "cifar10-100": {
        "data": {"source": "cifar10", "classes_per_client": 2} | DEALT_100,
        "model": CNN,
        "local": {"lr": 0.05, "batch_size": 20},
        "federation": {"clients_per_round": 10},
    },
    "cifar100-100": {
        "data": {"source": "cifar100", "classes_per_client": 5} | DEALT_100,
        "model": CNN,
        "local": {"lr": 0.05, "batch_size": 20},
        "federation": {"clients_per_round": 10},
    },
    "resnet-group": {"data": TWO_CLASSES, "model": RESNET | {"norm": "group"}, "local": {"batch_size": 32}},
    "resnet-batch": {"data": TWO_CLASSES, "model": RESNET | {"norm": "batch"}, "local": {"batch_size": 32}},
}
STEPS = [{"lr": lr, "momentum": momentum} for lr in (0.02, 0.1) for momentum in (0.0, 0.9)]
SIZES = [{"lr": lr} for lr in (0.02, 0.05, 0.1, 0.2)]
SEARCHED: dict[str, list[dict[str, float]]] = {
    "resnet-group": STEPS,
    "resnet-batch": STEPS,
    "cifar10-100": SIZES,
    "cifar100-100": SIZES[:3],  # FeDEQ's solver takes twice as long with 0.1
}
SEARCH_ROUNDS = {"resnet-group": 12, "resnet-batch": 12, "cifar10-100": 20, "cifar100-100": 20}
SEARCH_SEED = 1000
EPOCHS = {"cifar10-100": 5, "cifar100-100": 5}  # local epochs where they are not 2


def options_of(column: str, method: str) -> dict[str, int]:
    """On images the same number of local epochs for all, and three of the head where it has a phase of its own."""
    if column == "digits":
        return {}
    epochs = EPOCHS.get(column, 2)
    of_method = {
        "fedavg+ft": {"epochs": epochs, "tune_epochs": 10},
        "fedrep": {"head_epochs": 3, "body_epochs": epochs},
        "fedeq": {"head_epochs": 3, "epochs": epochs},
    }
    return of_method.get(method, {"epochs": epochs})


def experiment(column: str, method: str, seed: int, step: dict[str, float]) -> tuple[Experiment, int]:
    """One method on the clients of one seed, and how many take part in a round."""
    tables = COLUMNS[column] | {"local": COLUMNS[column].get("local", {}) | step}
    if column != "digits" and method == "fedeq":
        tables["model"] = {"name": "deq-resnet-xs"}
    config = parse({"seed": seed} | tables | {"algorithm": {"name": method} | options_of(column, method)})
    return build_experiment(config), config.federation.clients_per_round or config.data.clients


def accuracy(made: Experiment, models: dict[int, Params], split: str) -> list[float]:
    """Of the clients that have samples in the split, in percent."""
    each = [evaluate(made, [c], m, [split], is_stacked=False)[split]["accuracy"].item() for c, m in models.items()]
    return [100 * v for v in each if v == v]


def trained(made: Experiment, asked: int, rounds: int) -> tuple[Tree, dict[int, Tree], dict[int, Tree]]:
    """The server's state, the private states and buffers, and what each client sent last."""
    sent: dict[int, Tree] = {}
    with engines.open_engine("loop", made) as engine:
        call = engine.call

        def recording(request: Call, clients: Sequence[int]) -> Iterator[Reply]:
            for reply in call(request, clients):
                if reply.tree is not None:
                    sent[reply.clients[0]] = tree_map(lambda v: v[0].clone(), reply.tree)
                yield reply

        engine.call = recording  # type: ignore[method-assign, assignment]
        fed, server = Federation(engine), made.algorithm.server_init(made.model)
        for round in range(1, rounds + 1):
            cohort = sorted(stream(made.seed, round, "cohort").permutation(len(made.data.clients))[:asked].tolist())
            server = fed.run_round(round, cohort, server)
        rows = engine.get_states()
        states = {c: tree_map(lambda v, c=c: v[c].clone(), rows) for c in range(len(made.data.clients))}
    return server, states, sent


def before(method: str, kept: Tree, sent: Tree, wanted: set[str]) -> Params | None:
    """The client's own model before the average, from what it keeps and what it sent."""
    state = kept["state"]
    if method == "fedselect":
        return kept["buffers"] | state["v"]
    part = sent[0] if isinstance(sent, tuple) else None
    own = part | state if isinstance(part, dict) and isinstance(state, dict) else {}
    return kept["buffers"] | own if wanted <= own.keys() else None


def measured(column: str, method: str, seed: int) -> dict[str, list[float]]:
    """Accuracy of each client in percent, by way; from an earlier run if there is one."""
    return _kept(f"{column}-{method}-{seed}", lambda: _run(column, method, seed, best_step(column, method), "test"))


def best_step(column: str, method: str) -> dict[str, float]:
    """Of the settings to search, the one with the best validation accuracy after a few rounds with another seed."""
    if column not in SEARCHED:
        return {}

    def search() -> dict[str, float]:
        trials = []
        for step in SEARCHED[column]:
            try:
                trials.append(mean(_last(_run(column, method, SEARCH_SEED, step, "val", SEARCH_ROUNDS[column]))))
            except UserError:  # diverged
                trials.append(0.0)
        print(f"{column} {method}: {list(zip(SEARCHED[column], trials, strict=True))}", file=sys.stderr, flush=True)
        return SEARCHED[column][trials.index(max(trials))]

    return _kept(f"{column}-{method}-search", search)


def _last(run: dict[str, list[float]]) -> list[float]:
    """As a method is compared: with three more epochs of its private part, if it has one."""
    return run.get(TESTED, run["served"])


def _kept(name: str, compute: Callable[[], Kept]) -> Kept:
    path = KEPT / f"{name}.json"
    if not path.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(compute()), encoding="utf-8")
    kept: Kept = json.loads(path.read_text(encoding="utf-8"))
    return kept


def _run(
    column: str, method: str, seed: int, step: dict[str, float], split: str, rounds: int = 0
) -> dict[str, list[float]]:
    made, asked = experiment(column, method, seed, step)
    rounds = rounds or (DIGITS if column == "digits" else ROUNDS)
    server, states, sent = trained(made, asked, rounds)

    def served(client: int, epochs: int = 0) -> Params:
        """A client's model, refitted or not, with the statistics that it has after that."""
        n = torch.tensor(float(made.data.train.sizes[client]))
        state, buffers = states[client]["state"], states[client]["buffers"]
        me = ClientContext(made, [client], ("refit", method), rounds, n, state, buffers, None)
        params = algorithm.refitted(me, server, epochs) if epochs else algorithm.personal(me, server)
        return me.buffers | params

    algorithm, names = made.algorithm, set(made.model.params)
    with torch.no_grad():
        ways = {"served": {c: served(c) for c in states}}
        if algorithm.keeps in PARTIAL:
            own = {c: m for c in sent if (m := before(method, states[c], sent[c], names)) is not None}
            ways |= {"before": own} if len(own) == len(states) else {}
            ways |= {f"refit {k}": {c: served(c, k) for c in states} for k in REFITS}
    return {way: accuracy(made, models, split) for way, models in ways.items()}


Runs = dict[str, list[dict[str, list[float]]]]  # by method, a run per seed


def tested(runs: Runs) -> list[str]:
    """Of every method with a private part: three epochs against none, over the clients of all seeds."""
    whole = {method: each for method, each in runs.items() if all(TESTED in run for run in each)}
    return _lines({method: (_pooled(each, TESTED), _pooled(each, "served")) for method, each in whole.items()})


def against_the_best(runs: Runs) -> tuple[str, list[str]]:
    """The method that serves best, and how it does against each of the others."""
    served = {method: np.concatenate([_last(run) for run in each]) for method, each in runs.items()}
    best = max(served, key=lambda method: float(served[method].mean()))
    return best, _lines({method: (served[best], values) for method, values in served.items() if method != best})


def _pooled(each: list[dict[str, list[float]]], way: str) -> NDArray[np.float64]:
    return np.concatenate([run[way] for run in each])


def _lines(pairs: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]) -> list[str]:
    ps = [signed_ranks(first - second) for first, second in pairs.values()]
    return [
        f"- {method}: better for {int((first > second).sum())}, worse for {int((first < second).sum())} of "
        f"{len(first)} clients, p = {p:.2g}, corrected {corrected:.2g}"
        for (method, (first, second)), p, corrected in zip(pairs.items(), ps, holm(ps), strict=True)
    ]


def main() -> None:
    """Print a table for docs/results/stale-heads.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("columns", nargs="*", default=list(COLUMNS), metavar="COLUMN")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ways = ["served", "before", *(f"refit {k}" for k in REFITS)]
    for column in asked.columns:
        print(f"{column}:\n\n| method | " + " | ".join(ways) + " |\n|---|" + "---:|" * len(ways), flush=True)
        runs: Runs = {}
        for method in asked.methods:
            runs[method] = [measured(column, method, seed) for seed in range(asked.seeds)]
            cells = [[mean(run[way]) for run in runs[method] if way in run] for way in ways]
            spread = [f" ± {stdev(c):.2f}" if len(c) > 1 else "" for c in cells]
            shown = [f"{mean(c):.2f}{s}" if c else "" for c, s in zip(cells, spread, strict=True)]
            print(f"| {method} | " + " | ".join(shown) + " |", flush=True)
        best, others = against_the_best(runs)
        print("\nThree epochs against none:\n\n" + "\n".join(tested(runs)))
        print(f"\n{best} against:\n\n" + "\n".join(others) + "\n", flush=True)


if __name__ == "__main__":
    main()
