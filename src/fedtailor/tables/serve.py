"""The personal model of a site, from the folder of a run or a fit: its blend, trees, calibration and intervals."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor import algorithms
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.data import between, count
from fedtailor.core.model import Model
from fedtailor.core.segmentation import class_scores
from fedtailor.core.trees import Params, Tree, leaves, tree_map
from fedtailor.core.windows import predict_in_windows
from fedtailor.data.tabular.align import match_columns
from fedtailor.data.tabular.columns import ClientTable
from fedtailor.data.tabular.preparation import NumberColumn, Preparation
from fedtailor.data.tabular.prepare import check_column
from fedtailor.data.tabular.read import as_frame, table_from_frame
from fedtailor.data.tabular.target import numeric_values
from fedtailor.errors import DataError, RunError, nearest
from fedtailor.experiments.building import at_client
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.model_description import ModelDescription, make_described_model, read_description
from fedtailor.experiments.runner import reload_experiment
from fedtailor.experiments.store import ABOUT, FIT, PersonalModels, RunFolder, latest, part_of, read_json
from fedtailor.experiments.user_code import other_code
from fedtailor.tables.boosted_trees import TREES_FOLDER, TreeParts, Trees, tree_parts
from fedtailor.tables.intervals import ErrorScale, interval_around

ROWS = 4096  # at a time
LARGE = 64 * 2**20  # bytes of samples at a time


@dataclass(frozen=True)
class Extras:
    """Additions of a fit of tables to a site's linear model: trees, calibration, interval widths."""

    trees: TreeParts | None = None
    slope: float = 1.0
    offset: float = 0.0  # of the second of two classes
    half_widths: Mapping[float, float] = field(default_factory=dict)  # by level, on the scale of errors

    def apply(self, x: Any, outputs: Tensor, is_class: bool) -> Tensor:
        """Outputs of all parts together, calibrated."""
        mixed = outputs if self.trees is None else self.trees.mix(x, outputs, is_class)
        if (self.slope, self.offset) == (1.0, 0.0):
            return mixed
        mixed = mixed * self.slope
        return mixed + mixed.new_tensor([0.0, self.offset]) if self.offset else mixed

    def half_width(self, level: float, source: str) -> float:
        """Half the width of the interval that holds this share of the rows; linear between levels that are known."""
        if not self.half_widths:
            raise RunError(
                f"{source}: has no prediction intervals; a fit of numbers in tables with --algorithm auto has"
            )
        known = sorted(self.half_widths)
        if not known[0] <= level <= known[-1]:
            raise DataError(f"--interval {level:g}: must be from {known[0]:g} to {known[-1]:g}")
        above = next(each for each in known if each >= level)
        below = max(each for each in known if each <= level)
        low, high = self.half_widths[below], self.half_widths[above]
        return high if above == below else low + (high - low) * (level - below) / (above - below)


def extras_of(row: Mapping[str, Any], record: Mapping[str, Any], trees: TreeParts | None) -> Extras:
    """Read from the record of a fit; a newcomer has the intervals of all sites."""
    slope, offset = row.get("calibration", (1.0, 0.0))
    widths = row.get("half_widths", record.get("half_widths", ()))
    if not all(isinstance(v, float | int) and math.isfinite(v) for v in (slope, offset, *widths)):
        raise RunError("fit.json: calibration and half_widths must be numbers", code="run.damaged")
    return Extras(trees, float(slope), float(offset), dict(zip(record.get("levels", ()), widths, strict=False)))


def fold_calibration(params: Params, extras: Extras) -> tuple[Params, Extras]:
    """Without trees, calibration is a part of the linear model, and every export has it."""
    if extras.trees is not None or (extras.slope, extras.offset) == (1.0, 0.0):
        return params, extras
    scaled = {name: value * extras.slope for name, value in params.items()}
    for name, value in scaled.items():
        if value.dim() == 1 and len(value) == 2:
            scaled[name] = value + torch.tensor([0.0, extras.offset], dtype=value.dtype)
    return scaled, Extras(None, half_widths=extras.half_widths)


