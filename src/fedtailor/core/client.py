"""The client's half: run a function of the algorithm beside the data, and pull cotangents back through it.

`members` are the clients that run together: one, whose trees are its own, or (`is_stacked`) many, whose trees carry a
leading client dimension. Both go through the same text of the algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.algorithm import client_functions
from fedtailor.core.me import Me, Setting
from fedtailor.core.model import PRIOR, label_prior
from fedtailor.core.trees import Params, Tree, as_tensors, detach, items, leaves, rebuild, tree_map
from fedtailor.local.batches import whole
from fedtailor.privacy.noise import clipped


@dataclass(frozen=True)
class Call:
    """One call to the cohort: which function, when, and the message."""

    function: str
    round: int
    number: int  # of the call within its round
    args: tuple[Tree, ...]
    placed: tuple[bool, ...]  # per argument: one row per client, or the same for all
    taped: bool = False
    sealed: float | None = None  # the reply stays at the client, to be summed there; its largest norm

    def key(self, seed: int) -> tuple[str | int, ...]:
        """Begins the name of every random stream that the call uses."""
        return seed, self.round, self.number, self.function

    @property
    def header(self) -> dict[str, Any]:
        """What a request says beside its message."""
        header = {
            "function": self.function,
            "round": self.round,
            "call": self.number,
            "placed": list(self.placed),
            "taped": self.taped,
        }
        return header if self.sealed is None else header | {"sealed": self.sealed}

    @property
    def reply_header(self) -> dict[str, Any]:
        """What a reply, or a cotangent that travels back, says beside its tensors."""
        return {"round": self.round, "call": self.number}


@dataclass(frozen=True)
class Outcome:
    """State and buffers to keep, reply to send. With a tape also the inputs that the outputs can be traced to."""

    state: Tree
    buffers: Params
    reply: Tree
    inputs: tuple[Tree, ...] | None = None


def invoke(
    setting: Setting,
    members: Sequence[int],
    call: Call,
    state: Tree,
    buffers: Params,
    grad: Tree,
    *,
    is_stacked: bool,
) -> Outcome:
    """Run `call` for `members`; `call.args` that are placed hold the rows of exactly these members."""
    if call.function not in client_functions(setting.algorithm):
        raise LookupError(f"{call.function} is not a client function of {type(setting.algorithm).__name__}")
    fn = getattr(setting.algorithm, call.function)

    def client(me: Me, args: tuple[Tree, ...]) -> Tree:
        out = fn(me, *args)
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"{call.function} must return (private state, reply)")
        if setting.clip:
            return out[0], clipped(out[1], args, call.placed, setting.clip)
        return out

    args, kept = call.args, state
    if call.taped:
        kept, args = _watched(state), _watched(args)
    with torch.set_grad_enabled(call.taped):
        (new_state, reply), new_buffers = _run(
            setting,
            members,
            call.key(setting.seed),
            call.round,
            kept,
            buffers,
            grad,
            args,
            call.placed,
            client,
            is_stacked,
        )
    if call.taped:
        return Outcome(new_state, detach(new_buffers), reply, (kept, args))
    return Outcome(new_state, new_buffers, reply)


def pull_back(outcome: Outcome, state_cotangent: Tree | None, reply_cotangent: Tree) -> tuple[Tree, tuple[Tree, ...]]:
    """Cotangents of the inputs (state, args) of a taped call from those of its outputs. Integers have none (zeros)."""
    assert outcome.inputs is not None
    outs = leaves((outcome.state, outcome.reply))
    if state_cotangent is None:
        state_cotangent = tree_map(torch.zeros_like, outcome.state)
    cotangents = leaves((state_cotangent, reply_cotangent))
    pairs = [(o, c) for o, c in zip(outs, cotangents, strict=True) if o.requires_grad]
    inputs = leaves(outcome.inputs)
    watched = [v for v in inputs if v.requires_grad]
    found: tuple[Tensor | None, ...] = (None,) * len(watched)
    if pairs and watched:
        found = torch.autograd.grad([o for o, _ in pairs], watched, [c for _, c in pairs], allow_unused=True)
    each = iter(found)
    gradients = [(next(each) if v.requires_grad else None) for v in inputs]
    filled = (torch.zeros_like(v) if g is None else g for v, g in zip(inputs, gradients, strict=True))
    state, args = rebuild(outcome.inputs, filled)
    return state, args


def initial(setting: Setting, members: Sequence[int], server: Tree = None, *, is_stacked: bool) -> tuple[Tree, Params]:
    """Private state and buffers of new clients; with `server`, of clients that join a federation already trained."""

    def client(me: Me, args: tuple[Tree, ...]) -> Tree:
        return setting.algorithm.client_init(me) if server is None else setting.algorithm.join(me, args[0])

    each = [dict(setting.model.private_buffers) for _ in members]
    for member, own in zip(members, each, strict=True):
        if PRIOR in own:
            own[PRIOR] = label_prior(setting.data.train.of(member)[1], own[PRIOR])
    buffers = {k: torch.stack([own[k] for own in each]) for k in each[0]} if is_stacked else each[0]
    key = (setting.seed, "init")
    state, buffers = _run(
        setting,
        members,
        key,
        -1,
        {},
        buffers,
        None,
        (server,),
        (False,),
        client,
        is_stacked,
    )
    return state, buffers


def personal(
    setting: Setting,
    members: Sequence[int],
    round: int,
    state: Tree,
    buffers: Params,
    server: Tree,
    *,
    is_stacked: bool,
) -> Params:
    """The complete tensors with which each member predicts, private buffers included."""

    def client(me: Me, args: tuple[Tree, ...]) -> Tree:
        params = setting.algorithm.personal(me, args[0])
        return {k: v for k, v in me.buffers.items() if k not in params} | params

    key = (setting.seed, round, "personal")
    with torch.no_grad():
        return _run(setting, members, key, round, state, buffers, None, (server,), (False,), client, is_stacked)[0]


def onboard(setting: Setting, member: int, server: Tree, epochs: int) -> Params:
    """The complete tensors with which a client predicts that comes to a federation already trained."""
    state, buffers = initial(setting, [member], server, is_stacked=False)

    def client(me: Me, args: tuple[Tree, ...]) -> Tree:
        params = setting.algorithm.adapt(me, args[0], epochs)
        return {k: v for k, v in me.buffers.items() if k not in params} | params

    key = (setting.seed, "onboard")
    with torch.no_grad():
        return _run(setting, [member], key, 0, state, buffers, None, (server,), (False,), client, False)[0]


def shares(setting: Setting, member: int, state: Tree, buffers: Params, server: Tree) -> tuple[Params, Params]:
    """How much of each parameter of a client is common (0 is its own, 1 the common one), and its effective degrees."""

    def client(me: Me, args: tuple[Tree, ...]) -> Tree:
        return setting.algorithm.shares(me, args[0]), setting.algorithm.effective_degrees(me, args[0])

    key = (setting.seed, "shares")
    with torch.no_grad():
        return _run(setting, [member], key, 0, state, buffers, None, (server,), (False,), client, False)[0]


def evaluate(
    setting: Setting,
    members: Sequence[int],
    model: Params,
    splits: Sequence[str],
    *,
    is_stacked: bool,
    batch: int = 256,
) -> dict[str, dict[str, Tensor]]:
    """Per split and metric the value of each member; not a number where it has no samples."""

    def predict(model: Params, x: Tensor) -> Tensor:
        return setting.algorithm.predict(setting.model, model, x)

    out = {}
    for split in splits:
        rows = getattr(setting.data, split)
        starts, sizes = rows.bounds(members)
        totals: dict[str, Tensor] = {}
        for part in whole(starts, sizes, batch, setting.model.dtype):
            at = part.rows.clamp(max=len(rows.x) - 1)
            x, y = rows.x[at], rows.y[at]
            weight = torch.ones(at.shape, dtype=setting.model.dtype) if part.weight is None else part.weight
            with torch.no_grad():
                output = torch.func.vmap(predict)(model, x) if is_stacked else predict(model, x[0])[None]
            for name, values in _measure(setting, output, y).items():
                known = torch.where(weight > 0, values.double() * weight, 0.0)  # an error without limit, too
                totals[name] = totals.get(name, torch.zeros(len(members), dtype=torch.float64)) + known.sum(1)
        count = torch.tensor(sizes, dtype=torch.float64)
        metrics = {name: total / count for name, total in totals.items()}
        for name in METRICS[setting.data.task]:
            metrics.setdefault(name, torch.full((len(members),), torch.nan, dtype=torch.float64))
        if "rmse" in metrics:
            metrics["rmse"] = metrics["rmse"].sqrt()
        out[split] = metrics
    return out


METRICS = {"classification": ("accuracy", "loss"), "regression": ("rmse", "mse")}
"""Metrics of a task; the first is the one that counts."""

HIGHER_IS_BETTER = {"accuracy": True, "loss": False, "rmse": False, "mse": False}


def _measure(setting: Setting, output: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Of every sample. A prediction that is not a number is wrong, by any measure."""
    loss = setting.loss(output.flatten(0, 1), y.flatten(0, 1)).reshape(y.shape[:2])
    loss = torch.where(loss.isnan(), torch.inf, loss)
    if setting.data.task == "classification":
        return {"loss": loss, "accuracy": (output.argmax(-1) == y) & ~output.isnan().any(-1)}
    return {"mse": loss, "rmse": loss}


