"""What statistical models of a formula have in common: the columns of a row, scales, and columns that repeat others.

A row has the design's columns one after the other: fixed effects, effects that vary between sites, effects that vary
between groups inside a site, and three more: an offset, a weight (trials, or whether the time is that of an event) and
the number of the row's group. Sites scale columns as all agreed, so that no sum is large.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedtailor.algorithms._programs.scaling_rounds import agree_scales, moments_of
from fedtailor.core.algorithm import Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError, DataError, RunError
from fedtailor.numerics import ridge
from fedtailor.numerics.cross_products import group_sums, lower_entries

EXTRAS = 3  # offset, weight, group
ALIASED = 1e-9  # squared length that a column has beside those before it, in parts of its own


def _columns(algorithm: Any, model: Model) -> Tensor:
    w = ridge.as_vector(model, model.params)
    return w.new_zeros((2, len(w) - 1 + w.shape[1]))


def like(*dims: str) -> Any:
    """An example of a reply whose dimensions are properties of the algorithm."""
    return lambda algorithm, model: model.like.new_zeros([getattr(algorithm, dim) for dim in dims])


SCALES = ReplySpec("moments of columns", _columns).summed()
PRODUCTS = ReplySpec("cross products of columns", like("columns", "columns")).summed()
WITHIN_PRODUCTS = ReplySpec("cross products of columns", like("fixed", "fixed")).summed()
COUNTS = ReplySpec("numbers of rows, groups and events", like("counts")).summed()


class Columns(NamedTuple):
    """A site's rows, scaled."""

    x: Tensor  # [rows, fixed]
    z: Tensor  # [rows, random]
    w: Tensor  # [rows, nested]
    y: Tensor  # [rows]
    offset: Tensor
    weight: Tensor
    group: Tensor
    mask: Tensor


LARGEST = 1e7  # of a reply: where it is larger, a step has gone astray


def total(fed: Federation, replies: Any) -> Any:
    """The sum over all sites; without one of them it would be that of another model."""
    summed = fed.sum(replies)
    if len(fed.cohort) < len(fed.asked):
        lost = fed.record.faults[-1] if fed.record.faults else None
        why = "a site did not answer" if lost is None else f"{lost.client}: {lost.reason}"
        raise RunError(f"formula: a model needs the sums of all sites; {why}")
    return summed


