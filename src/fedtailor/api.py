"""What `import fedtailor as ft` offers: `fit` for own data, `run` for one algorithm, `load` for what lies on disk."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from html import escape
from pathlib import Path
from typing import Any

import polars as pl
import torch
from rich.console import Console

from fedtailor import algorithms, models
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.data import FederatedData
from fedtailor.data.configs import SourceConfig
from fedtailor.data.sources import saved_data
from fedtailor.data.tabular.read import as_frame
from fedtailor.errors import ConfigError, RunError
from fedtailor.experiments import runner
from fedtailor.experiments.building import build_experiment
from fedtailor.experiments.config import CompareConfig, RunConfig, parse, read_toml, with_values
from fedtailor.experiments.progress import show_grid, show_progress
from fedtailor.experiments.store import CONFIG, FIT, RunFolder, latest, new_path, read_json
from fedtailor.experiments.user_code import accept_folder
from fedtailor.plugins import by_name, name_of
from fedtailor.report.write import write as write_report
from fedtailor.serving import onboard
from fedtailor.studies import compare as comparing
from fedtailor.studies import frames, result_tables
from fedtailor.studies.compare import GRID
from fedtailor.studies.result_tables import number
from fedtailor.studies.search import notes as search_notes
from fedtailor.tables import fit as fitting
from fedtailor.tables import leave as leaving
from fedtailor.tables import serve as serving
from fedtailor.tables import update as updating
from fedtailor.tables.drift import drift_of, drift_of_rows
from fedtailor.tables.explain_fit import coefficient_rows, explain_fit
from fedtailor.tables.fit_sources import keep_frames, source_of
from fedtailor.tables.serve import Personal

__all__ = ["ComparisonRuns", "Fit", "Personal", "Run", "RunWarning", "compare", "fit", "load", "run"]


class Fit:
    """A finished fit: a personal model for every site.

    Args:
        path: Its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record: dict[str, Any] = read_json(path / FIT)
        self._served: serving.ServedModels | None = None

    @property
    def sites(self) -> list[str]:
        return list(self.record["sites"])

    @property
    def table(self) -> pl.DataFrame:
        """Test figures of each site alone, in common and personalized, and which model serves it."""
        keys = ("train", "val", "test", "alone", "common", "personal", "served")
        return pl.DataFrame([{"site": name} | {k: row[k] for k in keys} for name, row in self.record["sites"].items()])

    def personal(self, site: str) -> Personal:
        """The model that serves a site.

        Args:
            site: Its name.

        Returns:
            A model that predicts frames and arrays.
        """
        now = latest(self.path)
        if self._served is None or self._served.path != now:  # of an update, or the first
            self._served = serving.ServedModels(now)
        return self._served.personal(site)

    def explain(self, site: str = "", model: str = "") -> dict[str, Any]:
        """What the models mean, as `fedtailor explain --json` prints it.

        Args:
            site: Also the coefficients of this site.
            model: Whose coefficients, such as "common" or "mixed, slopes"; default: of the model that serves most.

        Returns:
            Coefficients, importance of columns and, under "words", sentences.
        """
        return explain_fit(self.path, site, model=model)

    @property
    def coefficients(self) -> pl.DataFrame:
        """Coefficients per unit of each column with 95 % confidence intervals; empty without a linear model."""
        return pl.DataFrame(coefficient_rows(self.explain()), infer_schema_length=None)

    def drift(self, rows: Any, site: str = "", client_column: str | None = None) -> dict[str, Any]:
        """Compare new rows with those of training, as `fedtailor drift --json` does.

        Args:
            rows: A file or a frame.
            site: Whose rows they are; default: by column.
            client_column: The column that names each row's site.

        Returns:
            Drift by site and column, with sentences.
        """
        if isinstance(rows, str | Path):
            return drift_of(self.path, Path(rows), site, client_column)
        frame = as_frame(rows, "rows")
        return drift_of_rows(self.path, Path("rows"), frame, frame, site=site, column=client_column)

    def onboard(self, name: str, rows: Any) -> Personal:
        """A model for a newcomer. The other sites are not affected.

        Args:
            name: Of the newcomer.
            rows: Its rows, a file or a frame.

        Returns:
            Its model.
        """
        if isinstance(rows, str | Path):
            onboard.onboard(self.path, Path(rows), name)
            return self.personal(name)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.parquet"
            as_frame(rows, "rows").write_parquet(file)
            onboard.onboard(self.path, file, name)
        return self.personal(name)

    def learning_curve(self, name: str) -> dict[str, Any]:
        """How good a newcomer's model is by its number of rows.

        Args:
            name: Of the newcomer.

        Returns:
            Points of the curve, what is expected with more rows, and a sentence.

        Raises:
            RunError: There is no curve; it takes a fit of tables and ten rows or more.
        """
        curve: dict[str, Any] | None = onboard.newcomer_record(self.path, name).get("curve")
        if curve is None:
            raise RunError(f'"{name}": has no learning curve; a newcomer to a fit of tables with ten rows or more has')
        return curve

    def update(self, rows: Mapping[str, Any] | None = None, *, data: Any = None, progress: bool = True) -> Fit:
        """Fit again with the rows that there are now. This fit serves until the new one is complete.

        Args:
            rows: New rows only: frames by site.
            data: The folder or file with all rows; default, without `rows`: where the fit read them.
            progress: Show a progress bar.

        Returns:
            The new fit; the same if nothing has changed.
        """
        with show_grid(Console()) if progress else nullcontext(lambda cell, round, rounds: None) as listener:
            result = updating.update(self.path, data=None if data is None else Path(data), rows=rows, listener=listener)
        return Fit(result.folder)

    def leave(self, *sites: str, progress: bool = True) -> Fit:
        """Fit the other sites anew and delete all that was fitted to the rows of those who leave.

        Args:
            sites: Who leaves.
            progress: Show a progress bar.

        Returns:
            The new fit.
        """
        with show_grid(Console()) if progress else nullcontext(lambda cell, round, rounds: None) as listener:
            return Fit(leaving.leave(self.path, sites, listener=listener).folder)

    def report(self: Fit | Run | ComparisonRuns, out: str | Path | None = None) -> Path:
        """Write the HTML report.

        Args:
            out: Output file; default: report.html in the folder.

        Returns:
            Its path.
        """
        return write_report(self.path, None if out is None else Path(out))

    def __repr__(self) -> str:
        metric, means = self.record["metric"], self.record["means"]
        figures = ", ".join(f"{name} {number(metric, means[name])}" for name in ("alone", "common", "personal"))
        return f"Fit({len(self.sites)} sites of {self.record['data']}; test {metric}: {figures}; in {self.path})"

    def _repr_html_(self) -> str:
        metric = self.record["metric"]
        head = ("site", "rows", "alone", "in common", "personalized", "served by")
        rows = [
            (
                name,
                f"{r['train'] + r['val'] + r['test']:,}",
                *(number(metric, r[k]) for k in ("alone", "common", "personal")),
                r["served"],
            )
            for name, r in self.record["sites"].items()
        ]
        return _html(f"test {metric}, {self.record['data']}", head, rows)