def _run(
    setting: Setting,
    members: Sequence[int],
    key: tuple[str | int, ...],
    round: int,
    state: Tree,
    buffers: Params,
    grad: Tree,
    args: tuple[Tree, ...],
    placed: tuple[bool, ...],
    client: Any,
    is_stacked: bool,
) -> tuple[Tree, Params]:
    """Call `client(me, args)` for one client or, with vmap, for a stack; returns its trees and the buffers after it."""
    sizes = torch.tensor(setting.data.train.bounds(members)[1], dtype=setting.model.dtype)
    mine = (state, buffers, grad)
    flat_mine, flat_args = leaves(mine), leaves(args)
    shape: Tree = None
    origin: list[int | None] = []

    def body(n: Tensor, flat: list[Tensor], args: tuple[Tree, ...]) -> tuple[Tensor, ...]:
        """Returns the new leaves only: what a client hands back as it was need not be computed, checked or written."""
        nonlocal shape, origin
        me = Me(setting, members, key, round, n, *rebuild(mine, iter(flat)))
        shape = as_tensors((client(me, args), me.buffers), n)
        place = {id(leaf): i for i, leaf in enumerate(flat)}
        made = leaves(shape)
        origin = [place.get(id(leaf)) for leaf in made]
        return n, *(leaf for leaf, i in zip(made, origin, strict=True) if i is None)

    if is_stacked:
        dims = [0 if p else None for arg, p in zip(args, placed, strict=True) for _ in items(arg)]
        out = torch.func.vmap(
            lambda n, m, a: body(n, m, rebuild(args, iter(a))),
            in_dims=(0, 0 if flat_mine else None, dims or None),
        )(sizes, flat_mine, flat_args)
    else:
        out = body(sizes[0], flat_mine, args)
    fresh = iter(out[1:])
    made, new_buffers = rebuild(shape, (next(fresh) if i is None else flat_mine[i] for i in origin))
    return made, new_buffers


def _watched(tree: Tree) -> Tree:
    """Leaves of a gradient graph: copies that record what is done with them."""
    return tree_map(lambda v: v.detach().requires_grad_() if v.is_floating_point() else v, tree)
