"""The linear candidates of a fit: alone, common and mixed models, each cross-fitted within a time limit.

Folds are cut inside each site. All sites train together on all but their own part of a fold, and predict it, so that
every training row is predicted by models that have not seen it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import engines
from fedtailor.algorithms._programs.parts import folds_of_rows
from fedtailor.algorithms._programs.table_fit import MOST_SLOPES, MOST_WITH_INTERCEPT, is_usable
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.federation import Federation
from fedtailor.core.reduce import PerClient
from fedtailor.core.trees import Params, Tree
from fedtailor.engines.machine import training_settings
from fedtailor.errors import ClientError, RoundAbandoned, UserError
from fedtailor.experiments.building import assemble
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.experiments.store import PersonalModels, RunFolder, read_json, read_tree, write_json, write_tree
from fedtailor.studies.grid import Cell, CellListener, start_or_resume
from fedtailor.tables.stacked_sites import NotUsable, StackedSites

MORE_ROWS = 1.5  # training on all rows, and what is saved of it, in times of the first fold
ALONE, COMMON = "alone", "common"
START = "start"  # folder of states that an update begins with
LABELS = {  # by what differs between sites
    "": ALONE,
    "none": COMMON,
    "intercept": "mixed, intercept",
    "diagonal": "mixed, slopes",
    "full": "mixed, slopes together",
}
FAILURES = (UserError, ClientError, RoundAbandoned, torch.linalg.LinAlgError)  # of one candidate, not of the fit


def kind_of(task: str) -> str:
    return {"classification": "mixedlogit", "count": "mixedpoisson"}.get(task, "mixedmodel")


def cells_of(tables: dict[str, Any], data: FederatedData, out: Path) -> list[Cell]:
    """The linear candidates, from simple to rich, each a run of one round."""
    kind = kind_of(data.task)
    size = (data.shape[0] + 1) * max(data.outputs - 1, 1)
    is_gaussian = data.task == "regression"
    is_alone = len(data.clients) == 1
    effects = [e for e in LABELS if not e or (not is_alone and is_usable(e, size, is_gaussian))]
    data_table = tables["data"] | ({"val": 0.0} if "val" in tables["data"] else {})
    solved = {
        "rounds": 1,
        "data": data_table,
        "model": {"name": "linear", "dtype": "float64"},
        "evaluation": {"every": 1},
    }
    return [candidate_cell(tables | solved, kind, effect, out) for effect in effects]


def unaffordable(data: FederatedData) -> list[dict[str, Any]]:
    """Candidates that so many coefficients leave no time for, as the record names them."""
    size = (data.shape[0] + 1) * max(data.outputs - 1, 1)
    limits = {"intercept": MOST_WITH_INTERCEPT, "diagonal": MOST_SLOPES}
    return [
        {"label": LABELS[effects], "round": 0, "val": None, "why": f"{size} coefficients; it is tried up to {most}"}
        for effects, most in limits.items()
        if size > most and len(data.clients) > 1
    ]


def candidate_cell(tables: Mapping[str, Any], kind: str, effects: str, out: Path) -> Cell:
    """The run of a mixed model with these effects or, with none named, of the sites' own models."""
    algorithm = {"name": kind, "effects": effects} if effects else {"name": "linearalone"}
    config: RunConfig = parse(dict(tables) | {"algorithm": algorithm}, origin="fit")
    return Cell(LABELS[effects], config.seed, out / f"{'-'.join(algorithm.values())}-seed{config.seed}", config)


class OutOfTime(Exception):
    """The time limit is over before a candidate has ended."""


@dataclass
class Clock:
    """How much of a time limit is left; 0 is none."""

    limit: float
    begun: float = field(default_factory=time.monotonic)

    def check(self, needed: float = 0.0) -> None:
        """Raise `OutOfTime` when the limit is over, or would be after so many seconds more."""
        if self.limit and time.monotonic() - self.begun + needed > self.limit:
            raise OutOfTime

    def has_time(self, part: float = 1.0) -> bool:
        """Whether less than that part of the limit is spent."""
        return not self.limit or time.monotonic() - self.begun < part * self.limit