class Run:
    """A run of one algorithm.

    Args:
        path: Its folder.
    """

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder.open(path)
        self.path = path

    @property
    def config(self) -> RunConfig:
        return self.folder.config

    @property
    def results(self) -> dict[str, Any]:
        """The content of results.json; empty until the run is finished."""
        return self.folder.results or {}

    @property
    def clients(self) -> list[str]:
        return list(self.folder.about["clients"])

    def metrics(self) -> list[dict[str, Any]]:
        """The record of every round."""
        return self.folder.metrics()

    @property
    def rounds(self) -> pl.DataFrame:
        """One row per round: metrics as means over clients, what the algorithm reports, traffic, faults."""
        return frames.rounds(self.folder)

    @property
    def client_rounds(self) -> pl.DataFrame:
        """One row per round and client: its metrics, and whether it was asked."""
        return frames.client_rounds(self.folder)

    @property
    def faults(self) -> pl.DataFrame:
        """One row per reply that was not used, with the reason, and per round that was abandoned."""
        return frames.faults(self.folder)

    def personal(self, client: str) -> Personal:
        """The model of a client, of the round selected on validation data.

        Args:
            client: Its name.

        Returns:
            A model that predicts frames and arrays.
        """
        return serving.personal(self.path, client)

    report = Fit.report

    def _means(self) -> dict[str, str]:
        metric = self.results.get("metric", "")
        return {k: number(metric, self.results[k]["test"][metric]["mean"]) for k in ("last", "selected") if metric}

    def __repr__(self) -> str:
        figures = ", ".join(f"{kind} {mean}" for kind, mean in self._means().items()) or "not finished"
        metric = self.results.get("metric", "")
        what = f"{self.config.algorithm.name} on {self.folder.about['data']}"
        return f"Run({what}; test {metric}: {figures}; in {self.path})"

    def _repr_html_(self) -> str:
        if not self.results:
            return escape(repr(self))
        metric = self.results["metric"]
        rows = [
            (
                kind,
                str(self.results[kind]["round"]),
                *(number(metric, self.results[kind]["test"][metric][k]) for k in ("mean", "std", "worst_tenth")),
            )
            for kind in ("last", "selected")
        ]
        title = f"test {metric}, {self.config.algorithm.name} on {self.folder.about['data']}"
        return _html(title, ("", "round", "mean", "client std", "worst tenth"), rows)


