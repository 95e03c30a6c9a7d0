"""TableFit: linear and mixed models at every site of a federation, cross-fitted, and a blend of them for each.

Stacking: Wolpert, Neural Networks 5, 1992; from out-of-fold predictions: van der Laan, Polley, Hubbard, Stat. Appl.
Genet. Mol. Biol. 6, 2007. Folds are cut inside each site and the candidates' outputs stay there; sums over
sites decide on candidates, common weights, how much a site's own weights count, and how sure a gain is.

A site's weights minimise its loss plus that of `pull` typical rows of the federation, for which the common weights are
best. Predicting folds from the others decides between one candidate for all, one blend for all, and blends by site with
strong to weak pulls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedtailor.algorithms._programs import boosting
from fedtailor.algorithms._programs.parts import CandidateFederation, FoldContext, delegate, folds_at
from fedtailor.algorithms._programs.scaling_rounds import MOMENTS, agree_scales, moments_of, no_scale, unscale
from fedtailor.algorithms._shared import doubts
from fedtailor.algorithms.linear_alone import LinearAlone
from fedtailor.algorithms.mixed_logit import MixedLogit
from fedtailor.algorithms.mixed_model import MixedModel
from fedtailor.core.algorithm import Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.errors import ConfigError
from fedtailor.numerics import blending, ridge, site_gains
from fedtailor.numerics.blending import HELP, KNOWN, NEWTON, OWN_PULLS, ROUNDING, SURELY

MOST_SLOPES, MOST_TOGETHER = 150, 8  # coefficients that may differ between sites, and together
MOST_WITH_INTERCEPT = 400  # coefficients beside a random intercept
ALONE = 0  # the place of a site's own model among the candidates
Effects = Literal["none", "intercept", "diagonal", "full"]


OPTIONS = 2 + len(OWN_PULLS)  # one candidate for all, one blend for all, blends by site


class CandidateRows(NamedTuple):
    """Out-of-fold outputs of candidates for a site's rows [candidates, rows, outputs]; `counts` is 0 for padding."""

    said: Tensor
    y: Tensor
    counts: Tensor
    fold: Tensor
    is_class: bool

    def without(self, part: int) -> Tensor:
        """Rows that a part has; part 0 has all, part p all but those of fold p - 1."""
        return self.counts * (self.fold != part - 1) if part else self.counts

    def in_units_of(self, noise: Tensor) -> CandidateRows:
        return self if self.is_class else self._replace(said=self.said / noise, y=self.y / noise)


def _zeros(*dims: str) -> Any:
    """An example of a reply whose dimensions are "candidates", "folds", "parts", "pulls" or "options"."""

    def example(algorithm: Any, model: Model) -> Tensor:
        sizes = {"folds": algorithm.folds, "parts": algorithm.parts, "candidates": algorithm.candidates}
        sizes |= {"pulls": len(OWN_PULLS), "options": OPTIONS, "sums": site_gains.SUMS}
        sizes |= {"thresholds": 1 + 2 * site_gains.THRESHOLDS, "marks": len(boosting.MARKS) - 1}
        w = ridge.as_vector(model, model.params)
        sizes |= {"features": len(w) - 1, "boosted": boosting.boosted_outputs(w.shape[1]), "bins": boosting.BINS}
        sizes |= {"three": 3} | {f"nodes {level}": 2**level for level in range(boosting.DEPTH)}
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
MARKS = ReplySpec("rows by mark", _zeros("features", "marks")).summed()
LOSS = ReplySpec("loss of trees", _zeros()).summed()
GAINS = ReplySpec("gains by trees", _zeros("three")).summed()


def _histograms(level: int) -> ReplySpec:
    dims = ("parts", "boosted", f"nodes {level}", "features", "bins", "three")
    return ReplySpec("gradients by bin", _zeros(*dims)).summed()


WEIGHTS = ReplySpec("weights of candidates", _zeros("candidates")).summed()


def is_usable(effects: str, coefficients: int, is_gaussian: bool) -> bool:
    """Whether a mixed model of so many coefficients is tried with these effects."""
    if effects == "full":
        return coefficients <= MOST_TOGETHER and is_gaussian
    return coefficients <= {"diagonal": MOST_SLOPES, "intercept": MOST_WITH_INTERCEPT}.get(effects, coefficients)