@dataclass(frozen=True)
class LinearModels:
    """The linear models of all sites."""

    weight: Tensor  # [sites, outputs, features]
    bias: Tensor  # [sites, outputs]

    @staticmethod
    def of(models: Params) -> LinearModels:
        """From stacked parameters."""
        weight = next(v for v in models.values() if v.dim() == 3).double()
        bias = next((v.double() for v in models.values() if v.dim() == 2), weight.new_zeros(weight.shape[:2]))
        return LinearModels(weight, bias)

    def outputs(self, rows: Rows, is_class: bool) -> Tensor:
        """Outputs of every site's model for its rows: log-probabilities of classes, or numbers."""
        out = torch.zeros((len(rows.x), self.bias.shape[1]), dtype=torch.float64, device="cpu")
        starts = rows.starts.tolist()
        if len(rows.x) > FEW_ROWS * len(rows.sizes):
            for i, (a, b) in enumerate(pairwise(starts)):
                out[a:b] = rows.x[a:b].double() @ self.weight[i].mT + self.bias[i]
        else:
            site = torch.from_numpy(site_of_rows(rows))
            for a in range(0, len(rows.x), AT_ONCE):
                at = site[a : a + AT_ONCE]
                x = rows.x[a : a + AT_ONCE].double()
                out[a : a + AT_ONCE] = torch.einsum("nd,nod->no", x, self.weight[at]) + self.bias[at]
        return out.log_softmax(1) if is_class else out


FEW_ROWS = 500  # of a site, below which rows of all sites are predicted together
AT_ONCE = 2**16  # of these


@dataclass
class CrossFitted:
    """Of every candidate its out-of-fold outputs and the models of each fold; dropped candidates with the reason."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    models: dict[str, list[LinearModels]] = field(default_factory=dict)
    dropped: list[dict[str, Any]] = field(default_factory=list)


def cross_fit(
    cells: list[Cell],
    data: FederatedData,
    folds: NDArray[np.int64],
    root: Path | None,
    listener: CellListener,
    clock: Clock,
) -> CrossFitted:
    """Train every linear candidate on all rows, then without each fold. The sites' own models are never dropped."""
    found = CrossFitted()
    for cell in cells:
        why = "the time limit"
        own_clock, models = clock if found.outputs else Clock(0.0), list[LinearModels]()
        try:
            found.outputs[cell.label] = _cross_fit_cell(cell, data, folds, root, listener, own_clock, models)
            found.models[cell.label] = models
            continue
        except OutOfTime:
            pass
        except FAILURES as error:
            if cell.label == ALONE:
                raise
            why = str(error).splitlines()[0]
        found.dropped.append({"label": cell.label, "round": 0, "val": None, "why": why})
    return found


def _cross_fit_cell(
    cell: Cell,
    data: FederatedData,
    folds: NDArray[np.int64],
    root: Path | None,
    listener: CellListener,
    clock: Clock,
    models: list[LinearModels],
) -> Tensor:
    """Folds begin where the training on all rows ended. With a time limit they come first, since they can be ended at
    any exchange, and show how long the training on all rows will take."""

    seconds: list[float] = []

    def fold_done(fold: int) -> None:
        listener(f"{cell.folder.name}, folds", fold, int(folds.max()) + 1)
        seconds.append(time.monotonic() - clock.begun)

    def no_check() -> None:
        """Without a limit there is nothing to end it."""

    if (kept := _kept_folds(cell)) is not None:  # of a fit that was interrupted later
        models.extend(kept[1])
        fold_done(int(folds.max()))
        return kept[0]
    clock.check()
    seconds[:] = [time.monotonic() - clock.begun]
    if not clock.limit:
        start_or_resume(cell, root, listener, loaded=data, server=start_state(cell))
        saved = RunFolder(cell.folder).load_checkpoint()
        assert saved is not None
        start = saved[1]["state"]["server"] or None
        outputs = out_of_fold(cell.config, data, folds, start, fold_done, no_check, models, cell.folder)
        _keep_folds(cell, outputs, models)
        return outputs
    outputs = out_of_fold(cell.config, data, folds, start_state(cell), fold_done, clock.check, models)
    clock.check(MORE_ROWS * (seconds[min(1, len(seconds) - 1)] - seconds[0]))
    start_or_resume(cell, root, listener, loaded=data, server=start_state(cell))
    _keep_folds(cell, outputs, models)
    return outputs


