"""A model over NVIDIA FLARE: at the sites of a running federation, or as a trial on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtailor.data.tabular.formula import Design, FormulaRows
from fedtailor.errors import RunError
from fedtailor.experiments.store import RunFolder, read_json
from fedtailor.inference.formula_data import load_formula, read_agreement
from fedtailor.inference.statistical_model import Request, StatisticalModel, as_model, config_of

MOST_HERE = 8  # sites that are processes of one machine


def finished(request: Request, design: Design, folder: RunFolder) -> StatisticalModel:
    """The model of a finished run, by what its server has; modes are at the sites."""
    saved = folder.load_checkpoint()
    if saved is None or "center" not in saved[1]["state"]["server"]:
        raise RunError(f"{folder.path}: the model was not fitted; see the reason in the folder's metrics")
    about: Any = folder.about
    rows = FormulaRows(tuple(about["clients"]), tuple(about["notes"]))
    return as_model(request, design, rows, saved[1]["state"]["server"], None)


def local_trial(
    data: Path, request: Request, name: str, folder: Path, say: Callable[[str], None]
) -> StatisticalModel:
    """The whole federation on this machine: server and sites are processes."""
    from fedtailor.data.sources.saved_data import save
    from fedtailor.flare.local_trial import run_trial

    design, rows = load_formula(data, request.formula, request.family, request.site)
    if len(rows.clients) > MOST_HERE:
        raise RunError(f"{data}: has {len(rows.clients)} sites; a trial on one machine is for at most {MOST_HERE}")
    save(rows, folder / "data")
    config = config_of(request, design, {"source": "saved", "path": str((folder / "data").resolve())})
    return finished(request, design, run_trial(folder, len(rows.clients), config, name, say))


def at_sites(agreed: Path, request: Request, name: str, admin: Path, say: Callable[[str], None]) -> StatisticalModel:
    """At the sites of a running federation, whose site.toml have what was agreed on."""
    from fedtailor.flare import kits
    from fedtailor.flare.nvidia import Launcher

    design = read_agreement(agreed)
    request = replace(request, formula=design.formula.text, family=design.family, site=design.formula.site)
    config = config_of(request, design)
    names = tuple(read_json(admin / kits.ABOUT)["sites"])
    Launcher(admin, config, name, names, say).run_to_end()
    return finished(request, design, RunFolder.open(admin.parent / "server" / kits.RUNS / name))
