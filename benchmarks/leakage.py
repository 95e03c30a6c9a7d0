"""What replies and models tell: rows read back, and who took part. python -m benchmarks.leakage writes a page.

Inversion. The server knows the model that it sent and the reply. For a dense first layer the change of a unit's weights
over the change of its bias is a mean of the samples that the unit saw, and where it saw one, that sample: every unit
gives a candidate. A row counts as read if a candidate is nearer to it than a tenth of its distance from the mean row.
"guessed" has as many rows of other clients as candidates. After one step on 1 or 8 rows, and after a usual round.

Membership. The loss of a model on training rows against test rows of the same client: the area under the ROC curve
(50: no better than chance), mean over clients. The model is a single reply, the mean of all (what a secure sum shows),
the mean with clipping and noise, or a client's personal model that was handed on. Where a method keeps the head, the
attacker fits one on test rows of the other clients.

docs/results/leakage.md; goes on where it was interrupted (build/leakage.json). Needs FEDTAILOR_DATA.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from benchmarks import records
from fedtailor import engines
from fedtailor.core.client import Call
from fedtailor.core.context import ClientContext
from fedtailor.core.data import FederatedData
from fedtailor.core.engine import Reply
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.errors import ConfigError
from fedtailor.experiments.building import assemble, load
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.experiments.store import write_atomically

METHODS = ("fedavg", "fedrep", "learn2pfed-net")
DATA: dict[str, dict[str, Any]] = {
    "heart disease": {"source": "heart-disease"},
    "MNIST": {"source": "mnist", "clients": 10, "partition": "iid", "max_train": 100, "max_samples": 300},
}
EPOCHS = {"fedavg": {"epochs": 1}, "fedrep": {"head_epochs": 1, "body_epochs": 1}, "learn2pfed-net": {"epochs": 1}}
STEPS: dict[str, tuple[int | None, dict[str, Any]]] = {
    "1 row, 1 step": (1, {"batch_size": 64}),
    "8 rows, 1 step": (8, {"batch_size": 64}),
    "a usual round": (None, {"batch_size": 16}),
}
VIEWS = ("reply", "sum", "sum, clip and noise")
CLIP, NOISE, ROUNDS = 1.0, 1.0, 20


@dataclass
class Seen:
    """What is known after some rounds: the last message and replies, the server's state, personal models."""

    message: Params
    replies: dict[int, Params]
    server: Tree
    personal: dict[int, Params]


def experiment(data: str, method: str, seed: int, local: dict[str, Any], rows: int | None, private: bool) -> Experiment:
    """A federation whose clients have at most so many training rows."""
    tables = {"seed": seed, "data": DATA[data] | ({} if rows is None else {"max_train": rows})}
    tables |= {
        "model": {"name": "mlp", "hidden": [64]},
        "local": {"lr": 0.1} | local,
        "algorithm": {"name": method} | EPOCHS[method],
    }
    if private:
        tables["privacy"] = {"clip": CLIP, "noise": NOISE}
    config: RunConfig = parse(tables)
    return assemble(config, rows_of(data, seed, rows))


@cache
def rows_of(data: str, seed: int, rows: int | None) -> FederatedData:
    """The data, read once."""
    tables = {"seed": seed, "data": DATA[data] | ({} if rows is None else {"max_train": rows})}
    return load(parse(tables), None)


