"""TableFit: linear and mixed models at every site of a federation, cross-fitted, and a blend of them for each.

Stacking: Wolpert, Neural Networks 5, 1992; from out-of-fold predictions: van der Laan, Polley, Hubbard, Stat. Appl.
Genet. Mol. Biol. 6, 2007. Folds are cut inside each site and what the candidates say of its rows stays there; sums over
sites settle the candidates, the common weights, how much a site's own weights count, and how sure a gain is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.algorithms._shared import stacking_rounds as stacking
from fedtailor.algorithms._shared.parts import Part, Seen, folds_at, passed_on
from fedtailor.algorithms._shared.scaling_rounds import MOMENTS, agreed, moments_of, no_scale, unscaled
from fedtailor.algorithms._shared.stacking_rounds import Rows
from fedtailor.algorithms.linear_alone import LinearAlone
from fedtailor.algorithms.mixed_logit import MixedLogit
from fedtailor.algorithms.mixed_model import MixedModel
from fedtailor.core.algorithm import Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError
from fedtailor.numerics import ridge

MOST_SLOPES, MOST_TOGETHER = 150, 8  # coefficients that may differ between sites, and together
ALONE = 0  # the place of a site's own model among the candidates
Effects = Literal["none", "intercept", "diagonal", "full"]


def usable(effects: str, coefficients: int, is_gaussian: bool) -> bool:
    """Whether a mixed model of so many coefficients is tried with these effects."""
    if effects == "full":
        return coefficients <= MOST_TOGETHER and is_gaussian
    return effects != "diagonal" or coefficients <= MOST_SLOPES


@dataclass(frozen=True)
class TableFit(Algorithm):
    """What `fedtailor fit` does with tables, where each site has its own."""

    effects: tuple[Effects, ...] = ("none", "intercept", "diagonal", "full")
    """Mixed models to try beside each site's own model, by what differs between sites."""

    folds: int = 5
    """Parts of a site's rows that are predicted from the others."""

    title: ClassVar[str] = "TableFit"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "models, what they say of rows, weights"
    onboards_fitted: ClassVar[bool] = True
    settles: ClassVar[bool] = True

    logit_variation = passed_on(MixedLogit, "logit", "variation")
    logit_begin = passed_on(MixedLogit, "logit", "begin")
    logit_linearise = passed_on(MixedLogit, "logit", "linearise")
    logit_evidence = passed_on(MixedLogit, "logit", "evidence")
    logit_marginal = passed_on(MixedLogit, "logit", "marginal")
    logit_slope = passed_on(MixedLogit, "logit", "slope")
    number_variation = passed_on(MixedModel, "number", "variation")
    number_marginal = passed_on(MixedModel, "number", "marginal")
    number_slope = passed_on(MixedModel, "number", "slope")

    @property
    def candidates(self) -> int:
        """Each site's own model, and the mixed ones."""
        return 1 + len(self.effects)

    @property
    def parts(self) -> int:
        """All rows, and all but those of each fold."""
        return 1 + self.folds

    @property
    def preparation(self) -> int:
        """Agree on scales; then solve every candidate on every part."""
        return 1 + len(self.effects) * self.parts

    def check(self, model: Model, task: str) -> None:
        if ridge.names(model)[1] is None:
            raise ConfigError("model.bias: this algorithm needs an intercept; set model.bias = true")
        if task not in ("classification", "regression"):
            raise ConfigError(f"algorithm.name: {self.title} is for classification and regression, not {task}")

    # candidates

    def client_init(self, me: ClientContext) -> Tree:
        none = no_scale(me)
        state = {
            "center": none,
            "spread": none + 1,
            "inner": self.mixed(me, "none").client_init(me),
            "solved": me.n.new_zeros((self.candidates, self.parts)),
        }
        return state | {"models": self.alone(me, state, {})} | stacking.first_state(self, me)

    def mixed(self, me: ClientContext, effects: Effects) -> MixedModel | MixedLogit:
        is_class = me.experiment.data.task == "classification"
        return MixedLogit(effects) if is_class else MixedModel(effects)

    def part(self, me: ClientContext, part: int, state: Tree | None = None) -> Part:
        """The client without the rows of a fold; part 0 has all."""
        mine = me.state if state is None else state
        return Part(me, mine["inner"], part - 1 if part else None, self.folds, mine["center"], mine["spread"])

    def alone(self, me: ClientContext, state: Tree, before: Tree) -> Tensor:
        """The models [candidates, parts, coefficients, outputs] with each site's own ones."""
        each = [ridge.as_vector(me.model, LinearAlone().choose_fit(self.part(me, p, state))) for p in range(self.parts)]
        own = torch.stack(each)[None]
        others = before["models"][1:] if before else torch.zeros_like(own).repeat(self.candidates - 1, 1, 1, 1)
        return torch.cat([own, others])

    def stage(self, round: int) -> tuple[Effects, int] | None:
        """Effects and part that a round of the preparation is for."""
        at = round + self.preparation - 2
        return (self.effects[at // self.parts], at % self.parts) if 0 <= at < self.preparation - 1 else None

    def at_work(self, me: ClientContext) -> tuple[MixedModel | MixedLogit, Part]:
        """The algorithm of this round's candidate, and the client as it sees it."""
        stage = self.stage(me.round)
        assert stage is not None
        return self.mixed(me, stage[0]), self.part(me, stage[1])

    def round(self, fed: Federation, server: Tree) -> Tree:
        stage = self.stage(fed.round)
        if stage is not None:
            return self.solve(fed, server, *stage)
        return self.scale(fed, server) if fed.round < 1 else stacking.blend(self, fed, server)

    def scale(self, fed: Federation, server: Tree) -> Tree:
        """Agree on the mean and the spread of every number; sites solve their own models on that scale."""
        center, spread, is_number = agreed(fed, self.moments)
        fed.map(self.own, center, spread)
        return server | {"center": center, "spread": spread, "is_number": is_number}

    def solve(self, fed: Federation, server: Tree, effects: Effects, part: int) -> Tree:
        """One candidate on one part; on all but a fold it begins where it ended on all rows."""
        is_class = not bool(server["is_number"])
        w = ridge.as_vector(fed.model, fed.model.params)
        size = len(w) * max(w.shape[1] - 1, 1) if is_class else len(w)
        dropped = server.get("dropped", {})
        if fed.clients == 1 or not usable(effects, size, not is_class) or effects in dropped:
            return server
        mixed, prefix = (MixedLogit(effects), "logit") if is_class else (MixedModel(effects), "number")
        fed.map(self.begin)
        start = server["solved"][effects] if part else mixed.server_init(fed.model)
        try:
            solved = mixed.round(Seen(fed, self, prefix), start)  # type: ignore[arg-type]
        except torch.linalg.LinAlgError:
            return server | {"dropped": dropped | {effects: w.new_ones(())}}
        fed.map(self.keep, solved)
        return server if part else server | {"solved": server.get("solved", {}) | {effects: solved}}

    @on_client(sends=MOMENTS)
    def moments(self, me: ClientContext, step: Tensor, center: Tensor, unit: Tensor) -> tuple[Tree, Tree]:
        return me.state, moments_of(me, step, center, unit)

    @on_client()
    def own(self, me: ClientContext, center: Tensor, spread: Tensor) -> tuple[Tree, Tree]:
        state = me.state | {"center": center, "spread": spread}
        solved = torch.cat([torch.ones_like(me.state["solved"][:1]), me.state["solved"][1:]])
        return state | {"models": self.alone(me, state, me.state), "solved": solved}, None

    @on_client()
    def begin(self, me: ClientContext) -> tuple[Tree, Tree]:
        mixed, part = self.at_work(me)
        return me.state | {"inner": mixed.client_init(part)}, None

    @on_client()
    def keep(self, me: ClientContext, solved: Tree) -> tuple[Tree, Tree]:
        mixed, part = self.at_work(me)
        v = ridge.as_vector(me.model, mixed.personal(part, solved))
        effects, p = self.stage(me.round) or ("none", 0)
        here = torch.zeros_like(me.state["solved"])
        here[1 + self.effects.index(effects), p] = 1
        models = torch.where(here[:, :, None, None] > 0, v, me.state["models"])
        return me.state | {"models": models, "solved": torch.maximum(me.state["solved"], here)}, None

    # blends

    def rows(self, me: ClientContext) -> Rows:
        """What each candidate says of rows that it has not seen."""
        x, y, mask = self.part(me, 0).train
        fold, models = folds_at(me, self.folds), me.state["models"]
        design = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
        said = torch.zeros_like(torch.einsum("nd,cdo->cno", design, models[:, 0]))
        for f in range(self.folds):
            said = said + (fold == f)[None, :, None] * torch.einsum("nd,cdo->cno", design, models[:, f + 1])
        is_class = not y.is_floating_point()
        return Rows(said.log_softmax(2) if is_class else said, y, mask * (fold >= 0), fold, is_class)

    errors = stacking.errors
    scaled_errors = stacking.scaled_errors
    curvature = stacking.curvature
    begin_own = stacking.begin_own
    step_own = stacking.step_own
    option_losses = stacking.option_losses
    option_differences = stacking.option_differences
    settle = stacking.settle
    gain_counts = stacking.gain_counts
    gain_sums = stacking.gain_sums
    decide = stacking.decide

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return self.served(me, me.state["served"])

    def served(self, me: ClientContext, weights: Tensor) -> Params:
        """A blend of linear models is one: of classes only differences of logits count."""
        is_class = me.experiment.data.task == "classification"
        v = torch.einsum("c,cdo->do", weights, me.state["models"][:, 0])
        return ridge.as_params(me.model, unscaled(v, me.state["center"], me.state["spread"], is_class))

    def onboard_init(self, me: ClientContext, server: Tree) -> Tree:
        """A newcomer's own model, its part of the mixed ones, and the federation's weights."""
        state = self.client_init(me) | {"center": server["center"], "spread": server["spread"]}
        models = self.alone(me, state, {})
        for at, effects in enumerate(self.effects):
            if effects in server.get("solved", {}) and effects not in server.get("dropped", {}):
                mixed = self.mixed(me, effects)
                part = self.part(me, 0, state)
                part.state = mixed.client_init(part)
                v = ridge.as_vector(me.model, mixed.personal(part, server["solved"][effects]))
                models = torch.cat([models[: 1 + at], v.expand_as(models[:1]), models[2 + at :]])
        return state | {"models": models, "served": server["common"]}
