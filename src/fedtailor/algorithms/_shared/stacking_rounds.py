"""How much of each candidate serves a site, settled by sums over sites of what their rows say; rows stay at the site.

A site's weights minimise its loss plus that of `pull` typical rows of the federation, for which the common weights are
best. Predicting folds from the others settles which is taken of one candidate for all, one blend for all, and blends by
site with strong to weak pulls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedtailor.core.algorithm import ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Tree
from fedtailor.numerics import blending, site_gains
from fedtailor.numerics.blending import HELP, KNOWN, NEWTON, OWN_PULLS, ROUNDING, SURELY

if TYPE_CHECKING:
    from fedtailor.algorithms._shared.table_fit import TableFit

OPTIONS = 2 + len(OWN_PULLS)  # one candidate for all, one blend for all, blends by site


class Rows(NamedTuple):
    """What candidates say of a site's rows out of fold [candidates, rows, outputs]; `counts` is 1 where they do."""

    said: Tensor
    y: Tensor
    counts: Tensor
    fold: Tensor
    is_class: bool

    def without(self, part: int) -> Tensor:
        """Rows that a part has; part 0 has all, part p all but those of fold p - 1."""
        return self.counts * (self.fold != part - 1) if part else self.counts

    def divided(self, noise: Tensor) -> Rows:
        return self if self.is_class else self._replace(said=self.said / noise, y=self.y / noise)


def _zeros(*dims: str) -> Any:
    """An example of a reply whose dimensions are "candidates", "folds", "parts", "pulls" or "options"."""

    def example(algorithm: Any, model: Model) -> Tensor:
        sizes = {"folds": algorithm.folds, "parts": algorithm.parts, "candidates": algorithm.candidates}
        sizes |= {"pulls": len(OWN_PULLS), "options": OPTIONS, "sums": site_gains.SUMS}
        sizes |= {"thresholds": 1 + 2 * site_gains.THRESHOLDS}
        return model.like.new_zeros([sizes[dim] for dim in dims])

    return example


ERRORS = ReplySpec("losses of candidates", _zeros("candidates", "folds")).summed()
COUNTS = ReplySpec("rows by fold", _zeros("folds")).summed()
GRADIENTS = ReplySpec("derivatives of the loss by weights", _zeros("parts", "candidates")).summed()
CURVATURES = ReplySpec("derivatives of the loss by weights", _zeros("parts", "candidates", "candidates")).summed()
OWN = ReplySpec("derivatives of the loss by weights", _zeros("parts", "pulls", "candidates", "candidates")).summed()
LOSSES = ReplySpec("losses of candidates", _zeros("options")).summed()
CERTAINTY = ReplySpec("moments of gains", _zeros("sums")).summed()
BELOW = ReplySpec("moments of gains", _zeros("thresholds")).summed()
WEIGHTS = ReplySpec("weights of candidates", _zeros("candidates")).summed()


def _alone(program: TableFit, like: Tensor) -> Tensor:
    """The weights of a site that keeps its own model."""
    return (torch.arange(program.candidates, device=like.device) == 0).to(like.dtype)


def first_state(program: TableFit, me: ClientContext) -> dict[str, Tensor]:
    """What a site keeps of its blend."""
    zero = me.n.to(me.model.dtype) * 0
    own = _alone(program, zero)
    return {
        "noise": zero + 1,
        "here": zero,
        "weights": zero + own.expand(program.parts, OPTIONS, -1),
        "taken": zero + zero.new_zeros(OPTIONS),
        "gain": zero + zero.new_zeros(4),  # as `site_gains.Gains`
        "sure": zero + zero.new_zeros(2),  # mean and standard error, shrunk
        "served": zero + own,
    }


def _rows(self: TableFit, me: ClientContext) -> Rows:
    """The site's rows in units of its noise; none if it missed a candidate."""
    rows = self.rows(me)
    return rows._replace(counts=rows.counts * me.state["here"]).divided(me.state["noise"])


def _by_fold(rows: Rows, losses: Tensor, folds: int) -> Tensor:
    at = (rows.fold[:, None] == torch.arange(folds, device=rows.fold.device)).to(losses.dtype)
    return (losses * rows.counts) @ at


@on_client(sends=(ERRORS, COUNTS))
def errors(self: TableFit, me: ClientContext, allowed: Tensor) -> tuple[Tree, Tree]:
    """Losses of each candidate; a site that missed one takes no part in the choice."""
    here = (me.state["solved"] >= allowed[:, None]).all().to(me.state["noise"].dtype)
    state = me.state | {"here": here, "noise": torch.ones_like(me.state["noise"])}
    rows = self.rows(me)
    rows = rows._replace(counts=rows.counts * here)
    losses = blending.row_losses(rows.said, rows.y, rows.is_class)
    return state, (_by_fold(rows, losses, self.folds), _by_fold(rows, torch.ones_like(losses[0]), self.folds))