def watched(made: Experiment, rounds: int) -> Seen:
    """Run, and look."""
    sent: dict[int, Params] = {}
    message: list[Params] = []
    everybody = range(len(made.data.clients))
    with engines.open_engine("loop", made) as engine:
        call = engine.call

        def recording(request: Call, clients: Sequence[int]) -> Iterator[Reply]:
            message[:] = [tree_map(lambda v: v.clone(), request.args[0])]
            for reply in call(request, clients):
                if reply.tree is not None:
                    parts = reply.tree if isinstance(reply.tree, tuple) else (reply.tree,)
                    sent[reply.clients[0]] = tree_map(lambda v: v[0].clone(), parts[0])
                yield reply

        engine.call = recording  # type: ignore[method-assign, assignment]
        fed, server = Federation(engine), made.algorithm.server_init(made.model)
        for round in range(1, rounds + 1):
            server = fed.run_round(round, everybody, server)
        states = engine.get_states()["state"]

        def personal(client: int) -> Params:
            state = tree_map(lambda v: v[client].clone(), states)
            n = torch.tensor(float(made.data.train.sizes[client]))
            return made.algorithm.personal(ClientContext(made, [client], ("leak",), rounds, n, state, {}, None), server)

        with torch.no_grad():
            own = {c: personal(c) for c in everybody}
    return Seen(message[0], sent, server, own)


def candidates(change: Params) -> Tensor:
    """A row from every unit of the first layer that was changed."""
    weight, bias = (change[k].double() for k in list(change)[:2])
    moved = bias.abs() > 1e-9 * bias.abs().max()
    return weight[moved] / bias[moved][:, None]


def read(rows: Tensor, found: Tensor, center: Tensor) -> float:
    """Share of the rows that a candidate tells, in percent."""
    rows = rows.double().flatten(1)
    if not len(found):
        return 0.0
    nearest = torch.cdist(rows, found).min(1).values / (rows - center).norm(dim=1)
    return 100 * float((nearest < 0.1).double().mean())


def inverted(data: str, method: str, seed: int, step: str) -> dict[str, float]:
    """Rows that were read, by what the attacker sees."""
    rows, local = STEPS[step]
    made = experiment(data, method, seed, local, rows, private=False)
    seen = watched(made, 1)
    center = made.data.test.x.double().flatten(1).mean(0)
    changes = {c: {k: v - seen.message[k] for k, v in reply.items()} for c, reply in seen.replies.items()}
    each = [made.data.train.of(c)[0] for c in changes]
    units = len(next(iter(seen.message.values())))
    others = [made.data.test.of((c + 1) % len(changes))[0][:units] for c in changes]
    norms = {c: torch.cat([v.flatten() for v in move.values()]).norm() for c, move in changes.items()}
    clipped = [{k: v * min(1.0, CLIP / float(norms[c])) for k, v in move.items()} for c, move in changes.items()]
    draw = torch.Generator().manual_seed(seed)
    total = {k: torch.stack([move[k] for move in changes.values()]).sum(0) for k in seen.message}
    drawn = {k: torch.randn(v.shape, generator=draw, dtype=v.dtype) for k, v in seen.message.items()}
    noised = {k: torch.stack([move[k] for move in clipped]).sum(0) + CLIP * NOISE * v for k, v in drawn.items()}
    return {
        "guessed": mean(read(x, o.double().flatten(1), center) for x, o in zip(each, others, strict=True)),
        "reply": mean(read(x, candidates(change), center) for x, change in zip(each, changes.values(), strict=True)),
        "sum": read(torch.cat(each), candidates(total), center),
        "sum, clip and noise": read(torch.cat(each), candidates(noised), center),
    }