class ComparisonRuns:
    """Several algorithms on the same task.

    Args:
        path: Its folder.
    """

    def __init__(self, path: Path) -> None:
        if not (path / GRID).exists():
            raise RunError(f"{path}: holds no comparison")
        self.path = path
        self._cells = comparing.read_cells(path)

    @property
    def runs(self) -> dict[tuple[str, int], Run]:
        """The finished runs, by row and seed."""
        return {(cell.label, cell.seed): Run(cell.folder) for cell in self._cells}

    @property
    def table(self) -> pl.DataFrame:
        """The table as numbers: one row per algorithm."""
        return frames.table(comparing.rows(self._cells))

    @property
    def clients(self) -> pl.DataFrame:
        """One row per algorithm, seed and client: test metrics of the last and the selected round."""
        return frames.client_results(self._folders())

    @property
    def rounds(self) -> pl.DataFrame:
        """One row per algorithm, seed and round, as `Run.rounds`."""
        return frames.all_rounds(self._folders())

    def _folders(self) -> list[tuple[str, int, RunFolder]]:
        return [(cell.label, cell.seed, RunFolder(cell.folder)) for cell in self._cells]

    report = Fit.report

    def __repr__(self) -> str:
        labels = list(dict.fromkeys(cell.label for cell in self._cells))
        return f"ComparisonRuns({', '.join(labels)}; in {self.path})"