KEPT_FOLDS, KEPT_FOLD = "folds.json", "fold-"


def _keep_folds(cell: Cell, outputs: Tensor, models: list[LinearModels]) -> None:
    """Beside the run, so that a fit that is interrupted does not cross-fit it again."""
    tree = {"outputs": outputs, "models": [{"weight": each.weight, "bias": each.bias} for each in models]}
    write_json(cell.folder / KEPT_FOLDS, write_tree(cell.folder / "folds.safetensors", tree))
    for part in cell.folder.glob(f"{KEPT_FOLD}*"):
        part.unlink()


def _kept_folds(cell: Cell) -> tuple[Tensor, list[LinearModels]] | None:
    entry = cell.folder / KEPT_FOLDS
    if not entry.exists():
        return None
    tree = read_tree(cell.folder, read_json(entry))
    return tree["outputs"], [LinearModels(each["weight"], each["bias"]) for each in tree["models"]]


def _kept_fold(folder: Path | None, fold: int) -> tuple[Tree, LinearModels] | None:
    """The server's state and the models of a fold, if a fit that was interrupted has kept them."""
    if folder is None or not (entry := folder / f"{KEPT_FOLD}{fold}.json").exists():
        return None
    tree = read_tree(folder, read_json(entry))
    return tree.get("server"), LinearModels(tree["weight"], tree["bias"])


def _keep_fold(folder: Path | None, fold: int, server: Tree, own: LinearModels) -> None:
    if folder is not None:
        tree = {"weight": own.weight, "bias": own.bias} | ({"server": server} if server else {})
        entry = folder / f"{KEPT_FOLD}{fold}.json"
        write_json(entry, write_tree(entry.with_suffix(".safetensors"), tree))


def start_state(cell: Cell) -> Tree:
    """The state from which an update begins, if an earlier fit left one."""
    entry = cell.folder.parent / START / f"{cell.folder.name}.json"
    return read_tree(entry.parent, read_json(entry)) if entry.exists() else None


def delivered_models(cell: Cell, sites: Sequence[str]) -> LinearModels:
    """The models of a candidate that was trained on all rows."""
    models = PersonalModels(cell.folder, "last")
    each = [models.of(site) for site in sites]
    return LinearModels.of({name: torch.stack([model[name] for model in each]) for name in each[0]})


FOLDS = 5


def all_in_training(data: FederatedData, *, test: bool = False) -> FederatedData:
    """Validation rows are training rows: folds take their place; so are test rows, if they are asked for."""
    splits = [rows for rows in (data.val, *([data.test] if test else [])) if len(rows.x)]
    if not splits:
        return data
    parts = [
        [torch.cat(each) for each in zip(*(rows.of(i) for rows in (data.train, *splits)), strict=True)]
        for i in _sites(data)
    ]
    sizes = [len(x) for x, _ in parts]
    train = Rows(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), _starts(sizes))
    empty = Rows(train.x[:0], train.y[:0], _starts([0] * len(sizes)))
    return replace(data, train=train, val=empty, test=empty if test else data.test)


def folds_of(data: FederatedData, seed: int, folds: int = FOLDS) -> NDArray[np.int64]:
    """The fold of every training row, and no site ever without a row.

    Not stratified by class: with equal class shares in every fold, models that know the site's share would look better
    than they are on new rows.
    """
    sizes = data.train.sizes.tolist()
    each = [folds_of_rows(rows, seed, site, folds) for rows, site in zip(sizes, data.clients, strict=True)]
    return np.concatenate(each)