def losses(made: Experiment, model: Params, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(made.model(model, x), y, reduction="none")


def with_head(made: Experiment, part: Params, client: int) -> Params:
    """A whole model: what the attacker lacks it fits on test rows of the other clients."""
    missing = {k: v.clone().requires_grad_() for k, v in made.model.params.items() if k not in part}
    if not missing:
        return part
    others = [made.data.test.of(c) for c in range(len(made.data.clients)) if c != client]
    x, y = (torch.cat(parts) for parts in zip(*others, strict=True))
    steps = torch.optim.Adam(missing.values(), 0.02)
    for _ in range(200):
        steps.zero_grad()
        torch.nn.functional.cross_entropy(made.model(part | missing, x), y).backward()
        steps.step()
    return part | {k: v.detach() for k, v in missing.items()}


def area(members: Tensor, others: Tensor) -> float:
    """How often a member's loss is below another row's, in percent."""
    below = (members[:, None] < others[None]).double() + 0.5 * (members[:, None] == others[None]).double()
    return 100 * float(below.mean())


def membership(data: str, method: str, seed: int) -> dict[str, float]:
    """Areas under the curve, by what the attacker has."""

    def areas(made: Experiment, models: dict[int, Params]) -> float:
        return mean(
            area(losses(made, m, *made.data.train.of(c)), losses(made, m, *made.data.test.of(c)))
            for c, m in models.items()
        )

    def common(made: Experiment, seen: Seen) -> float:
        w = seen.server.get("w", seen.server)
        return areas(made, {c: with_head(made, w, c) for c in seen.personal})

    made = experiment(data, method, seed, STEPS["a usual round"][1], None, private=False)
    seen = watched(made, ROUNDS)
    found = {
        "reply": areas(made, {c: with_head(made, reply, c) for c, reply in seen.replies.items()}),
        "sum": common(made, seen),
        "personal": areas(made, seen.personal),
    }
    try:
        made = experiment(data, method, seed, STEPS["a usual round"][1], None, private=True)
    except ConfigError:  # it sums other things than new versions of its messages: noise is refused
        return found
    return found | {"sum, clip and noise": common(made, watched(made, ROUNDS))}


def spread(values: list[float]) -> str:
    return f"{mean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def page(cells: dict[str, dict[str, float]], seeds: list[int], made: str) -> str:
    """Both tables."""

    def row(names: Sequence[str], views: Sequence[str]) -> str:
        runs = [cells[key] for s in seeds if (key := "/".join([*names, str(s)])) in cells]
        if not runs:
            return f"| {' | '.join([*names[1:], *('' for _ in views)])} |"
        told = [spread([run[v] for run in runs]) if all(v in run for run in runs) else "refused" for v in views]
        return f"| {' | '.join([*names[1:], *told])} |"

    views = ("guessed", *VIEWS)
    lines = [f"{made} Mean and spread over seeds; figures without a spread are from one seed.", ""]
    lines += [
        "## Rows recovered by inversion, in percent",
        "",
        f"| data | method | training | {' | '.join(views)} |",
        "|---" * 7 + "|",
    ]
    lines += [row(("inversion", d, m, step), views) for d in DATA for m in METHODS for step in STEPS]
    ways = (*VIEWS, "personal")
    lines += ["", "## Membership inference: area under the ROC curve, in percent", ""]
    lines += [f"| data | method | {' | '.join(ways)} |"]
    lines += ["|---" * 6 + "|", *(row(("membership", d, m), ways) for d in DATA for m in METHODS)]
    return "\n".join([*lines, "", "```sh", "python -m benchmarks.leakage", "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--json", type=Path, default=Path("build/leakage.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/leakage.md"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    cells: dict[str, dict[str, float]] = json.loads(given.json.read_text()) if given.json.exists() else {}
    work = [("inversion", d, m, step, s) for s in given.seeds for d in DATA for m in METHODS for step in STEPS]
    work += [("membership", d, m, "", s) for s in given.seeds for d in DATA for m in METHODS]
    for what, data, method, step, seed in work:
        key = "/".join(filter(None, (what, data, method, step, str(seed))))
        if key not in cells:
            cells[key] = inverted(data, method, seed, step) if what == "inversion" else membership(data, method, seed)
            print(key, cells[key], flush=True)
            write_atomically(given.json, json.dumps(cells, indent=1).encode())
    made = records.note("leakage", "python -m benchmarks.leakage", given.seeds)
    intro = given.page.with_suffix(".intro.md")
    before = intro.read_text() + "\n" if intro.exists() else ""
    write_atomically(given.page, (before + page(cells, given.seeds, made)).encode())


if __name__ == "__main__":
    main()