@on_client(sends=ERRORS)
def scaled_errors(self: TableFit, me: ClientContext, allowed: Tensor, usual: Tensor) -> tuple[Tree, Tree]:
    """Squared errors in units of the site's noise: that of its best candidate, helped by the usual one."""
    rows = self.rows(me)
    rows = rows._replace(counts=rows.counts * me.state["here"])
    losses = blending.row_losses(rows.said, rows.y, rows.is_class)
    total = torch.where(allowed > 0, (losses * rows.counts).sum(1), torch.inf).amin()
    noise = ((total + HELP * usual) / (rows.counts.sum() + HELP)).sqrt().clamp(min=1e-150)
    return me.state | {"noise": noise}, _by_fold(rows, losses / noise.square(), self.folds)


@on_client(sends=(GRADIENTS, CURVATURES))
def curvature(self: TableFit, me: ClientContext, weights: Tensor) -> tuple[Tree, Tree]:
    """At the common weights of each part."""
    rows = _rows(self, me)
    each = [
        blending.quadratic(rows.said, rows.y, rows.without(p), weights[p], rows.is_class) for p in range(self.parts)
    ]
    return me.state, (torch.stack([g for g, _ in each]), torch.stack([h for _, h in each]))


def _own_quadratic(self: TableFit, rows: Rows, weights: Tensor) -> tuple[Tensor, Tensor]:
    """At the site's weights for each part and pull."""
    each = [
        [
            blending.quadratic(rows.said, rows.y, rows.without(p), weights[p, 2 + i], rows.is_class)
            for i in range(len(OWN_PULLS))
        ]
        for p in range(self.parts)
    ]
    return tuple(torch.stack([torch.stack([one[k] for one in row]) for row in each]) for k in (0, 1))  # type: ignore[return-value]


@on_client(sends=OWN)
def begin_own(self: TableFit, me: ClientContext, single: Tensor, common: Tensor) -> tuple[Tree, Tree]:
    """The site's weights begin at the common ones."""
    weights = torch.cat([single[:, None], common[:, None].expand(-1, OPTIONS - 1, -1)], dim=1)
    return me.state | {"weights": weights}, _own_quadratic(self, _rows(self, me), weights)[1]


@on_client(sends=OWN)
def step_own(self: TableFit, me: ClientContext, common: Tensor, metric: Tensor, allowed: Tensor) -> tuple[Tree, Tree]:
    """A Newton step of the site's weights, drawn towards the common ones as `metric` says."""
    rows, old = _rows(self, me), me.state["weights"]
    gradient, hessian = _own_quadratic(self, rows, old)
    own = old[:, 2:]
    linear = (hessian @ own[..., None])[..., 0] - gradient + (metric @ common[:, None, :, None])[..., 0]
    weights = torch.cat([old[:, :2], blending.on_simplex(hessian + metric, linear, allowed)], dim=1)
    return me.state | {"weights": weights}, _own_quadratic(self, rows, weights)[1]


def held_out(rows: Rows, weights: Tensor) -> Tensor:
    """Outputs with weights [parts, candidates] that had no say of the row."""
    total = torch.zeros_like(rows.said[0])
    for f in range(len(weights) - 1):
        total = total + (rows.fold == f)[:, None] * blending.blended(rows.said, weights[f + 1], rows.is_class)
    return total


def _losses(rows: Rows, outputs: Tensor) -> Tensor:
    return blending.row_losses(outputs, rows.y, rows.is_class) * rows.counts


def _options(self: TableFit, me: ClientContext) -> Tensor:
    rows, weights = _rows(self, me), me.state["weights"]
    return torch.stack([_losses(rows, held_out(rows, weights[:, i])) for i in range(OPTIONS)])


@on_client(sends=LOSSES)
def option_losses(self: TableFit, me: ClientContext) -> tuple[Tree, Tree]:
    return me.state, _options(self, me).sum(1)


@on_client(sends=(LOSSES, LOSSES, LOSSES))
def option_differences(self: TableFit, me: ClientContext, best: Tensor) -> tuple[Tree, Tree]:
    """By how much each way of blending loses against the best: sums, squares by row, squares of the site's sums."""
    losses = _options(self, me)
    lost = losses - best @ losses
    return me.state, (lost.sum(1), lost.square().sum(1), lost.sum(1).square())


@on_client()
def settle(self: TableFit, me: ClientContext, taken: Tensor) -> tuple[Tree, Tree]:
    """The site's weights, and what it gains with them over its own model."""
    rows, unit = _rows(self, me), me.state["noise"].square()
    served, own = held_out(rows, torch.einsum("o,poc->pc", taken, me.state["weights"])), rows.said[0]
    gain = (_losses(rows, own) - _losses(rows, served)) * unit
    least = site_gains.chance(served, own) if rows.is_class else torch.zeros_like(gain)
    stated = site_gains.gains_of(gain, rows.counts, least)
    return me.state | {"taken": taken, "gain": torch.stack(list(stated))}, None