def held_out(rows: CandidateRows, weights: Tensor) -> Tensor:
    """Outputs with weights [parts, candidates] that were estimated without the row's fold."""
    total = torch.zeros_like(rows.said[0])
    for f in range(len(weights) - 1):
        total = total + (rows.fold == f)[:, None] * blending.blended(rows.said, weights[f + 1], rows.is_class)
    return total


def weighted_losses(rows: CandidateRows, outputs: Tensor) -> Tensor:
    return blending.row_losses(outputs, rows.y, rows.is_class) * rows.counts


def losses_by_fold(rows: CandidateRows, losses: Tensor, folds: int) -> Tensor:
    at = (rows.fold[:, None] == torch.arange(folds, device=rows.fold.device)).to(losses.dtype)
    return (losses * rows.counts) @ at


OF_TREES = frozenset(
    {
        "marks",
        "plant",
        "sprout",
        "lose",
        "gains",
        "keep_trees",
        *(f"branch_{level}" for level in range(1, boosting.DEPTH)),
    }
)


def _branch(level: int) -> Any:
    """The client function that goes one level down, and sends the sums of the nodes there."""

    @on_client(sends=_histograms(level))
    def branch(self: Any, me: ClientContext, feature: Tensor, threshold: Tensor) -> tuple[Tree, Tree]:
        out: tuple[Tree, Tree] = self.branch(me, level, feature, threshold)
        return out

    branch.__name__ = f"branch_{level}"
    return branch


