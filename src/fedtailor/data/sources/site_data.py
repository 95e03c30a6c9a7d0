"""The data of one site of a federation, read at the site: its table, or prepared rows.

Nothing is learnt from the other sites: classes and categories are agreed on beforehand and are in each site's
site.toml, scales are the site's own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedtailor.core.data import FederatedData, Rows
from fedtailor.data.configs import SitesConfig, SplitConfig
from fedtailor.data.files import SUFFIXES, client_name
from fedtailor.data.splits import starts
from fedtailor.data.tabular.columns import ClientTable
from fedtailor.data.tabular.encode import SiteColumns, encode_sites
from fedtailor.data.tabular.formula import ColumnKinds, data_of, design_of, parse_formula, rows_of
from fedtailor.data.tabular.preparation import Floats, Preparation, TargetColumn
from fedtailor.data.tabular.read import read_table
from fedtailor.data.tabular.target import numeric_values, refuse_text, require_target
from fedtailor.errors import DataError, nearest

PREPARED = ".safetensors"


class SiteData(SplitConfig):
    """Where a site's samples are, and how to read them."""

    path: Path = Field(description=f"A table ({', '.join(SUFFIXES)}), or prepared rows ({PREPARED}).")
    target: str = Field(default="", description="Column to predict.")
    classes: tuple[str, ...] = Field(
        default=(), description="All classes of the target, the same at every site; none if it is a number."
    )
    numeric: tuple[str, ...] = Field(default=(), description="Columns that hold numbers, the same at every site.")
    categories: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="Columns that hold categories, with all of their values at any site."
    )
    fill: dict[str, float] = Field(
        default_factory=dict, description="What to write where a number is missing; else the site's training median."
    )
    standardise: Literal["client", "none"] = Field(
        default="client", description="Scale numbers by mean and spread of this site's training rows, or not."
    )
    target_scale: tuple[float, float] | None = Field(
        default=None, description="Mean and spread by which a number to predict is scaled, the same at every site."
    )
    formula: str = Field(
        default="",
        description="For fedtailor federation model: the formula, in place of a target; the same everywhere.",
    )
    family: Literal["gaussian", "binomial", "poisson", "cox"] = Field(
        default="gaussian", description="With a formula: what the response is drawn from."
    )
    grouping: str = Field(default="", description="With a formula: its grouping factor that sites are.")

    @model_validator(mode="after")
    def _check(self) -> SiteData:
        if (
            self.path.suffix != PREPARED
            and not self.formula
            and not (self.target and (self.numeric or self.categories))
        ):
            raise DataError(f"{self.path}: a table needs data.target, and data.numeric or [data.categories]")
        return self


def load(config: SitesConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    """Always an error: the data is at the sites."""
    raise DataError('data.source = "sites": the data is at the sites; run this with fedtailor federation submit')


def load_site(config: SiteData, name: str, *, seed: int) -> FederatedData:
    if config.path.suffix == PREPARED:
        return _read_prepared(config.path, name)
    if client_name(config.path) is None:
        raise DataError(f"{config.path}: not a data file; known endings: {', '.join((*SUFFIXES, PREPARED))}")
    table = read_table(config.path)
    if config.formula:
        kinds = ColumnKinds(config.numeric, dict(config.categories))
        design = design_of(parse_formula(config.formula, config.grouping), config.family, kinds)
        rows = rows_of(design, table, name)
        return data_of(design, {name: (rows.x, rows.y)})
    for column in (config.target, *config.numeric, *config.categories):
        if column not in table.columns:
            raise DataError(f'{table.path}: no column "{column}"; {nearest(column, table.columns)}')
    require_target([table], config.target)
    site = SiteColumns(
        name=name,
        file=str(table.path),
        numeric={c: _fill_gaps(table, c, config.fill) for c in config.numeric},
        categorical={c: table.columns[c].labels() for c in config.categories},
        y=_read_target(table, config),
    )
    target = TargetColumn(
        name=config.target, task="classification" if config.classes else "regression", classes=config.classes
    )
    columns = (*config.numeric, *config.categories)
    data = encode_sites(
        name, [site], columns, target, config, config.standardise, seed=seed, categories=config.categories
    )
    if config.target_scale is None or config.classes or data.preparation is None:
        return data
    mean, sd = config.target_scale  # by which predictions are read
    scaled = data.preparation.target.model_copy(update={"mean": mean, "sd": sd})
    return replace(data, preparation=data.preparation.model_copy(update={"target": scaled}))


def _fill_gaps(table: ClientTable, column: str, fill: dict[str, float]) -> Floats:
    refuse_text([table], column, "name it under [data.categories]")
    values = numeric_values(table.columns[column])
    return np.where(np.isnan(values), fill[column], values) if column in fill else values


def _read_target(table: ClientTable, config: SiteData) -> NDArray[Any]:
    if not config.classes:
        refuse_text([table], config.target, "list data.classes")
        values = numeric_values(table.columns[config.target])
        mean, spread = config.target_scale or (0.0, 1.0)
        return (values - mean) / spread
    position = {label: i for i, label in enumerate(config.classes)}
    labels = [str(label) for label in table.columns[config.target].names()]
    if unknown := [label for label in labels if label not in position]:
        raise DataError(
            f'{table.path}: target column "{config.target}" has the class "{unknown[0]}", which is not among '
            f"data.classes = {list(config.classes)}"
        )
    return np.array([position[label] for label in labels], dtype=np.int64)


def write_prepared(path: Path, data: FederatedData, client: int) -> None:
    """Write one client's rows to a file for a site."""
    tensors: dict[str, Tensor] = {}
    for split in ("train", "val", "test"):
        x, y = getattr(data, split).of(client)
        named = {f"{split}.x.{k}": v for k, v in x.items()} if isinstance(x, dict) else {f"{split}.x": x}
        tensors |= {k: v.contiguous() for k, v in named.items()} | {f"{split}.y": y.contiguous()}
    about: dict[str, Any] = {
        "name": data.name,
        "task": data.task,
        "outputs": data.outputs,
        "classes": data.classes,
        "features": data.features,
    }
    if data.preparation is not None:
        about["preparation"] = data.preparation.of(data.clients[client]).model_dump(mode="json")
    path.write_bytes(save(tensors, metadata={"about": json.dumps(about)}))


def _read_inputs(file: Any, split: str) -> Any:
    """Inputs of a split: one tensor, or named ones."""
    prefix = f"{split}.x."
    named = {k.removeprefix(prefix): file.get_tensor(k) for k in file.keys() if k.startswith(prefix)}  # noqa: SIM118
    return named or file.get_tensor(f"{split}.x")


def _read_prepared(path: Path, name: str) -> FederatedData:
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["about"])
            rows = {
                split: Rows(_read_inputs(file, split), y := file.get_tensor(f"{split}.y"), starts([len(y)]))
                for split in ("train", "val", "test")
            }
            prepared = about.get("preparation") and Preparation.model_validate(about["preparation"])
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not prepared rows: {error}") from None
    return FederatedData(
        name=about["name"],
        task=about["task"],
        clients=(name,),
        outputs=about["outputs"],
        classes=tuple(about["classes"]),
        features=tuple(about["features"]),
        train=rows["train"],
        val=rows["val"],
        test=rows["test"],
        preparation=prepared,
    )