@on_client(sends=BELOW)
def gain_counts(self: TableFit, me: ClientContext, thresholds: Tensor) -> tuple[Tree, Tree]:
    return me.state, site_gains.below(site_gains.Gains(*me.state["gain"]), thresholds)


@on_client(sends=CERTAINTY)
def gain_sums(self: TableFit, me: ClientContext, shared: Tensor) -> tuple[Tree, Tree]:
    return me.state, site_gains.sums_of(site_gains.Gains(*me.state["gain"]), site_gains.Shared(*shared))


@on_client(sends=WEIGHTS)
def decide(self: TableFit, me: ClientContext, shared: Tensor) -> tuple[Tree, Tree]:
    """The promise: a site whose own model is known to be better keeps it."""
    mean, error = site_gains.shrunk(site_gains.Gains(*me.state["gain"]), site_gains.Shared(*shared))
    weights = torch.einsum("o,oc->c", me.state["taken"], me.state["weights"][0])
    own = _alone(self, weights)
    is_own = (mean + KNOWN * error < 0) | (me.state["here"] == 0)
    served = torch.where(is_own, own, weights)
    return me.state | {"sure": torch.stack([mean, error]), "served": served}, served


def blend(program: TableFit, fed: Federation, server: Tree) -> Tree:
    """The server's half: common weights, the way of blending, and how sure gains are."""
    allowed = fed.model.like.new_tensor(
        [1.0, *(float(e in server.get("solved", {}) and e not in server.get("dropped", {})) for e in program.effects)]
    )
    is_class = not bool(server["is_number"])
    losses, counts = fed.sum(fed.map(program.errors, allowed))
    count = counts.sum()
    if not is_class:
        usual = torch.where(allowed > 0, losses.sum(1) / count.clamp(min=1), torch.inf).amin()
        losses = fed.sum(fed.map(program.scaled_errors, allowed, usual))
    rest = torch.cat([losses.sum(1)[:, None], losses.sum(1)[:, None] - losses], dim=1)  # [candidates, parts]
    rest = torch.where(allowed[:, None] > 0, rest, torch.inf)
    single = torch.nn.functional.one_hot(rest.argmin(0), program.candidates).to(losses)
    rows = torch.cat([count[None], count - counts]).clamp(min=1)
    common = uniform = (allowed / allowed.sum()).expand(program.parts, -1)
    for _ in range(NEWTON if is_class else 1):
        gradient, hessian = fed.sum(fed.map(program.curvature, common))
        metric = hessian / rows[:, None, None]
        linear = ((hessian @ common[..., None]) + metric @ uniform[..., None])[..., 0] - gradient
        common = blending.on_simplex(hessian + metric, linear, allowed)
    hessian = fed.sum(fed.map(program.begin_own, single, common))
    pulls = hessian.new_tensor(OWN_PULLS)[:, None, None]
    for _ in range(NEWTON if is_class else 1):
        metric = pulls * hessian / rows[:, None, None, None]
        hessian = fed.sum(fed.map(program.step_own, common, metric, allowed))
    taken = _taken(program, fed, count)
    fed.map(program.settle, taken)

    def ask(shared: site_gains.Shared) -> Tensor:
        return fed.sum(fed.map(program.gain_sums, torch.stack(list(shared))))

    def count_below(thresholds: Tensor) -> Tensor:
        return fed.sum(fed.map(program.gain_counts, thresholds))

    shared = site_gains.shared_by(count_below, ask, count)
    served = fed.sum(fed.map(program.decide, torch.stack(list(shared))))
    weights = torch.where(taken[0] > 0, single[0], common[0])
    fed.report(gain=shared.center, error=shared.doubt.sqrt(), way=taken.argmax())
    return server | {"common": weights, "served": served / max(len(fed.cohort), 1), "taken": taken}


def _taken(program: TableFit, fed: Federation, count: Tensor) -> Tensor:
    """The first way of blending, from one for all to blends by site, that is not surely worse than the best."""
    total = fed.sum(fed.map(program.option_losses))
    best = torch.nn.functional.one_hot(total.argmin(), OPTIONS).to(total)
    lost, by_row, by_site = fed.sum(fed.map(program.option_differences, best))
    spread = torch.stack(
        [squares - lost.square() / n for squares, n in ((by_row, count.clamp(min=1)), (by_site, len(fed.cohort)))]
    )
    is_sure = lost > SURELY * spread.clamp(min=0).sqrt().amax(0) + ROUNDING * total.min().abs()
    return torch.nn.functional.one_hot((~is_sure).to(torch.int64).argmax(), OPTIONS).to(total)
