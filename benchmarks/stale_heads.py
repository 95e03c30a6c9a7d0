"""Private parts that are served on a newer common part: python benchmarks/stale_heads.py [COLUMN ...] [--seeds 3]

A client fits its head (or its own entries) to the common model that it was sent. Then the server averages, and the
client is served with its part on the new average, which it has never seen. Test accuracy, mean over clients and seeds:

- served: what `personal` gives, the private part on the newest common part;
- before: the client's model as it was at the end of its local training in its last round, before the average;
- refit k: served with `local.refit = k`, after k further epochs of the private part with the common part held still.

Columns: "digits", 10 clients with Dirichlet 0.3 that all take part in each of 30 rounds, an MLP of 32; "cifar10", 20
clients with two classes each and at most 100 images, of which 5 take part in each of 30 rounds, a small CNN (FeDEQ: its
equilibrium network). A run is trained once; only what is served differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import mean, stdev
from typing import Any

import torch

from fedtailor import engines
from fedtailor.core.client import Call
from fedtailor.core.context import ClientContext
from fedtailor.core.engine import Reply
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.experiments.building import build_experiment
from fedtailor.experiments.config import parse
from fedtailor.metrics.evaluation import evaluate

METHODS, ROUNDS, REFITS = ("fedper", "fedrep", "lg-fedavg", "fedpac", "fedeq", "fedselect"), 30, (1, 3, 10)
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
}
OPTIONS = {"fedrep": {"head_epochs": 3}, "fedeq": {"epochs": 2}}  # on CIFAR-10; one epoch for the others


def experiment(column: str, method: str, seed: int) -> tuple[Experiment, int]:
    """One method on the clients of one seed, and how many take part in a round."""
    tables = dict(COLUMNS[column])
    options = OPTIONS.get(method, {}) if column == "cifar10" else {}
    if (column, method) == ("cifar10", "fedeq"):
        tables["model"] = {"name": "deq-resnet-xs"}
    config = parse({"seed": seed} | tables | {"algorithm": {"name": method} | options})
    return build_experiment(config), config.federation.clients_per_round or config.data.clients


def accuracy(made: Experiment, models: dict[int, Params]) -> float:
    """Mean over the clients that have test samples."""
    found = [evaluate(made, [c], m, ["test"], is_stacked=False)["test"]["accuracy"].item() for c, m in models.items()]
    return 100 * mean(v for v in found if v == v)


def trained(made: Experiment, asked: int) -> tuple[Tree, dict[int, Tree], dict[int, Tree]]:
    """The server's state, the private states, and what each client sent last."""
    sent: dict[int, Tree] = {}
    with engines.opened("loop", made) as engine:
        call = engine.call

        def recording(request: Call, clients: Sequence[int]) -> Iterator[Reply]:
            for reply in call(request, clients):
                if reply.tree is not None:
                    sent[reply.clients[0]] = tree_map(lambda v: v[0].clone(), reply.tree)
                yield reply

        engine.call = recording  # type: ignore[method-assign, assignment]
        fed, server = Federation(engine), made.algorithm.server_init(made.model)
        for round in range(1, ROUNDS + 1):
            cohort = sorted(stream(made.seed, round, "cohort").permutation(len(made.data.clients))[:asked].tolist())
            server = fed.run_round(round, cohort, server)
        rows = engine.get_states()["state"]
        states = {c: tree_map(lambda v, c=c: v[c].clone(), rows) for c in range(len(made.data.clients))}
    return server, states, sent


def before_the_average(method: str, state: Tree, sent: Tree, wanted: set[str]) -> Params | None:
    """The client's own model, from its private state and what it sent."""
    if method == "fedselect":
        return dict(state["v"])
    part = sent[0] if isinstance(sent, tuple) else None
    own = part | state if isinstance(part, dict) else {}
    return own if wanted <= own.keys() else None


def measured(column: str, method: str, seed: int) -> dict[str, float]:
    """Accuracy in percent, by way."""
    made, asked = experiment(column, method, seed)
    server, states, sent = trained(made, asked)

    def me(client: int) -> ClientContext:
        n = torch.tensor(float(made.data.train.sizes[client]))
        return ClientContext(made, [client], ("refit", method), ROUNDS, n, states[client], {}, None)

    with torch.no_grad():
        ways = {"served": {c: made.algorithm.personal(me(c), server) for c in states}}
        names = set(made.model.params)
        own = {c: m for c in sent if (m := before_the_average(method, states[c], sent[c], names)) is not None}
        ways |= {"before": own} if len(own) == len(states) else {}
        ways |= {f"refit {k}": {c: made.algorithm.refitted(me(c), server, k) for c in states} for k in REFITS}
    return {way: accuracy(made, models) for way, models in ways.items()}


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
        print(f"{column}:\n\n| method | " + " | ".join(ways) + " |\n|---|" + "---|" * len(ways), flush=True)
        for method in asked.methods:
            runs = [measured(column, method, seed) for seed in range(asked.seeds)]
            cells = [[run[way] for run in runs if way in run] for way in ways]
            spread = [f" ± {stdev(c):.2f}" if len(c) > 1 else "" for c in cells]
            shown = [f"{mean(c):.2f}{s}" if c else "" for c, s in zip(cells, spread, strict=True)]
            print(f"| {method} | " + " | ".join(shown) + " |", flush=True)
        print(flush=True)


if __name__ == "__main__":
    main()
