"""Private parts that are served on a newer common part: python benchmarks/stale_heads.py

A client fits its head (or its own entries) to the common model that it was sent. Then the server averages, and the
client is served with its part on the new average, which it has never seen. Test accuracy of three ways, on digits (10
clients, Dirichlet 0.3, 30 rounds, an MLP of 32), mean over clients and seeds:

- served: what `personal` gives, the private part on the newest common part;
- before: the client's model as it was at the end of its local training in the last round, before the average;
- refitted: served, after so many further local epochs of the private part with the common part held still.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean, stdev

import torch

from fedtailor import engines
from fedtailor.core.client import Call
from fedtailor.core.context import ClientContext
from fedtailor.core.engine import Reply
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.experiments.building import build_experiment
from fedtailor.experiments.config import parse
from fedtailor.metrics.evaluation import evaluate

METHODS, SEEDS, ROUNDS, REFITS = (
    ("fedper", "fedrep", "lg-fedavg", "fedpac", "fedeq", "fedselect"),
    (0, 1, 2),
    30,
    (1, 3),
)


def experiment(method: str, seed: int) -> Experiment:
    """One method on the digits of one seed."""
    data = {"source": "digits", "clients": 10, "partition": "dirichlet", "alpha": 0.3}
    model = {"name": "mlp", "hidden": [32]}
    return build_experiment(parse({"seed": seed, "data": data, "model": model, "algorithm": {"name": method}}))


def accuracy(made: Experiment, models: dict[int, Params]) -> float:
    """Mean over the clients that have test samples."""
    found = [evaluate(made, [c], m, ["test"], is_stacked=False)["test"]["accuracy"].item() for c, m in models.items()]
    return 100 * mean(v for v in found if v == v)


def trained(made: Experiment) -> tuple[Tree, dict[int, Tree], dict[int, Tree]]:
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
            server = fed.run_round(round, range(len(made.data.clients)), server)
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


def measured(method: str, seed: int) -> dict[str, float]:
    """Accuracy in percent, by way."""
    made = experiment(method, seed)
    server, states, sent = trained(made)

    def me(client: int) -> ClientContext:
        n = torch.tensor(float(made.data.train.sizes[client]))
        return ClientContext(made, [client], ("refit", method), ROUNDS, n, states[client], {}, None)

    with torch.no_grad():
        ways = {"served": {c: made.algorithm.personal(me(c), server) for c in states}}
        names = set(made.model.params)
        own = {c: m for c in states if (m := before_the_average(method, states[c], sent[c], names)) is not None}
        ways |= {"before": own} if len(own) == len(states) else {}
        if method != "fedselect":  # whose newcomers train the whole model
            ways |= {f"refitted {k}": {c: made.algorithm.onboard(me(c), server, k) for c in states} for k in REFITS}
    return {way: accuracy(made, models) for way, models in ways.items()}


def main() -> None:
    """Print a table for docs/results/stale-heads.md."""
    ways = ["served", "before", *(f"refitted {k}" for k in REFITS)]
    print("| method | " + " | ".join(ways) + " |\n|---|" + "---|" * len(ways))
    for method in METHODS:
        runs = [measured(method, seed) for seed in SEEDS]
        cells = [[run[way] for run in runs if way in run] for way in ways]
        print(f"| {method} | " + " | ".join(f"{mean(c):.2f} ± {stdev(c):.2f}" if c else "" for c in cells) + " |")


if __name__ == "__main__":
    main()