@dataclass(frozen=True)
class TableFit(Algorithm):
    """What `fedtailor fit` does with tables, where each site has its own."""

    effects: tuple[Effects, ...] = ("none", "intercept", "diagonal", "full")
    """Mixed models to try beside each site's own model, by what differs between sites."""

    folds: int = 5
    """Parts of a site's rows that are predicted from the others."""

    boosted: bool = False
    """Also try trees that all sites share. What a small site adds to their sums shows its rows, so `federation fit`
    tries them where sums are secure."""

    title: ClassVar[str] = "TableFit"
    learns: ClassVar[str] = "weights"
    keeps: ClassVar[str] = "model"
    private: ClassVar[str] = "models, their outputs, weights"
    onboards_fitted: ClassVar[bool] = True
    settles: ClassVar[bool] = True
    most_calls: ClassVar[int] = 5000

    logit_variation = delegate(MixedLogit, "logit", "variation")
    logit_begin = delegate(MixedLogit, "logit", "begin")
    logit_linearise = delegate(MixedLogit, "logit", "linearise")
    logit_evidence = delegate(MixedLogit, "logit", "evidence")
    logit_marginal = delegate(MixedLogit, "logit", "marginal")
    logit_slope = delegate(MixedLogit, "logit", "slope")
    number_variation = delegate(MixedModel, "number", "variation")
    number_marginal = delegate(MixedModel, "number", "marginal")
    number_slope = delegate(MixedModel, "number", "slope")

    @property
    def linear(self) -> int:
        """Linear candidates: each site's own model, and the mixed ones."""
        return 1 + len(self.effects)

    @property
    def candidates(self) -> int:
        """The linear ones and, if they are tried, trees on the best that is shared."""
        return self.linear + self.boosted

    @property
    def parts(self) -> int:
        """All rows, and all but those of each fold."""
        return 1 + self.folds

    @property
    def never_called(self) -> frozenset[str]:
        return frozenset() if self.boosted else OF_TREES

    @property
    def preparation(self) -> int:
        """Agree on scales; solve every candidate on every part; grow trees."""
        return 1 + len(self.effects) * self.parts + self.boosted

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
            "solved": me.n.new_zeros((self.linear, self.parts)),
        }
        state |= {"models": self.alone(me, state, {})} | self.first_blend(me)
        return state | {"trees": self.no_trees(me)} if self.boosted else state

    def mixed(self, me: ClientContext, effects: Effects) -> MixedModel | MixedLogit:
        is_class = me.experiment.data.task == "classification"
        return MixedLogit(effects) if is_class else MixedModel(effects)

    def part(self, me: ClientContext, part: int, state: Tree | None = None) -> FoldContext:
        """The client without the rows of a fold; part 0 has all."""
        mine = me.state if state is None else state
        return FoldContext(me, mine["inner"], part - 1 if part else None, self.folds, mine["center"], mine["spread"])

    def alone(self, me: ClientContext, state: Tree, before: Tree) -> Tensor:
        """The models [candidates, parts, coefficients, outputs] with each site's own ones."""
        each = [ridge.as_vector(me.model, LinearAlone().choose_fit(self.part(me, p, state))) for p in range(self.parts)]
        own = torch.stack(each)[None]
        others = before["models"][1:] if before else torch.zeros_like(own).repeat(self.linear - 1, 1, 1, 1)
        return torch.cat([own, others])

    def stage(self, round: int) -> tuple[Effects, int] | None:
        at = round + self.preparation - 2
        solved = len(self.effects) * self.parts
        return (self.effects[at // self.parts], at % self.parts) if 0 <= at < solved else None

    def at_work(self, me: ClientContext) -> tuple[MixedModel | MixedLogit, FoldContext]:
        """The algorithm of this round's candidate, and the client as it sees it."""
        stage = self.stage(me.round)
        assert stage is not None
        return self.mixed(me, stage[0]), self.part(me, stage[1])

    def round(self, fed: Federation, server: Tree) -> Tree:
        stage = self.stage(fed.round)
        if stage is not None:
            return self.solve(fed, server, *stage)
        if fed.round == 1 - self.preparation:
            return self.scale(fed, server)
        return self.grow(fed, server) if fed.round < 1 else self.blend(fed, server)

    def scale(self, fed: Federation, server: Tree) -> Tree:
        """Agree on the mean and the spread of every number; sites solve their own models on that scale."""
        center, spread, is_number = agree_scales(fed, self.moments)
        fed.map(self.own, center, spread)
        return server | {"center": center, "spread": spread, "is_number": is_number}

    def solve(self, fed: Federation, server: Tree, effects: Effects, part: int) -> Tree:
        """One candidate on one part; on all but a fold it begins where it ended on all rows."""
        is_class = not bool(server["is_number"])
        w = ridge.as_vector(fed.model, fed.model.params)
        size = len(w) * max(w.shape[1] - 1, 1) if is_class else len(w)
        dropped = server.get("dropped", {})
        if fed.clients == 1 or not is_usable(effects, size, not is_class) or effects in dropped:
            return server
        mixed, prefix = (MixedLogit(effects), "logit") if is_class else (MixedModel(effects), "number")
        fed.map(self.begin)
        start = server["solved"][effects] if part else mixed.server_init(fed.model)
        try:
            solved = mixed.round(CandidateFederation(fed, self, prefix), start)  # type: ignore[arg-type]
        except torch.linalg.LinAlgError:
            return server | {"dropped": dropped | {effects: w.new_ones(())}}
        fed.map(self.keep, solved)
        return server if part else server | {"solved": server.get("solved", {}) | {effects: solved}}

    @on_client(sends=MOMENTS, doubt=doubts.in_rows)
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

    # trees that all sites share

    def no_trees(self, me: ClientContext) -> dict[str, Tensor]:
        """Room for the bins and scores of the site's rows, and for the trees that all sites share."""
        w, none = ridge.as_vector(me.model, me.model.params), me.n.to(me.model.dtype) * 0
        whole = none.to(torch.int64)
        features, outputs = len(w) - 1, boosting.boosted_outputs(w.shape[1])
        rows = max(1, *me.experiment.data.train.sizes.tolist())
        most = boosting.MOST_TREES * outputs
        return {
            "bins": whole + whole.new_zeros((rows, features)),
            "edges": none + none.new_full((features, boosting.BINS), boosting.FAR),
            "base": none + none.new_zeros(self.linear),
            "scores": none + none.new_zeros((self.parts, rows, outputs)),
            "node": whole + whole.new_zeros((self.parts, outputs, rows)),
            "first": none + none.new_zeros((rows, outputs)),
            "best": none + none.new_zeros((rows, outputs)),
            "count": whole,
            "feature": whole + whole.new_full((most, boosting.SPLITS), boosting.NO_SPLIT),
            "threshold": whole + whole.new_zeros((most, boosting.SPLITS)),
            "is_left_larger": whole + whole.new_zeros((most, boosting.SPLITS)),
            "values": none + none.new_zeros((most, boosting.LEAVES)),
        }

    def part_rows(self, me: ClientContext) -> Tensor:
        """Which rows each part has [parts, rows]; none at a site that missed a candidate."""
        fold = folds_at(me, self.folds)
        parts = torch.stack([fold != part - 1 for part in range(self.parts)])
        parts = torch.cat([torch.ones_like(parts[:1]), parts[1:]])
        return parts * me.train.mask * me.state["here"]

    def grow(self, fed: Federation, server: Tree) -> Tree:
        """Trees on what the best shared model leaves, for all rows and without each fold; kept if they surely help."""
        solved = self.usable(fed, server)[: self.linear]
        losses, counts = fed.sum(fed.map(self.errors, self.usable(fed, server)))
        shared = torch.where(solved[1:] > 0, losses[1 : self.linear].sum(1), torch.inf)
        if not bool(shared.isfinite().any()) or float(counts.sum()) < boosting.FEWEST_ROWS or not bool(counts.all()):
            return server
        base = torch.nn.functional.one_hot(1 + shared.argmin(), self.linear).to(losses)
        edges = boosting.edges_of_counts(fed.sum(fed.map(self.marks)).double().numpy())
        padded = np.full((len(edges), boosting.BINS), boosting.FAR)
        for row, own in zip(padded, edges, strict=True):
            row[: len(own)] = own
        first = fed.sum(fed.map(self.plant, torch.from_numpy(padded).to(losses), base))
        outputs = boosting.boosted_outputs(ridge.as_vector(fed.model, fed.model.params).shape[1])
        grown: list[list[list[boosting.GrowingTree]]] = []

        def add(is_best: bool) -> float:
            trees = [[boosting.GrowingTree(edges) for _ in range(outputs)] for _ in range(self.parts)]
            splits: tuple[Tensor, ...] = (losses.new_tensor(float(is_best)),)
            for level in range(boosting.DEPTH):
                sums = fed.sum(fed.map(getattr(self, f"branch_{level}") if level else self.sprout, *splits))
                each = [
                    [tree.split(level, sums[p, o].double().numpy()) for o, tree in enumerate(own)]
                    for p, own in enumerate(trees)
                ]
                splits = tuple(torch.from_numpy(np.array([[one[k] for one in own] for own in each])) for k in (0, 1))
            values = torch.from_numpy(np.array([[tree.values for tree in own] for own in trees])).to(losses)
            grown.append(trees)
            return float(fed.sum(fed.map(self.lose, *splits, values)))

        count = boosting.count_trees(float(first), add)
        gained, by_row, by_site = fed.sum(fed.map(self.gains, losses.new_tensor(float(count == len(grown)))))
        rows, sites = counts.sum().clamp(min=1), len(fed.cohort)
        spread = torch.stack([by_row - gained.square() / rows, by_site - gained.square() / sites])
        if not float(gained) > SURELY * float(spread.clamp(min=0).amax().sqrt()):
            return server
        kept = [tree for trees in grown[:count] for tree in trees[0]]
        forest = {
            name: torch.from_numpy(np.stack([getattr(tree, name) for tree in kept]))
            for name in ("feature", "threshold", "is_left_larger", "values")
        }
        forest["is_left_larger"] = forest["is_left_larger"].to(torch.int64)
        forest["values"] = forest["values"].to(losses)
        fed.map(self.keep_trees, forest)
        return server | {"trees": forest | {"base": base, "edges": torch.from_numpy(padded).to(losses)}}

    @on_client(sends=MARKS)
    def marks(self, me: ClientContext) -> tuple[Tree, Tree]:
        x, _, mask = self.part(me, 0).train
        return me.state, torch.from_numpy(boosting.count_marks(x[mask > 0].double().numpy())).to(x)

    @on_client(sends=LOSS)
    def plant(self, me: ClientContext, edges: Tensor, base: Tensor) -> tuple[Tree, Tree]:
        """The bins of the site's rows, and their scores by the model that trees are grown on; its loss out of fold."""
        x, _, _ = self.part(me, 0).train
        trees = me.state["trees"] | {"edges": edges, "base": base}
        ends = [row[row < boosting.FAR].double().numpy() for row in edges]
        bins, scores = torch.zeros_like(trees["bins"]), torch.zeros_like(trees["scores"])
        bins[: len(x)] = torch.from_numpy(boosting.binned(x.double().numpy(), ends).astype(np.int64))
        design = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
        said = torch.einsum("nd,pdo->pno", design, torch.einsum("c,cpdo->pdo", base, me.state["models"]))
        if me.experiment.data.task == "classification":
            said = said.log_softmax(2)
            said = said[..., 1:] - said[..., :1] if said.shape[2] == 2 else said
        scores[:, : len(x)] = said
        trees |= {"bins": bins, "scores": scores, "node": torch.zeros_like(trees["node"])}
        state = me.state | {"trees": trees}
        first = self.held_scores(me, trees)
        return state | {"trees": trees | {"first": first, "best": first}}, self.tree_losses(me, first).sum()

    def held_scores(self, me: ClientContext, trees: Tree) -> Tensor:
        """Scores of the site's rows by the part without their fold; 0 for padding."""
        rows, out = len(me.train.y), torch.zeros_like(trees["first"])
        out[:rows] = boosting.held_scores(trees["scores"][:, :rows], folds_at(me, self.folds))
        return out

    def tree_losses(self, me: ClientContext, scores: Tensor) -> Tensor:
        _, y, mask = self.part(me, 0).train
        is_class = not y.is_floating_point()
        counts = mask * (folds_at(me, self.folds) >= 0) * me.state["here"]
        return blending.row_losses(boosting.outputs_of(scores[: len(y)], is_class), y, is_class) * counts

    def histograms(self, me: ClientContext, trees: Tree, level: int) -> Tensor:
        _, y, _ = self.part(me, 0).train
        rows, is_class = len(y), not y.is_floating_point()
        sums = boosting.histograms(
            np.asfortranarray(trees["bins"][:rows].numpy().astype(np.uint8)),
            trees["scores"][:, :rows].double().numpy(),
            y.numpy() if is_class else y[:, :1].double().numpy(),
            is_class,
            trees["node"][:, :, :rows].numpy(),
            self.part_rows(me).double().numpy(),
            2**level,
        )
        return torch.from_numpy(sums).to(trees["scores"])

    def deeper(self, trees: Tree, feature: Tensor, threshold: Tensor) -> Tensor:
        bins = trees["bins"].numpy()
        return torch.from_numpy(boosting.descend(bins, trees["node"].numpy(), feature.numpy(), threshold.numpy()))

    def with_values(self, trees: Tree, feature: Tensor, threshold: Tensor, values: Tensor) -> Tree:
        """With the last level's splits, and the steps of the leaves on the scores."""
        node = self.deeper(trees, feature, threshold)
        steps = torch.gather(values, 2, node)  # [parts, outputs, rows]
        return trees | {"scores": trees["scores"] + steps.mT, "node": torch.zeros_like(node)}

    @on_client(sends=_histograms(0))
    def sprout(self, me: ClientContext, is_best: Tensor) -> tuple[Tree, Tree]:
        """The sums of the roots of new trees."""
        trees = self.note_best(me, is_best)
        return me.state | {"trees": trees}, self.histograms(me, trees, 0)

    def note_best(self, me: ClientContext, is_best: Tensor) -> Tree:
        trees = me.state["trees"]
        return trees | {"best": torch.where(is_best > 0, self.held_scores(me, trees), trees["best"])}

    def branch(self, me: ClientContext, level: int, feature: Tensor, threshold: Tensor) -> tuple[Tree, Tree]:
        trees = me.state["trees"] | {"node": self.deeper(me.state["trees"], feature, threshold)}
        return me.state | {"trees": trees}, self.histograms(me, trees, level)

    branch_1 = _branch(1)
    branch_2 = _branch(2)
    branch_3 = _branch(3)
    branch_4 = _branch(4)

    @on_client(sends=LOSS)
    def lose(self, me: ClientContext, feature: Tensor, threshold: Tensor, values: Tensor) -> tuple[Tree, Tree]:
        """The loss out of fold with the new trees."""
        trees = self.with_values(me.state["trees"], feature, threshold, values)
        return me.state | {"trees": trees}, self.tree_losses(me, self.held_scores(me, trees)).sum()

    @on_client(sends=GAINS)
    def gains(self, me: ClientContext, is_best: Tensor) -> tuple[Tree, Tree]:
        """By how much the best trees lower the loss: the sum, squares by row, the square of the site's sum."""
        trees = self.note_best(me, is_best)
        gain = self.tree_losses(me, trees["first"]) - self.tree_losses(me, trees["best"])
        sums = torch.stack([gain.sum(), gain.square().sum(), gain.sum().square()])
        return me.state | {"trees": trees}, sums

    @on_client()
    def keep_trees(self, me: ClientContext, forest: Tree) -> tuple[Tree, Tree]:
        return me.state | {"trees": self.planted(me.state["trees"], forest)}, None

    @staticmethod
    def planted(trees: Tree, forest: Tree) -> Tree:
        out = dict(trees) | {"count": torch.zeros_like(trees["count"]) + len(forest["feature"])}
        for name, value in forest.items():
            out[name] = value if name in ("base", "edges") else torch.cat([value, trees[name][len(value) :]])
        return out

    # blends

    def usable(self, fed: Federation, server: Tree) -> Tensor:
        """1 for candidates that are solved."""
        solved = server.get("solved", {}).keys() - server.get("dropped", {}).keys()
        allowed = [1.0, *(float(e in solved) for e in self.effects), *[float("trees" in server)] * self.boosted]
        return fed.model.like.new_tensor(allowed)

    def first_blend(self, me: ClientContext) -> dict[str, Tensor]:
        zero = me.n.to(me.model.dtype) * 0
        own = self.alone_weights(zero)
        return {
            "noise": zero + 1,
            "here": zero,
            "weights": zero + own.expand(self.parts, OPTIONS, -1),
            "taken": zero + zero.new_zeros(OPTIONS),
            "gain": zero + zero.new_zeros(4),  # as `site_gains.Gains`
            "sure": zero + zero.new_zeros(2),  # mean and standard error, shrunk
            "served": zero + own,
        }

    def rows(self, me: ClientContext) -> CandidateRows:
        """Out-of-fold outputs of each candidate."""
        x, y, mask = self.part(me, 0).train
        fold, models = folds_at(me, self.folds), me.state["models"]
        design = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
        said = torch.zeros_like(torch.einsum("nd,cdo->cno", design, models[:, 0]))
        for f in range(self.folds):
            said = said + (fold == f)[None, :, None] * torch.einsum("nd,cdo->cno", design, models[:, f + 1])
        is_class = not y.is_floating_point()
        said = said.log_softmax(2) if is_class else said
        if self.boosted:
            trees = me.state["trees"]
            added = (trees["best"] - trees["first"])[: len(y)]
            added = torch.cat([torch.zeros_like(added), added], dim=1) if added.shape[1] < said.shape[2] else added
            both = torch.einsum("c,cno->no", trees["base"], said) + added
            said = torch.cat([said, (both.log_softmax(1) if is_class else both)[None]])
        return CandidateRows(said, y, mask * (fold >= 0), fold, is_class)

    def alone_weights(self, like: Tensor) -> Tensor:
        """The weights of a site that keeps its own model."""
        return (torch.arange(self.candidates, device=like.device) == 0).to(like.dtype)

    def scaled_rows(self, me: ClientContext) -> CandidateRows:
        """The site's rows in units of its noise; none if it missed a candidate."""
        rows = self.rows(me)
        return rows._replace(counts=rows.counts * me.state["here"]).in_units_of(me.state["noise"])

    @on_client(sends=(ERRORS, COUNTS), doubt=doubts.in_counts(1))
    def errors(self, me: ClientContext, allowed: Tensor) -> tuple[Tree, Tree]:
        """Losses of each candidate; a site that missed one takes no part in the choice."""
        here = (me.state["solved"] >= allowed[: self.linear, None]).all().to(me.state["noise"].dtype)
        state = me.state | {"here": here, "noise": torch.ones_like(me.state["noise"])}
        rows = self.rows(me)
        rows = rows._replace(counts=rows.counts * here)
        losses = blending.row_losses(rows.said, rows.y, rows.is_class)
        return state, (
            losses_by_fold(rows, losses, self.folds),
            losses_by_fold(rows, torch.ones_like(losses[0]), self.folds),
        )

    @on_client(sends=ERRORS)
    def scaled_errors(self, me: ClientContext, allowed: Tensor, usual: Tensor) -> tuple[Tree, Tree]:
        """Squared errors in units of the site's noise: that of its best candidate, helped by the usual one."""
        rows = self.rows(me)
        rows = rows._replace(counts=rows.counts * me.state["here"])
        losses = blending.row_losses(rows.said, rows.y, rows.is_class)
        total = torch.where(allowed > 0, (losses * rows.counts).sum(1), torch.inf).amin()
        noise = ((total + HELP * usual) / (rows.counts.sum() + HELP)).sqrt().clamp(min=1e-150)
        return me.state | {"noise": noise}, losses_by_fold(rows, losses / noise.square(), self.folds)

    @on_client(sends=(GRADIENTS, CURVATURES), doubt=doubts.of_squares_in(1))
    def curvature(self, me: ClientContext, weights: Tensor) -> tuple[Tree, Tree]:
        rows = self.scaled_rows(me)
        each = [
            blending.quadratic(rows.said, rows.y, rows.without(p), weights[p], rows.is_class) for p in range(self.parts)
        ]
        return me.state, (torch.stack([g for g, _ in each]), torch.stack([h for _, h in each]))

    def own_quadratic(self, rows: CandidateRows, weights: Tensor) -> tuple[Tensor, Tensor]:
        """At the site's weights for each part and pull."""
        each = [
            [
                blending.quadratic(rows.said, rows.y, rows.without(p), weights[p, 2 + i], rows.is_class)
                for i in range(len(OWN_PULLS))
            ]
            for p in range(self.parts)
        ]
        return tuple(torch.stack([torch.stack([one[k] for one in row]) for row in each]) for k in (0, 1))  # type: ignore[return-value]

    @on_client(sends=OWN, doubt=doubts.of_squares)
    def begin_own(self, me: ClientContext, single: Tensor, common: Tensor) -> tuple[Tree, Tree]:
        """The site's weights begin at the common ones."""
        weights = torch.cat([single[:, None], common[:, None].expand(-1, OPTIONS - 1, -1)], dim=1)
        return me.state | {"weights": weights}, self.own_quadratic(self.scaled_rows(me), weights)[1]

    @on_client(sends=OWN, doubt=doubts.of_squares)
    def step_own(self, me: ClientContext, common: Tensor, metric: Tensor, allowed: Tensor) -> tuple[Tree, Tree]:
        """A Newton step of the site's weights, pulled towards the common ones in the norm `metric`."""
        rows, old = self.scaled_rows(me), me.state["weights"]
        gradient, hessian = self.own_quadratic(rows, old)
        own = old[:, 2:]
        linear = (hessian @ own[..., None])[..., 0] - gradient + (metric @ common[:, None, :, None])[..., 0]
        weights = torch.cat([old[:, :2], blending.on_simplex(hessian + metric, linear, allowed)], dim=1)
        return me.state | {"weights": weights}, self.own_quadratic(rows, weights)[1]

    def option_row_losses(self, me: ClientContext) -> Tensor:
        rows, weights = self.scaled_rows(me), me.state["weights"]
        return torch.stack([weighted_losses(rows, held_out(rows, weights[:, i])) for i in range(OPTIONS)])

    @on_client(sends=LOSSES)
    def option_losses(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, self.option_row_losses(me).sum(1)

    @on_client(sends=(LOSSES, LOSSES, LOSSES))
    def option_differences(self, me: ClientContext, best: Tensor) -> tuple[Tree, Tree]:
        """By how much each way of blending loses against the best: sums, squares by row, squares of the site's sums."""
        losses = self.option_row_losses(me)
        lost = losses - best @ losses
        return me.state, (lost.sum(1), lost.square().sum(1), lost.sum(1).square())

    @on_client()
    def settle(self, me: ClientContext, taken: Tensor) -> tuple[Tree, Tree]:
        """The site's weights, and what it gains with them over its own model."""
        rows, unit = self.scaled_rows(me), me.state["noise"].square()
        served, own = held_out(rows, torch.einsum("o,poc->pc", taken, me.state["weights"])), rows.said[0]
        gain = (weighted_losses(rows, own) - weighted_losses(rows, served)) * unit
        least = site_gains.chance(served, own) if rows.is_class else torch.zeros_like(gain)
        stated = site_gains.gains_of(gain, rows.counts, least)
        return me.state | {"taken": taken, "gain": torch.stack(list(stated))}, None

    @on_client(sends=BELOW)
    def gain_counts(self, me: ClientContext, thresholds: Tensor) -> tuple[Tree, Tree]:
        return me.state, site_gains.below(site_gains.Gains(*me.state["gain"]), thresholds)

    @on_client(sends=CERTAINTY)
    def gain_sums(self, me: ClientContext, shared: Tensor) -> tuple[Tree, Tree]:
        return me.state, site_gains.sums_of(site_gains.Gains(*me.state["gain"]), site_gains.Shared(*shared))

    @on_client(sends=WEIGHTS, doubt=doubts.in_shares)
    def decide(self, me: ClientContext, shared: Tensor) -> tuple[Tree, Tree]:
        """A site whose own model is significantly better keeps it."""
        mean, error = site_gains.shrunk(site_gains.Gains(*me.state["gain"]), site_gains.Shared(*shared))
        weights = torch.einsum("o,oc->c", me.state["taken"], me.state["weights"][0])
        own = self.alone_weights(weights)
        is_own = (mean + KNOWN * error < 0) | (me.state["here"] == 0)
        served = torch.where(is_own, own, weights)
        return me.state | {"sure": torch.stack([mean, error]), "served": served}, served

    def blend(self, fed: Federation, server: Tree) -> Tree:
        """The server's half: common weights, the way of blending, and how sure gains are."""
        allowed = self.usable(fed, server)
        is_class = not bool(server["is_number"])
        losses, counts = fed.sum(fed.map(self.errors, allowed))
        count = counts.sum()
        if not is_class:
            usual = torch.where(allowed > 0, losses.sum(1) / count.clamp(min=1), torch.inf).amin()
            losses = fed.sum(fed.map(self.scaled_errors, allowed, usual))
        rest = torch.cat([losses.sum(1)[:, None], losses.sum(1)[:, None] - losses], dim=1)  # [candidates, parts]
        rest = torch.where(allowed[:, None] > 0, rest, torch.inf)
        single = torch.nn.functional.one_hot(rest.argmin(0), self.candidates).to(losses)
        rows = torch.cat([count[None], count - counts]).clamp(min=1)
        common = uniform = (allowed / allowed.sum()).expand(self.parts, -1)
        for _ in range(NEWTON if is_class else 1):
            gradient, hessian = fed.sum(fed.map(self.curvature, common))
            metric = hessian / rows[:, None, None]
            linear = ((hessian @ common[..., None]) + metric @ uniform[..., None])[..., 0] - gradient
            common = blending.on_simplex(hessian + metric, linear, allowed)
        hessian = fed.sum(fed.map(self.begin_own, single, common))
        pulls = hessian.new_tensor(OWN_PULLS)[:, None, None]
        for _ in range(NEWTON if is_class else 1):
            metric = pulls * hessian / rows[:, None, None, None]
            hessian = fed.sum(fed.map(self.step_own, common, metric, allowed))
        taken = self.choose_option(fed, count)
        fed.map(self.settle, taken)

        def ask(shared: site_gains.Shared) -> Tensor:
            return fed.sum(fed.map(self.gain_sums, torch.stack(list(shared))))

        def count_below(thresholds: Tensor) -> Tensor:
            return fed.sum(fed.map(self.gain_counts, thresholds))

        shared = site_gains.shared_by(count_below, ask, count)
        served = fed.sum(fed.map(self.decide, torch.stack(list(shared))))
        weights = torch.where(taken[0] > 0, single[0], common[0])
        fed.report(gain=shared.center, error=shared.doubt.sqrt(), way=taken.argmax())
        return server | {"common": weights, "served": served / max(len(fed.cohort), 1), "taken": taken}

    def choose_option(self, fed: Federation, count: Tensor) -> Tensor:
        """The first option (from one candidate for all to blends by site) not significantly worse than the best."""
        total = fed.sum(fed.map(self.option_losses))
        best = torch.nn.functional.one_hot(total.argmin(), OPTIONS).to(total)
        lost, by_row, by_site = fed.sum(fed.map(self.option_differences, best))
        spread = torch.stack(
            [squares - lost.square() / n for squares, n in ((by_row, count.clamp(min=1)), (by_site, len(fed.cohort)))]
        )
        is_sure = lost > SURELY * spread.clamp(min=0).sqrt().amax(0) + ROUNDING * total.min().abs()
        return torch.nn.functional.one_hot((~is_sure).to(torch.int64).argmax(), OPTIONS).to(total)

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return self.served(me, me.state["served"])

    def served(self, me: ClientContext, weights: Tensor) -> Params:
        """A blend of linear models is one: of classes only differences of logits count."""
        is_class = me.experiment.data.task == "classification"
        if self.boosted:  # the linear part; the trees are beside it
            weights = weights[: self.linear] + weights[self.linear] * me.state["trees"]["base"]
        v = torch.einsum("c,cdo->do", weights, me.state["models"][:, 0])
        return ridge.as_params(me.model, unscale(v, me.state["center"], me.state["spread"], is_class))

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
        if "trees" in server:
            state |= {"trees": self.planted(state["trees"], server["trees"])}
        return state | {"models": models, "served": server["common"]}
