"""The client's half: run a function of the algorithm beside the data, and pull cotangents back through it.

`members` are the clients that run together: one, whose trees are its own, or (`is_stacked`) many, whose trees carry a
leading client dimension. Both go through the same text of the algorithm.

Where the architectures of clients differ, a private state has a part for each of them, so that all states have one
form. Members have the same architecture; only its part is theirs, the others are zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.algorithm import client_functions
from fedtailor.core.context import ClientContext, OptimizerState
from fedtailor.core.experiment import Experiment
from fedtailor.core.model import PRIOR, label_prior
from fedtailor.core.random import seeded, undrawn
from fedtailor.core.reduce import Call
from fedtailor.core.trees import Params, Tree, as_tensors, detach, items, leaves, rebuild, tree_map

OWN, OPTIMIZER = "own", "optimizer"  # parts of a private state, where clients keep the state of their optimizers


@dataclass(frozen=True)
class Outcome:
    """State and buffers to keep, reply to send. With a tape also the inputs that the outputs can be traced to."""

    state: Tree
    buffers: Tree  # named tensors, or those of each architecture
    reply: Tree
    inputs: tuple[Tree, ...] | None = None


def invoke(
    experiment: Experiment,
    members: Sequence[int],
    call: Call,
    state: Tree,
    buffers: Tree,
    grad: Tree,
    *,
    is_stacked: bool,
) -> Outcome:
    """Run `call` for `members`; `call.args` that are placed hold the rows of exactly these members."""
    if call.function not in client_functions(experiment.algorithm):
        raise LookupError(f"{call.function} is not a client function of {type(experiment.algorithm).__name__}")
    fn = getattr(experiment.algorithm, call.function)

    def client(me: ClientContext, args: tuple[Tree, ...]) -> Tree:
        if me.optimizers is not None:
            me.optimizers.function = call.function
        out = fn(me, *args)
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"{call.function} must return (private state, reply)")
        new = out[0] if me.optimizers is None else {OWN: out[0], OPTIMIZER: me.optimizers.slots}
        reply = out[1]
        for step in experiment.aggregation.at_client:
            reply = step.apply(reply, args, call.placed)
        return new, reply

    args, kept = call.args, state
    if call.taped:
        kept, args = _watch(state), _watch(args)
    own = experiment.architecture(members[0])
    with torch.set_grad_enabled(call.taped):
        (new_state, reply), new_buffers = _run(
            experiment.at(members[0]),
            members,
            call.key(experiment.seed),
            call.round,
            _part(kept, own),
            _part(buffers, own),
            _part(grad, own),
            args,
            call.placed,
            client,
            is_stacked,
        )
    if own is not None:
        new_state, new_buffers = kept | {own: new_state}, buffers | {own: new_buffers}
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
    by_input: tuple[Tensor | None, ...] = (None,) * len(watched)
    if pairs and watched:
        by_input = torch.autograd.grad([o for o, _ in pairs], watched, [c for _, c in pairs], allow_unused=True)
    each = iter(by_input)
    gradients = [(next(each) if v.requires_grad else None) for v in inputs]
    filled = (torch.zeros_like(v) if g is None else g for v, g in zip(inputs, gradients, strict=True))
    state, args = rebuild(outcome.inputs, filled)
    return state, args


def initial(
    experiment: Experiment, members: Sequence[int], server: Tree = None, *, is_stacked: bool
) -> tuple[Tree, Tree]:
    """Private state and buffers of new clients; with `server`, of newcomers to a federation already trained."""
    if experiment.by_architecture:
        name = experiment.architecture(members[0])
        parts = {k: initial(e, members, server, is_stacked=is_stacked) for k, e in experiment.by_architecture.items()}
        parts |= {k: tree_map(torch.zeros_like, part) for k, part in parts.items() if k != name}
        return {k: state for k, (state, _) in parts.items()}, {k: buffers for k, (_, buffers) in parts.items()}

    def client(me: ClientContext, args: tuple[Tree, ...]) -> Tree:
        return (
            experiment.algorithm.client_init(me) if server is None else experiment.algorithm.onboard_init(me, args[0])
        )

    each = [dict(experiment.model.private_buffers) for _ in members]
    for member, own in zip(members, each, strict=True):
        if PRIOR in own:
            own[PRIOR] = label_prior(experiment.data.train.targets(member).to(experiment.device), own[PRIOR])
    buffers = {k: torch.stack([own[k] for own in each]) for k in each[0]} if is_stacked else each[0]
    key = (experiment.seed, "init")
    state, buffers = _run(
        experiment,
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
    if experiment.optimizer_state is None:
        return state, buffers
    first = experiment.optimizer_state
    stack = tree_map(lambda v: v.expand(len(members), *v.shape) if is_stacked else v, first)
    return {OWN: state, OPTIMIZER: stack}, buffers


def personal(
    experiment: Experiment,
    members: Sequence[int],
    round: int,
    state: Tree,
    buffers: Tree,
    server: Tree,
    *,
    is_stacked: bool,
) -> Params:
    """The complete tensors with which each member predicts, private buffers included."""

    def client(me: ClientContext, args: tuple[Tree, ...]) -> Tree:
        epochs, algorithm = experiment.solver.refit, experiment.algorithm
        params = algorithm.refitted(me, args[0], epochs) if epochs else algorithm.personal(me, args[0])
        return {k: v for k, v in me.buffers.items() if k not in params} | params

    key, own = (experiment.seed, round, "personal"), experiment.architecture(members[0])
    mine = _part(state, own), _part(buffers, own), None
    experiment = experiment.at(members[0])
    with torch.no_grad():
        return _run(experiment, members, key, round, *mine, (server,), (False,), client, is_stacked)[0]


def onboard(experiment: Experiment, member: int, server: Tree, epochs: int) -> Params:
    """The complete tensors with which a client predicts that comes to a federation already trained."""
    experiment = experiment.at(member)
    state, buffers = initial(experiment, [member], server, is_stacked=False)

    def client(me: ClientContext, args: tuple[Tree, ...]) -> Tree:
        params = experiment.algorithm.onboard(me, args[0], epochs)
        return {k: v for k, v in me.buffers.items() if k not in params} | params

    key = (experiment.seed, "onboard")
    with torch.no_grad():
        return _run(experiment, [member], key, 0, state, buffers, None, (server,), (False,), client, False)[0]


def shares(experiment: Experiment, member: int, state: Tree, buffers: Tree, server: Tree) -> tuple[Params, Params]:
    """How much of each parameter of a client is common (0 is its own, 1 the common one), and its effective degrees."""

    def client(me: ClientContext, args: tuple[Tree, ...]) -> Tree:
        return experiment.algorithm.shares(me, args[0]), experiment.algorithm.effective_degrees(me, args[0])

    key, own = (experiment.seed, "shares"), experiment.architecture(member)
    mine = _part(state, own), _part(buffers, own), None
    with torch.no_grad():
        return _run(experiment.at(member), [member], key, 0, *mine, (server,), (False,), client, False)[0]


def _run(
    experiment: Experiment,
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
    sizes = experiment.model.like.new_tensor(experiment.data.train.bounds(members)[1])
    mine = (state, buffers, grad)
    flat_mine, flat_args = leaves(mine), leaves(args)
    shape: Tree = None
    origin: list[int | None] = []

    def body(n: Tensor, flat: list[Tensor], args: tuple[Tree, ...]) -> tuple[Tensor, ...]:
        """Returns the new leaves only: what a client hands back as it was need not be computed, checked or written."""
        nonlocal shape, origin
        state, buffers, grad = rebuild(mine, iter(flat))
        me = ClientContext(experiment, members, key, round, n, _own(state), buffers, _own(grad))
        if _own(state) is not state:
            me.optimizers = OptimizerState(state[OPTIMIZER])
        shape = as_tensors((client(me, args), me.buffers), n)
        place = {id(leaf): i for i, leaf in enumerate(flat)}
        outputs = leaves(shape)
        origin = [place.get(id(leaf)) for leaf in outputs]
        return n, *(leaf for leaf, i in zip(outputs, origin, strict=True) if i is None)

    with _unwritten(experiment, {"state": state, "buffers": buffers, "grad": grad, "message": args}):
        if is_stacked:
            dims = [0 if p else None for arg, p in zip(args, placed, strict=True) for _ in items(arg)]
            with undrawn(experiment.device):
                out = torch.func.vmap(
                    lambda n, m, a: body(n, m, rebuild(args, iter(a))),
                    in_dims=(0, 0 if flat_mine else None, dims or None),
                )(sizes, flat_mine, flat_args)
        else:
            with seeded(*key, experiment.data.clients[members[0]], "generators", device=experiment.device):
                out = body(sizes[0], flat_mine, args)
    fresh = iter(out[1:])
    outputs, new_buffers = rebuild(shape, (next(fresh) if i is None else flat_mine[i] for i in origin))
    return outputs, new_buffers


def _part(tree: Tree, architecture: str | None) -> Tree:
    return tree if tree is None or architecture is None else tree[architecture]


def _own(state: Tree) -> Tree:
    """What an algorithm knows of a private state."""
    return state[OWN] if isinstance(state, dict) and state.keys() == {OWN, OPTIMIZER} else state


@contextmanager
def _unwritten(experiment: Experiment, given: Tree) -> Iterator[None]:
    """Refuse functions that write into what they are given: others have the same tensors, and undo relies on them."""
    data = {s: getattr(experiment.data, s).tensors for s in ("train", "val")}
    before = [(path, v, v._version) for path, v in items(given | data)]
    model = experiment.model
    constants = [(k, v, v._version) for k, v in model.constants.items()]
    yield
    now = dict(model.module.named_buffers()) if constants else {}
    for name, v, version in constants:
        if now.get(name) is not v or v._version != version:
            raise TypeError(f'forward changes the buffer "{name}", which all clients share; make it floating point')
    for path, v, version in before:
        if v._version != version:
            raise TypeError(f'"{path}" was changed in place; make a new tensor, such as x = x + 1 in place of x += 1')


def _watch(tree: Tree) -> Tree:
    """Leaves of a gradient graph: copies that record what is done with them."""
    return tree_map(lambda v: v.detach().requires_grad_() if v.is_floating_point() else v, tree)