def bounded(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The parts of a reply, and 0; if they are not finite or too large, zeros and 1."""
    largest = torch.stack([part.abs().amax() if part.numel() else part.sum() for part in parts]).amax()
    is_usable = largest <= LARGEST  # nor is what is not a number
    return *(torch.where(is_usable, part, 0.0) for part in parts), (~is_usable).to(parts[0].dtype)


@dataclass(frozen=True)
class FormulaModel(Algorithm, ABC):
    """A model whose design is known; only sums leave."""

    fixed: int = 1
    """Columns of fixed effects."""

    blocks: tuple[int, ...] = ()
    """Sizes of the blocks of effects that vary between sites; effects of one block are correlated."""

    nested_blocks: tuple[int, ...] = ()
    """The same of effects that vary between groups inside a site."""

    has_intercept: bool = True
    """Whether the first fixed effect is an intercept."""

    profile: float = 0.0
    """Level of profile intervals of standard deviations and correlations, such as 0.95; 0: none."""

    learns: ClassVar[str] = "degrees"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "modes of random effects"
    onboards_fitted: ClassVar[bool] = True
    settles: ClassVar[bool] = True
    most_calls: ClassVar[int] = 20_000  # intervals by profiles ask for many sums
    needs_tensor: ClassVar[bool] = True
    scales_response: ClassVar[bool] = False
    counts: ClassVar[int] = 3

    @property
    def random(self) -> int:
        """Columns whose effects vary between sites."""
        return sum(self.blocks)

    @property
    def nested(self) -> int:
        """Columns whose effects vary between groups inside a site."""
        return sum(self.nested_blocks)

    @property
    def columns(self) -> int:
        """All columns of the design, and the response."""
        return self.fixed + self.random + self.nested + 1

    @property
    def entries(self) -> int:
        """Free entries of the relative factors of the random effects."""
        return len(lower_entries(self.blocks)) + len(lower_entries(self.nested_blocks))

    @property
    def all_blocks(self) -> tuple[int, ...]:
        return (*self.blocks, *self.nested_blocks)

    def check(self, model: Model, task: str) -> None:
        features = len(ridge.as_vector(model, model.params)) - 1
        if features != self.columns - 1 + EXTRAS or task != "regression":
            raise ConfigError("algorithm.fixed: this model is of a formula; start it with fedtailor model")

    def server_init(self, model: Model) -> Tree:
        return {}

    def client_init(self, me: ClientContext) -> Tree:
        zero = me.n.to(me.model.dtype) * 0
        none = zero + zero.new_zeros(self.columns - 1 + EXTRAS + 1)
        state = {"center": none, "spread": none + 1, "modes": zero + zero.new_zeros(self.random)}
        state |= {"beta": zero + zero.new_zeros(self.fixed)}
        return state | {"modes_covariance": zero + zero.new_zeros((self.random, self.random))}

    # scales

    def agree_on_scales(self, fed: Federation) -> Tree:
        """What columns are centered at and divided by; a spread of 0 takes a column that repeats others out."""
        center, spread, _ = agree_scales(fed, self.moments)
        square = (center.square() + spread.square()).sqrt()
        is_fixed = torch.zeros_like(center, dtype=torch.bool)
        is_fixed[(1 if self.has_intercept else 0) : self.fixed] = True
        is_scaled = torch.zeros_like(is_fixed)
        is_scaled[: self.columns - 1] = True
        is_scaled[-1] = is_fixed[-1] = self.scales_response
        if self.has_intercept:
            is_scaled[0] = False
        else:
            spread, is_fixed = square, torch.zeros_like(is_fixed)
        center = torch.where(is_fixed, center, 0)
        spread = torch.where(is_scaled, torch.where(is_fixed, spread, square), 1)
        spread = torch.where(spread > 0, spread, 1)
        fed.map(self.scale, center, spread)
        products, within, counts = total(fed, fed.map(self.products))
        kept = self.independent(within if self.only_within else products[: self.fixed, : self.fixed])
        spread = torch.cat([torch.where(kept, spread[: self.fixed], torch.inf), spread[self.fixed :]])
        fed.map(self.scale, center, torch.nan_to_num(spread, posinf=0.0))
        server = {"center": center, "spread": torch.nan_to_num(spread, posinf=0.0), "kept": kept.to(center.dtype)}
        if not kept.any():
            raise DataError("formula: no fixed effect can be estimated: every column repeats others or is constant")
        both = torch.cat([kept, torch.ones(self.columns - self.fixed, dtype=torch.bool, device=kept.device)])
        return server | {"products": products * both * both[:, None], "counts": counts}

    only_within: ClassVar[bool] = False  # what is constant at every site cannot be estimated

    @staticmethod
    def independent(products: Tensor) -> Tensor:
        """Which columns add something to those before them, by elimination in their order."""
        rest, kept = products.clone(), []
        length = torch.diagonal(products).clone()
        largest = length.max().clamp(min=torch.finfo(products.dtype).tiny)
        for j in range(len(rest)):
            is_new = bool(rest[j, j] > ALIASED * length[j]) and bool(length[j] > 1e-14 * largest)
            kept.append(is_new)
            if is_new:
                rest = rest - torch.outer(rest[:, j], rest[j]) / rest[j, j]
        return torch.tensor(kept, device=products.device)

    @on_client(sends=SCALES)
    def moments(self, me: ClientContext, step: Tensor, center: Tensor, unit: Tensor) -> tuple[Tree, Tree]:
        is_number = [True] * (self.columns - 1) + [False] * EXTRAS + [True]
        return me.state, moments_of(me, step, center, unit, is_number)

    @on_client()
    def scale(self, me: ClientContext, center: Tensor, spread: Tensor) -> tuple[Tree, Tree]:
        return me.state | {"center": center + me.state["center"] * 0, "spread": spread + me.state["spread"] * 0}, None

    @on_client(sends=(PRODUCTS, WITHIN_PRODUCTS, COUNTS))
    def products(self, me: ClientContext) -> tuple[Tree, Tree]:
        """Of all columns, and of fixed effects around their means at the site."""
        d = self.rows(me)
        response = d.y - d.offset if self.scales_response else torch.zeros_like(d.y)  # else its square may be large
        whole = torch.cat([d.x, d.z, d.w, response[:, None]], dim=1) * d.mask[:, None]
        inner = (d.x - (d.x * d.mask[:, None]).sum(0) / d.mask.sum().clamp(min=1)) * d.mask[:, None]
        groups = (group_sums(d.mask[:, None], d.group) > 0).to(d.y.dtype).sum()
        counts = torch.stack([d.mask.sum(), groups, (d.weight * d.mask).sum()])
        return me.state, (whole.mT @ whole, inner.mT @ inner, counts)

    def rows(self, me: ClientContext) -> Columns:
        """The site's rows in the units that all agreed on."""
        values, y, mask = me.train
        values, center, spread = values.flatten(1), me.state["center"], me.state["spread"]
        inverse = torch.where(spread > 0, 1 / torch.where(spread > 0, spread, 1), 0)
        a, b, c = self.fixed, self.fixed + self.random, self.columns - 1
        scaled = (values[:, :c] - center[:c]) * inverse[:c]
        offset = values[:, c] * (inverse[-1] if self.scales_response else 1)
        response = (y[:, 0] - center[-1]) * inverse[-1]
        return Columns(
            scaled[:, :a], scaled[:, a:b], scaled[:, b:], response, offset, values[:, c + 1], values[:, c + 2], mask
        )

    @abstractmethod
    def fit(self, fed: Federation, server: Tree) -> Tree:
        """What is estimated, in the units that all agreed on."""

    def round(self, fed: Federation, server: Tree) -> Tree:
        if "center" in server:
            return server
        if self.random and len(fed.cohort) < 2:
            raise DataError("formula: effects that vary between sites need at least two sites")
        return self.fit(fed, self.agree_on_scales(fed))

    def personal(self, me: ClientContext, server: Tree) -> Params:
        """Coefficients of the site: those of fixed effects, and its own modes."""
        spread, center = me.state["spread"], me.state["center"]
        inverse = torch.where(spread > 0, 1 / torch.where(spread > 0, spread, 1), 0)
        own = torch.cat([me.state["beta"], me.state["modes"]])
        v = own * inverse[: len(own)] * (spread[-1] if self.scales_response else 1)
        level = -(v * center[: len(own)]).sum() + (center[-1] if self.scales_response else 0)
        rest = torch.zeros_like(spread[len(own) : -1])
        return ridge.as_params(me.model, torch.cat([v, rest, level[None]])[:, None])
