"""A newcomer with its own data gets a personal model from a finished run; other clients are not involved."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedtailor.core.data import FederatedData
from fedtailor.core.experiment import Experiment
from fedtailor.core.trees import Params
from fedtailor.data.configs import FolderConfig
from fedtailor.data.files import SUFFIXES, client_name
from fedtailor.data.sources.table_folder import load_newcomer, prepare_newcomer
from fedtailor.data.tabular.read import read_table
from fedtailor.errors import ConfigError, DataError, RunError, nearest
from fedtailor.experiments.building import assemble, data_seed, dtype_of, load
from fedtailor.experiments.config import RunConfig, parse, read_toml
from fedtailor.experiments.run_state import EPOCHS, onboard_newcomers
from fedtailor.experiments.runner import config_of, reload_experiment
from fedtailor.experiments.store import FIT, RunFolder, part_of, read_json
from fedtailor.experiments.user_code import refuse_other_code
from fedtailor.serving.learning_curve import learning_curve

# of rounds, in which a newcomer takes no part
OF_ROUNDS = ("federation", "privacy", "aggregation", "attack", "environment", "early_stopping")


class Newcomer(NamedTuple):
    """Where its model is, its number of samples by split, its metrics by split, and what more rows would bring."""

    path: Path
    samples: dict[str, int]
    metrics: dict[str, dict[str, float]]
    curve: dict[str, Any] | None = None


def onboard(run: Path, file: Path, name: str, epochs: int = EPOCHS, data_root: Path | None = None) -> Newcomer:
    """Adapt the run's last common state to the newcomer's data, save its model in the run's folder and measure it."""
    fit, folder = run, RunFolder.open(source_run(run))
    run = folder.path
    saved = folder.load_checkpoint()
    if folder.results is None or saved is None:
        raise RunError(f"{run}: not finished yet; continue it with: fedtailor resume {shlex.quote(str(run))}")
    folder.new_newcomer(name)
    if name in folder.about["clients"]:
        raise DataError(f'--name "{name}": a client of the run already; its model is in {run / "personal"}')
    experiment, own = _prepare(folder, file, name, data_root)
    ((model, figures),) = onboard_newcomers(experiment, own, saved[1]["state"]["server"], epochs)
    samples = {split: len(getattr(own, split).y) for split in ("train", "val", "test")}
    metrics = {split: {k: float(v) for k, v in values.items()} for split, values in figures.items()}
    about: dict[str, Any] = {"data": str(file), "round": saved[0]["round"], "epochs": epochs}
    if own.preparation is not None and name in own.preparation.sites:
        about["preparation"] = own.preparation.of(name).model_dump(mode="json")
    curve = learning_curve(experiment, own, saved[1]["state"]["server"], _common(fit), folder.config.seed)
    about |= {} if curve is None else {"curve": curve}
    saved_to = folder.save_newcomer(name, model, about | {"samples": samples} | metrics)
    return Newcomer(saved_to, samples, {split: _in_units(values, own) for split, values in metrics.items()}, curve)


def _common(fit: Path) -> Params | None:
    """The model that all sites of a fit have in common, if it has one."""
    if not (fit / FIT).exists() or "common" not in (record := read_json(fit / FIT)):
        return None
    folder = RunFolder.open(part_of(fit, record["common"]))
    params: Params = folder.personal(folder.about["clients"][0], record["kind"])
    return params


def _prepare(folder: RunFolder, file: Path, name: str, data_root: Path | None) -> tuple[Experiment, FederatedData]:
    """The run's experiment, and the newcomer's data; of a table without reading those of the others."""
    config, preparation = folder.config, folder.preparation
    if isinstance(config.data, FolderConfig) and preparation is not None:
        refuse_other_code(folder)
        if client_name(file) is None:
            raise DataError(f"{file}: not a data file; the run reads {', '.join(SUFFIXES)}")
        table = read_table(file, config.data.ignore)
        own = prepare_newcomer(preparation, config.data, table, name, data_seed(config)).to(dtype_of(config))
        return assemble(config.model_copy(update={name: type(getattr(config, name))() for name in OF_ROUNDS}), own), own
    experiment = reload_experiment(folder, data_root)
    earlier_root = folder.about["data_root"]
    root = Path(earlier_root) if data_root is None and earlier_root else data_root
    own = _read(config_of(folder), file, name, root).to(experiment.model.dtype)
    for key in ("task", "shape", "outputs"):
        if getattr(own, key) != getattr(experiment.data, key):
            raise DataError(
                f"{file}: {key} of its samples is {getattr(own, key)}, of the run's {getattr(experiment.data, key)}"
            )
    return experiment, own


def _in_units(metrics: dict[str, float], data: FederatedData) -> dict[str, float]:
    """Errors of a number in units of the target, as people know it."""
    sd = 1.0 if data.preparation is None else data.preparation.target.sd
    return {name: value * {"rmse": sd, "mse": sd**2}.get(name, 1.0) for name, value in metrics.items()}


def newcomer_record(fit: Path, name: str) -> dict[str, Any]:
    file = part_of(source_run(fit) / "newcomers", name) / "newcomer.json"
    if not file.exists():
        raise RunError(f'{fit}: no newcomer "{name}"; onboard it first')
    return dict(read_json(file))


def source_run(path: Path) -> Path:
    """The run from which a newcomer is onboarded: of a fit the one that serves its sites best together."""
    if not (path / FIT).exists():
        return path
    chosen = read_json(path / FIT)
    if "newcomers" not in chosen:
        raise RunError(
            f"{path}: not finished yet; continue with the same fedtailor fit and --out {shlex.quote(str(path))}"
        )
    return part_of(path, chosen["newcomers"])


def _read(config: RunConfig, file: Path, name: str, root: Path | None) -> FederatedData:
    """The newcomer's data: a file beside those of a folder, else the [data] of a configuration."""
    if isinstance(config.data, FolderConfig):
        return load_newcomer(config.data, file, name, seed=config.seed)
    if file.suffix != ".toml":
        raise ConfigError(f"{file}: this run reads {config.data.source}; give a TOML file with a [data] table")
    tables = read_toml(file)
    if "data" not in tables:
        raise ConfigError(f"{file}: has no [data] table that says where the newcomer's samples come from")
    own = parse({"data": tables["data"]}, origin=str(file)).data
    data = load(config.model_copy(update={"data": own}), root)
    if name in data.clients:
        return data.only([data.clients.index(name)])
    if len(data.clients) > 1:
        raise ConfigError(f'{file}: has several clients and none is "{name}"; {nearest(name, data.clients)}')
    return replace(data, clients=(name,))