@dataclass(frozen=True)
class Personal:
    """The model that serves one site."""

    site: str
    algorithm: Algorithm
    model: Model
    params: Params
    task: str
    classes: tuple[str, ...] = ()
    preparation: Preparation | None = None
    source: str = ""  # the folder of the run
    inputs: tuple[str, ...] = ()  # names of the parts of a sample, where it has several
    notes: list[str] = field(default_factory=list)  # warnings while rows were read
    extras: Extras = field(default_factory=Extras)  # trees, calibration and intervals, where a fit has them
    window: tuple[int, ...] = ()  # in which images are predicted; none: whole

    @property
    def title(self) -> str:
        return self.algorithm.title or type(self.algorithm).__name__

    @property
    def labels(self) -> NDArray[Any]:
        """Class names in the order of the outputs, as integers if all of them are; empty if they have no names."""
        try:
            whole = np.array([int(name) for name in self.classes], dtype=np.int64)
        except (ValueError, OverflowError):
            return np.array(self.classes)
        # 01 and 1 are two classes
        return whole if [str(number) for number in whole] == list(self.classes) else np.array(self.classes)

    def outputs(self, x: Tree) -> Tree:
        """The model's outputs, as in training.

        Args:
            x: Prepared features.

        Returns:
            Logits, or standardised numbers, one row per sample.
        """
        size = sum(v[:1].nbytes for v in leaves(x))
        rows = max(1, min(ROWS, LARGE // max(size, 1)))
        with torch.no_grad():
            parts = [self._predict(between(x, a, a + rows)) for a in range(0, max(count(x), 1), rows)]
        base = tree_map(lambda *each: torch.cat(each), *parts)
        return self.extras.apply(x, base, self.task == "classification")

    def _predict(self, x: Tree) -> Tree:
        def whole(x: Tree) -> Tree:
            return self.algorithm.predict(self.model, self.params, x)

        return predict_in_windows(whole, x, self.window) if self.window else whole(x)

    def readable(self, outputs: Tree) -> Tree:
        """Outputs on the scale of the data.

        Args:
            outputs: As from `outputs`.

        Returns:
            Probabilities of the classes, or numbers in units of the target.
        """
        if self.task == "classification":
            return outputs.softmax(1)
        if self.task == "segmentation":
            return class_scores(outputs).softmax(1)
        if self.task == "multilabel":
            return outputs.sigmoid()
        if self.preparation is None:
            return outputs.exp() if self.task == "count" else outputs
        return self.preparation.target.readable(outputs)

    @property
    def error_scale(self) -> ErrorScale:
        """On which intervals reach equally far to both sides."""
        is_log = self.preparation is not None and self.preparation.target.is_log
        return "root" if self.task == "count" else "log" if is_log else "plain"

    def predict(self, rows: Any) -> NDArray[Any]:
        """Predict the class, or the number, of every row; of images, the class of every pixel or voxel.

        Args:
            rows: A frame (polars, pandas, or columns by name) or an array with the columns of training, as they are in
                a file; or a tensor of prepared features.

        Returns:
            One entry per row; by name where the model has several outputs.

        Raises:
            DataError: A column is missing or cannot be read.
        """
        values = self._readable(rows)
        if isinstance(values, dict):
            return values  # type: ignore[return-value]
        if self.task == "segmentation":
            return values.argmax(1).astype(np.uint8)
        if self.task != "classification":
            return values.squeeze(1) if values.shape[1:] == (1,) else values
        likely = values.argmax(1)
        return self.labels[likely] if self.classes else likely

    def predict_proba(self, rows: Any) -> NDArray[np.float64]:
        """Predict the probabilities of the classes.

        Args:
            rows: As for `predict`.

        Returns:
            [rows, classes], in the order of `labels`; of images [rows, classes, ...].

        Raises:
            DataError: The model predicts a number.
        """
        if self.task not in ("classification", "segmentation"):
            raise DataError(f'"{self.site}" predicts a number; predict_proba is for classes')
        return self._readable(rows)

    def predict_interval(self, rows: Any, level: float = 0.9) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Predict an interval that contains the number of a row with the given probability.

        Args:
            rows: As for `predict`.
            level: The probability for new rows of this site.

        Returns:
            Lower and upper ends, one entry per row each.

        Raises:
            DataError: The model predicts classes, or has no intervals.
        """
        if self.task not in ("regression", "count"):
            raise DataError(f'"{self.site}" predicts classes; intervals are for numbers, predict_proba for classes')
        half = self.extras.half_width(level, self.source)
        return interval_around(self._readable(rows).squeeze(1), half, self.error_scale)

    def _readable(self, rows: Any) -> Any:
        if isinstance(rows, dict) and self.preparation is None:
            x: Tree = {k: self.in_type(torch.as_tensor(v)) for k, v in rows.items()}
        elif isinstance(rows, np.ndarray) and self.preparation is not None:
            x = self.encode(self.table(Path("rows"), self._as_frame(rows)))
        elif isinstance(rows, np.ndarray | Tensor):
            x = self.in_type(torch.as_tensor(rows))
        else:
            x = self.encode(self.table(Path("rows"), as_frame(rows)))
        return tree_map(lambda v: v.double().numpy(), self.readable(self.outputs(x)))

    def in_type(self, x: Tensor) -> Tensor:
        """Samples in the type of the model.

        Args:
            x: Numbers, or tokens, which stay as they are.

        Returns:
            The same numbers.
        """
        return x.to(self.model.dtype) if x.is_floating_point() else x

    def _as_frame(self, rows: NDArray[Any]) -> pl.DataFrame:
        """An array of rows as they stand in a file: its columns are those of training, in their order."""
        assert self.preparation is not None
        names = [column.name for column in self.preparation.columns]
        if rows.ndim != 2 or rows.shape[1] != len(names):
            raise DataError(
                f"rows: an array of shape {list(rows.shape)}; the model takes {len(names)} columns, "
                f"{', '.join(names)}, as they are in a file; features that are prepared already go in as a tensor"
            )
        return as_frame({name: rows[:, i].tolist() for i, name in enumerate(names)})

    def table(self, path: Path, frame: pl.DataFrame) -> ClientTable:
        """The columns of a frame that the model uses.

        Args:
            path: What the frame is called in messages.
            frame: Rows; other columns are ignored.

        Returns:
            A table for `encode`.
        """
        used = [] if self.preparation is None else [column.name for column in self.preparation.columns]
        frame = frame.rename(match_columns(frame.columns, used))
        return table_from_frame(path, frame, ignore=[name for name in frame.columns if name not in used])

    def encode(self, table: ClientTable) -> Tensor:
        """Prepare the rows of a table.

        Args:
            table: May have other columns, and need not have the target.

        Returns:
            Features, one row per row of the table.

        Raises:
            DataError: A column that the model needs is missing.
        """
        if self.preparation is None:
            raise DataError(
                f"{table.path}: this run does not read tables; give an .npz file with an array x of samples"
            )
        table = table.in_order({c.name: c.date_order for c in self.preparation.columns if isinstance(c, NumberColumn)})
        absent = {c.name for c in self.preparation.columns if self.site in c.absent and c.name not in table.columns}
        for column in self.preparation.columns:
            if column.name in absent:
                continue
            if column.name not in table.columns:
                hint = nearest(column.name, table.names)
                raise DataError(f'{table.path}: no column "{column.name}", which the model needs; {hint}')
            if isinstance(column, NumberColumn):
                check_column(table, column.name, column.is_date)
        split = {kind: [c.name for c in self.preparation.columns if c.kind == kind] for kind in ("number", "category")}
        dates = {c.name for c in self.preparation.columns if isinstance(c, NumberColumn) and c.is_date}
        numeric = {
            name: np.full(table.rows, np.nan)
            if name in absent
            else numeric_values(table.columns[name].of_kind(name in dates))
            for name in split["number"]
        }
        categorical = {
            name: [None] * table.rows if name in absent else table.columns[name].labels() for name in split["category"]
        }
        x = self.preparation.encode(self.site, numeric, categorical, str(table.path), self.notes)
        return torch.from_numpy(x).to(self.model.dtype)

    def __repr__(self) -> str:
        kind = f"classes {', '.join(self.classes)}" if self.classes else self.task
        return f"Personal({self.site}: {self.title}, {kind})"


Floats = NDArray[np.float64]


def run_of(path: Path, site: str) -> tuple[RunFolder, str]:
    """The run that serves a site, the one that a fit chose for it or the only one, and which of its two models."""
    return ServedModels(path).run_of(site)


def _newcomers(run: Path) -> list[str]:
    return sorted(p.parent.name for p in run.glob("newcomers/*/index.json"))


def sites_of(folder: RunFolder) -> list[str]:
    """Clients and newcomers with a model in a run."""
    return [*folder.about["clients"], *_newcomers(folder.path)]


def personal(path: Path, site: str, data_root: Path | None = None) -> Personal:
    """The model of a site in the folder of a fit, or of a run: there of the round selected on validation data."""
    return ServedModels(latest(path), data_root).personal(site)


@dataclass(frozen=True)
class _ServedRun:
    """What all models of a run have in common."""

    folder: RunFolder
    config: RunConfig
    preparation: Preparation | None
    description: ModelDescription
    algorithm: Algorithm
    clients: frozenset[str]
    notes: tuple[str, ...]

    @staticmethod
    def open(folder: RunFolder, data_root: Path | None) -> _ServedRun:
        if folder.results is None:
            raise RunError(
                f"{folder.path}: not finished yet; continue it with: fedtailor resume {shlex.quote(str(folder.path))}"
            )
        notes = other_code(folder)
        about, preparation = folder.about, folder.preparation
        if "shape" not in about:  # from before it was kept
            data = reload_experiment(folder, data_root, serves=True).data
            preparation = data.preparation
            known = {"shape": list(data.shape), "outputs": data.outputs, "classes": list(data.classes)}
            about = {"task": about["task"]} | known
        description = read_description(about, str(folder.path / ABOUT))
        config = folder.config
        algorithm = algorithms.make(config.algorithm.name, config.algorithm.options)
        clients = frozenset(folder.about["clients"])
        return _ServedRun(folder, config, preparation, description, algorithm, clients, tuple(notes))


class ServedModels:
    """The models of a fit or a run; what sites have in common is read once."""

    def __init__(self, path: Path, data_root: Path | None = None) -> None:
        self.path, self.data_root = path, data_root
        self.record: dict[str, Any] | None = read_json(path / FIT) if (path / FIT).exists() else None
        self._shared: Trees | None = None  # trees of all sites
        self._runs: dict[Path, _ServedRun] = {}
        self._models: dict[Path, tuple[Model, dict[str, torch.Size]]] = {}
        self._params: dict[tuple[Path, str], PersonalModels] = {}

    def run_of(self, site: str) -> tuple[RunFolder, str]:
        """The run that serves a site, and which of its two models."""
        if self.record is None:
            return self._finished(RunFolder.open(self.path)), "selected"
        if "sites" not in self.record:
            raise RunError(
                f"{self.path}: not finished yet; continue with the same fedtailor fit and "
                f"--out {shlex.quote(str(self.path))}"
            )
        if site in self.record["sites"]:
            run = part_of(self.path, self.record["sites"][site]["run"])
        else:
            run = part_of(self.path, self.record["newcomers"])
            if site not in (newcomers := _newcomers(run)):
                raise RunError(f'{self.path}: no site "{site}"; {nearest(site, [*self.record["sites"], *newcomers])}')
        return self._finished(RunFolder.open(run)), self.record["kind"]

    def _finished(self, folder: RunFolder) -> RunFolder:
        if folder.path not in self._runs:
            self._runs[folder.path] = _ServedRun.open(folder, self.data_root)
        return folder

    def _kept(self, run: Path, kind: str, site: str) -> Params:
        if (run, kind) not in self._params:
            self._params[run, kind] = PersonalModels(run, kind)
        model: Params = self._params[run, kind].of(site)
        return model

    def personal(self, site: str) -> Personal:
        """The model of a site."""
        folder, kind = self.run_of(site)
        run, path = self._runs[folder.path], folder.path
        newcomer = site not in run.clients
        if newcomer and site not in _newcomers(path):
            raise RunError(f'{self.path}: no site "{site}"; {nearest(site, sites_of(folder))}')
        preparation = run.preparation
        if newcomer and (own := read_json(path / "newcomers" / site / "newcomer.json").get("preparation")):
            preparation = Preparation.model_validate(own)
        if preparation is not None and preparation.sites and site not in preparation.sites:
            raise RunError(f'{path}: how rows of "{site}" are prepared was not kept then; onboard it again')
        params = folder.newcomer(site) if newcomer else self._kept(path, kind, site)
        extras = Extras()
        if self.record is not None:
            row = {} if newcomer else self.record["sites"].get(site, {})
            trees = None
            if "weights" in row:
                params = self._blend(site, row["weights"], kind)
                assert isinstance(run.description.shape, list)  # of a table
                features, outputs = run.description.shape[0], run.description.outputs
                if row.get("shared_trees") and self._shared is None:
                    file = part_of(self.path / TREES_FOLDER, self.record["shared_trees"])
                    self._shared = Trees.read(file, features, outputs)
                trees = tree_parts(self.path, row, features, outputs, self._shared)
            params, extras = fold_calibration(params, extras_of(row, self.record, trees))
        return Personal(
            site=site,
            algorithm=run.algorithm,
            model=self._model(run, site, params),
            params=params,
            task=run.description.task,
            classes=tuple(run.description.classes),
            preparation=preparation.of(site) if preparation is not None else None,
            source=str(path),
            inputs=run.description.inputs,
            notes=list(run.notes),
            extras=extras,
            window=run.config.evaluation.window or (),
        )

    def _model(self, run: _ServedRun, site: str, params: Params) -> Model:
        """One for all clients with the same architecture."""
        config, sizes = at_client(run.config, site), {name: value.shape for name, value in params.items()}
        path = run.folder.path
        if config == run.config and path in self._models and self._models[path][1] == sizes:
            return self._models[path][0]
        model = make_described_model(config, run.description, params, str(path))
        if config == run.config:
            self._models[path] = model, sizes
        return model

    def _blend(self, site: str, weights: dict[str, float], kind: str) -> Params:
        """The weighted mean of linear models, which predicts the weighted mean of what they predict."""
        parts = [(w, self._kept(part_of(self.path, run), kind, site)) for run, w in weights.items()]
        first = parts[0][1]
        return {name: sum((w * m[name] for w, m in parts), torch.zeros_like(first[name])) for name in first}


def site_column(path: Path) -> str | None:
    """The column that named the site in training, if there was one."""
    if (path / FIT).exists():
        record = read_json(path / FIT)
        if "newcomers" not in record:
            raise RunError(f"{path}: not finished yet; call the same fit again")
        path = part_of(path, record["newcomers"])
    column: str | None = getattr(RunFolder.open(path).config.data, "client_column", None)
    return column
