"""Means of models as steps of the server: which means are such, and what is remembered of them from round to round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedtailor.core.algorithm import is_model
from fedtailor.core.per_client import PerClient, at_path
from fedtailor.core.trees import Tree, schema

if TYPE_CHECKING:
    from fedtailor.core.federation import Federation


def stepped(fed: Federation, x: PerClient, mean: Tree) -> Tree:
    """What the server makes of a mean: its next model, or the mean itself where that is none of models."""
    experiment = fed.engine.experiment
    steps, sent = experiment.server_steps, sent_for(fed, x)
    if steps is None or sent is None:
        return mean
    assert x.call is not None
    key = ".".join(map(str, (x.call.function, *x.path)))
    own = fed.sums.moments if fed.round > 0 else {}  # a preparation is none of the run's steps
    trained = [k for k in mean if k in experiment.model.trainable]  # statistics are no parameters
    old, new = {k: sent[k] for k in trained}, {k: mean[k] for k in trained}
    moved, fed.sums.new_moments[key] = steps.step(old, new, fed.sums.new_moments.get(key, own.get(key)))
    return mean | moved


def sent_for(fed: Federation, x: PerClient) -> Tree:
    """The model that clients were sent, and whose versions they replied; None if `x` is something else."""
    call, algorithm = x.call, fed.engine.experiment.algorithm
    if call is None or not is_model(algorithm, call.function, x.path):
        return None
    part = at_path(x.example, x.path)
    if not isinstance(part, dict) or not part.keys() & fed.engine.experiment.model.trainable.keys():
        return None
    example = schema(part)
    same = (arg for arg, own in zip(call.args, call.placed, strict=True) if not own and schema(arg) == example)
    return next(same, None)