def subset_rows(data: FederatedData, keep: NDArray[np.bool_]) -> FederatedData:
    starts = data.train.starts.tolist()
    sizes = [int(keep[a:b].sum()) for a, b in pairwise(starts)]
    at = torch.from_numpy(np.flatnonzero(keep))
    return replace(data, train=Rows(data.train.x[at], data.train.y[at], _starts(sizes)))


def site_of_rows(rows: Rows) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(rows.sizes)), rows.sizes.numpy())


class WatchedFederation(Federation):
    """Calls a function before every exchange; it may end the training by an exception."""

    check: Callable[[], None]

    def map(self, fn: Callable[..., Any], *message: Tree | PerClient) -> PerClient:
        self.check()
        return super().map(fn, *message)


def train(
    config: RunConfig, data: FederatedData, start: Tree = None, check: Callable[[], None] = lambda: None
) -> tuple[Tree, LinearModels]:
    """The server's state and every site's model after the rounds of a configuration, in this process."""
    server, _, models = train_sites(config, data, start, check)
    return server, models


def train_sites(
    config: RunConfig, data: FederatedData, start: Tree = None, check: Callable[[], None] = lambda: None
) -> tuple[Tree, Tree, LinearModels]:
    """As `train`, and between the two what the sites keep, stacked."""
    experiment = assemble(config, data)
    if StackedSites.suits(experiment):
        with suppress(NotUsable), training_settings(1), torch.no_grad():
            sites = StackedSites(experiment, config.federation.limits.max_norm, check)
            server = experiment.algorithm.server_init(experiment.model) if start is None else start
            for round in range(1, config.rounds + 1):
                server = sites.run_round(round, server)
            return server, sites.state, LinearModels.of(sites.models(config.rounds, server))
    with engines.open_engine(config.federation.engine, experiment) as engine:
        fed = WatchedFederation(engine, config.federation.limits)
        fed.check = check
        server = experiment.algorithm.server_init(experiment.model) if start is None else start
        everybody = range(len(data.clients))
        for round in range(1, config.rounds + 1):
            server = fed.run_round(round, everybody, server)
        models: dict[int, Params] = {}
        for group, _, stack in engine.evaluate(everybody, config.rounds, server, ()):
            for row, client in enumerate(group):
                models[client] = {name: value[row].clone() for name, value in stack.items()}
        state = engine.get_states()["state"]
    return (
        server,
        state,
        LinearModels.of({name: torch.stack([models[i][name] for i in everybody]) for name in models[0]}),
    )


def out_of_fold(
    config: RunConfig,
    data: FederatedData,
    folds: NDArray[np.int64],
    start: Tree = None,
    fold_done: Callable[[int], None] = lambda fold: None,
    check: Callable[[], None] = lambda: None,
    models: list[LinearModels] | None = None,
    folder: Path | None = None,
) -> Tensor:
    """Outputs for each training row from models trained without its fold; NaN where there is no fold.

    Every fold begins at `start`; without one, at the result of the first fold. The models go into a list, if one is
    given. With a folder each fold is kept there as it ends, and read where it was kept.
    """
    out = torch.full((len(data.train.x), data.outputs), torch.nan, dtype=torch.float64, device="cpu")
    for fold in range(int(folds.max()) + 1):
        held = folds == fold
        if held.any():
            if (kept := _kept_fold(folder, fold)) is None:
                kept = train(config, subset_rows(data, ~held), start, check)
                _keep_fold(folder, fold, *kept)
            server, own = kept
            start = start or server
            if models is not None:
                models.append(own)
            rows = subset_rows(data, held).train
            out[torch.from_numpy(held)] = own.outputs(rows, data.task == "classification")
            fold_done(fold + 1)
    return out


def _sites(data: FederatedData) -> range:
    return range(len(data.clients))


def _starts(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(sizes).tolist()], dtype=torch.int64, device="cpu")