def _html(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def fit(
    sites: Any,
    target: str = "",
    *,
    client_column: str | None = None,
    algorithm: str = "auto",
    rounds: int = 0,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    metric: str = "",
    time_limit: float = 0.0,
    out: str | Path | None = None,
    progress: bool = True,
) -> Fit:
    """Fit a personal model for each site.

    Args:
        sites: A folder with one file per site; or frames (polars, pandas) by the name of the site; or one file or frame
            with a column that names the site. Frames are kept in the fit's folder, so that it can be opened again. Or
            the name of a data source, or of a function that makes the data, "module:load"; these have targets already.
        target: The column to predict.
        client_column: The column that names the site.
        algorithm: "auto" chooses for each site the model that serves it best.
        rounds: Training rounds; 0 is the default number.
        seed: Of all randomness.
        settings: Keys of a configuration, such as {"local.lr": 0.1}.
        metric: What figures of a table show, such as "auroc".
        time_limit: Seconds, for tables; candidates for which there is no time are left out and named. 0 is no limit.
        out: The folder; default: a new one under runs/.
        progress: Show a progress bar.

    Returns:
        The finished fit.

    Raises:
        UserError: Names the file, column or key to correct.
    """
    options: dict[str, Any] = {"algorithm": algorithm, "rounds": rounds, "seed": seed, "values": settings}
    options |= {"metric": metric, "time_limit": time_limit}
    if isinstance(sites, str | Path):
        name = Path(sites).resolve().stem.replace(":", ".")
        path = Path(out) if out is not None else new_path(Path("runs"), f"{name}-fit")
        return _fit(source_of(sites, target, client_column), path, options, progress)
    path = Path(out) if out is not None else new_path(Path("runs"), "frames-fit")
    is_new = not path.exists()
    try:
        kept = keep_frames(sites, path / "data", client_column)
        return _fit(source_of(kept, target, client_column), path, options, progress)
    except BaseException:
        if is_new and not (path / FIT).exists():  # refused before it began
            shutil.rmtree(path, ignore_errors=True)
        raise


def advise(
    sites: Any,
    target: str,
    *,
    client_column: str | None = None,
    newcomer: str = "",
    worth: bool = False,
    level: float = 0.9,
    seed: int = 0,
) -> dict[str, Any]:
    """Compute the expected gain of sharing of each site from one exchange of sums, before any training.

    Args:
        sites: A folder with one file per site; or frames by the name of the site; or one file or frame with a column
            that names the site.
        target: The column to predict: a number, a count or one of two classes.
        client_column: The column that names the site.
        newcomer: A site that considers joining; the others are fitted without it.
        worth: Also what each site's rows are worth to every other one.
        level: Of the intervals, which are for the expected gain.
        seed: Of the bootstrap.

    Returns:
        The record, as `fedtailor advise --json` prints it.
    """
    from fedtailor.tables.advice import advise as advised
    from fedtailor.tables.advice import read_sites
    from fedtailor.tables.worth import worth as worth_matrix

    with tempfile.TemporaryDirectory() as folder:
        path = sites if isinstance(sites, str | Path) else keep_frames(sites, Path(folder) / "data", client_column)
        rows = read_sites(path, target, client_column)
    record = advised(rows, newcomer=newcomer, level=level, seed=seed)
    return record | ({"worth": worth_matrix(rows)} if worth else {})


def _fit(source: dict[str, Any], path: Path, options: dict[str, Any], progress: bool) -> Fit:
    with show_grid(Console()) if progress else nullcontext(lambda cell, round, rounds: None) as listener:
        fitting.fit(source, path, listener=listener, **options)
    return Fit(path)


def run(
    algorithm: Algorithm | type[Algorithm] | str,
    task: FederatedData | SourceConfig | Mapping[str, Any] | str,
    *,
    engine: str = "auto",
    device: str | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    data_root: str | Path | None = None,
    progress: bool = True,
    callbacks: Sequence[Any] = (),
) -> Run:
    """Train one algorithm on a task.

    Args:
        algorithm: A name, a class or an instance.
        task: The name of a data source, its options, the tables of a configuration ({"data": ..., "model": ...}), or
            data from `fedtailor.federated`, which is then kept in the run's folder.
        engine: Where clients compute: "auto", "loop", "vmap", "pool" or "wire".
        device: "cpu", "cuda", "cuda:1", "mps", "xpu", or "auto": an accelerator if torch has one.
        rounds: Training rounds; default: the configuration's.
        seed: Of all randomness; default: the configuration's.
        settings: Further keys of a configuration, such as {"model.name": "linear"}. Your own classes and functions may
            stand for their names: {"task.name": MyTask, "evaluation.metrics": ["rmse", bias]}.
        out: The folder; default: a new one under runs/.
        data_root: Folder of data sets.
        progress: Show a progress bar.
        callbacks: Objects with some of the methods of `fedtailor.experiments.callbacks.Callback`.

    Returns:
        The finished run.

    Raises:
        UserError: Names the key or client to correct.
    """
    section = _section(algorithm)
    path = Path(out) if out is not None else None
    loaded = task if isinstance(task, FederatedData) else None
    tables = _tables(task)
    chosen: dict[str, Any] = {"federation.engine": engine} if engine != "auto" else {}
    chosen |= {} if device is None else {"federation.device": device}
    chosen |= {} if rounds is None else {"rounds": rounds}
    chosen |= {} if seed is None else {"seed": seed}
    given = {key: _setting(key, value) for key, value in (settings or {}).items()}
    tables = with_values(tables | {"algorithm": section}, chosen | given)
    source = "made" if loaded is not None else parse(tables).data.source
    path = path or new_path(Path("runs"), f"{source}-{section['name']}".replace(":", "."))
    if loaded is not None:
        tables["data"] = {"source": "saved", "path": str(path / "data")}
    config: RunConfig = parse(tables, origin="run")
    root = None if data_root is None else Path(data_root)
    build_experiment(config, root, loaded)  # before anything is written
    if (path / CONFIG).exists():
        raise RunError(f"{path}: holds a run already; choose another folder with out")
    if loaded is not None:
        saved_data.save(loaded, path / "data")
    with show_progress(Console(), section["name"]) if progress else nullcontext(None) as listener:
        runner.start(config, path, root, listener, loaded=loaded, callbacks=callbacks)
    done = Run(path)
    _warn_of_faults(done)
    return done


class RunWarning(UserWarning):
    """A run has ended, but not everything in it went well."""


def _warn_of_faults(run: Run) -> None:
    """Figures of a run whose replies were rejected look like those of any other."""
    if not run.results.get("faults"):
        return
    faults = run.faults
    first = faults.row(0, named=True)
    warnings.warn(
        f"{run.path}: {run.results['faults']} replies were not used (run.faults lists them); the first: "
        f"round {first['round']}, {first['client']}: {first['reason']}",
        RunWarning,
        stacklevel=3,
    )


def compare(
    config: Mapping[str, Any] | str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    data_root: str | Path | None = None,
    out: str | Path | None = None,
    progress: bool = True,
) -> ComparisonRuns:
    """Train several algorithms on the same task, as `fedtailor compare` does.

    Args:
        config: Tables of a configuration, or its file, with a section `compare`.
        settings: Further keys, such as {"local.lr": 0.1}.
        data_root: Folder of data sets.
        out: The folder; default: runs/ and the name of the comparison. Finished runs in it are not repeated.
        progress: Show progress bars.

    Returns:
        The finished comparison.

    Raises:
        UserError: Names the key or row to correct.
    """
    tables = dict(config) if isinstance(config, Mapping) else read_toml(Path(config))
    given = {key: by_name(value, key) for key, value in (settings or {}).items()}
    checked: CompareConfig = parse(with_values(tables, given), CompareConfig, "compare")
    path = Path("runs") / checked.compare.name if out is None else Path(out)
    with show_grid(Console()) if progress else nullcontext(lambda cell, round, rounds: None) as listener:
        grid = comparing.run_grid(checked, path, None if data_root is None else Path(data_root), listener)
    notes = search_notes(path) if checked.search is not None else []
    result_tables.write(path, result_tables.files(comparing.rows(grid), notes))
    return ComparisonRuns(path)


def _setting(key: str, value: Any) -> Any:
    """A setting as a configuration has it; a model that no other process can import is registered in this one."""
    if key == "model":
        return {k: _setting(f"model.{k}", v) for k, v in value.items()} if isinstance(value, Mapping) else value
    is_made = isinstance(value, torch.nn.Module)
    if key == "model.name" and (is_made or (callable(value) and name_of(value) is None)):
        return models.register(value)
    return by_name(value, key)


def _section(algorithm: Algorithm | type[Algorithm] | str) -> dict[str, Any]:
    """An algorithm as a configuration names it; one that no other process can import is registered in this one."""
    if isinstance(algorithm, str):
        return {"name": algorithm}
    made = algorithm() if isinstance(algorithm, type) else algorithm
    kind = type(made)
    is_ours = kind.__module__.startswith(f"{algorithms.__name__}.")
    name = None if is_ours else name_of(kind)
    if name is None:
        if not is_ours:
            algorithms.register(kind)
        name = next(known for known, of in algorithms.algorithms().items() if of is kind)
    changed = {f.name: getattr(made, f.name) for f in dataclasses.fields(made) if getattr(made, f.name) != f.default}
    return {"name": name} | {k: list(v) if isinstance(v, tuple) else v for k, v in changed.items()}


def _tables(task: FederatedData | SourceConfig | Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(task, FederatedData):
        return {}
    if isinstance(task, str):
        return {"data": {"source": task}}
    if isinstance(task, SourceConfig):
        return {"data": task.model_dump(mode="json", exclude_none=True)}
    if isinstance(task, Mapping):
        plain = (str, int, float, list, Mapping, Path, type(None))
        if held := next((k for k, v in task.items() if not isinstance(v, plain) and not callable(v)), None):
            kind = type(task[held]).__name__
            raise ConfigError(
                f'task: "{held}" is a {kind}; make data of clients by ft.federated({{name: (x, y), ...}})'
            )
        return dict(task) if "data" in task else {"data": dict(task)}
    raise ConfigError(
        f"task: is a {type(task).__name__}; give a data source, tables of a configuration, or FederatedData"
    )


def load(path: str | Path, trust: bool = False) -> Fit | Run | ComparisonRuns:
    """Open the folder of a fit, a run or a comparison.

    Args:
        path: The folder; of a fit that was updated, the latest models are opened.
        trust: Run code outside fedtailor that the folder names ("module:Class"), although you never ran it yourself.

    Returns:
        What is in it.
    """
    path = latest(Path(path))
    if trust:
        accept_folder(path)
    if (path / FIT).exists():
        if "sites" not in read_json(path / FIT):
            raise ConfigError(f"{path}: the fit is not finished; call the same fit with out={str(path)!r}")
        return Fit(path)
    return ComparisonRuns(path) if (path / GRID).exists() else Run(path)
