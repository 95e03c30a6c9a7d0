"""The fit of one site of a federation, from what the site kept: its models, its trees, its figures on its test rows.

Trees are fitted here and their weights are chosen on the site's own rows; nothing of this leaves the site.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.algorithms._programs.parts import folds_of_rows
from fedtailor.algorithms._programs.scaling_rounds import unscale
from fedtailor.algorithms._programs.table_fit import TableFit, held_out
from fedtailor.core.context import ClientContext
from fedtailor.core.data import FederatedData
from fedtailor.core.trees import Tree
from fedtailor.errors import RunError
from fedtailor.experiments.building import assemble
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.runner import about
from fedtailor.experiments.store import CONFIG, FIT, RESULTS, RunFolder, write_json
from fedtailor.numerics import ridge
from fedtailor.studies.grid import Cell
from fedtailor.tables import blend
from fedtailor.tables.blend import Selection
from fedtailor.tables.candidates import ALONE, Clock, candidate_cell, kind_of
from fedtailor.tables.fit_record import table_record
from fedtailor.tables.shared_trees import trees_of_state


def site_fit(config: RunConfig, data: FederatedData, state: Tree, out: Path, metric: str = "") -> dict[str, Any]:
    """Write the folder of a fit with this one site, and return its record. `state`: its last private state."""
    data = data.to(torch.float64)
    experiment = assemble(config, data)
    program = experiment.algorithm
    if not isinstance(program, TableFit):
        raise RunError(f"{out.parent}: no fit of tables; it was a run of {program.title}")
    n = torch.tensor(float(data.train.sizes[0]), dtype=torch.float64, device="cpu")
    me = ClientContext(experiment, [0], (config.seed, "record"), 1, n, state, {}, None)
    boosted = float(state["served"][-1]) if program.boosted and int(state["trees"]["count"]) else 0.0
    used = [0, *(1 + i for i in range(len(program.effects)) if bool(state["solved"][1 + i].all()))]
    mixed = kind_of(data.task)
    cells = [candidate_cell(config.plain(), mixed, program.effects[c - 1] if c else "", out) for c in used]
    for cell, candidate in zip(cells, used, strict=True):
        _write(cell, me, candidate)
    rows = program.rows(me)
    served = state["served"][: program.linear]
    if boosted:
        served = served + boosted * state["trees"]["base"]
        trees_of_state(state["trees"], state["center"], state["spread"], data.outputs).save(
            blend.shared_trees_path(out)
        )
    weights, shared = served[used], np.array([boosted]) if boosted else None
    is_own = bool(served[0] == 1)
    linear = rows.said[0] if is_own else held_out(rows, torch.einsum("o,poc->pc", state["taken"], state["weights"]))
    held = torch.from_numpy(folds_of_rows(int(n), config.seed, data.clients[0], program.folds) >= 0)
    own, linear = (_in_units(v, state, data)[held] for v in (rows.said[0], linear))
    unit = 1.0 if data.task == "classification" else float(state["spread"][-1]) ** 2
    gain = (float(state["sure"][0]) * unit, float(state["sure"][1]) * unit)
    selection = _selection(config, program, data, cells, own, linear, weights, gain, out, shared)
    record = {"settings": {"algorithm": "auto", "federated": True, "runs": [cell.config.plain() for cell in cells]}}
    record |= table_record(selection, data, out, config.seed, metric) | {"dropped": selection.dropped}
    write_json(out / FIT, record)
    return record


def _selection(
    config: RunConfig,
    program: TableFit,
    data: FederatedData,
    cells: list[Cell],
    own: Tensor,
    linear: Tensor,
    weights: Tensor,
    gain: tuple[float, float],
    out: Path,
    shared: NDArray[np.float64] | None,
) -> Selection:
    """With trees, if this site has enough rows; otherwise as the federation decided."""
    of_site = weights.numpy()[None] / float(weights.sum())
    settled = Selection(cells, of_site, [{"linear": 1.0}], [ALONE], [gain], linear, [], shared)
    if not len(own):
        return settled
    folds = folds_of_rows(len(data.train.x), config.seed, data.clients[0], program.folds)
    tried = blend.blend_trees(
        *(cells, data, folds, own, linear.clone(), of_site.copy(), config.seed, Clock(0), out),
        shared=None if shared is None else shared.copy(),
    )
    return tried if tried.alone != [ALONE] or set(tried.trees[0]) != {"linear"} else settled


def _write(cell: Cell, me: ClientContext, candidate: int) -> None:
    """The folder of a run that has ended, with this site's model; where it is there already, nothing is done."""
    data, path = me.experiment.data, cell.folder
    if (path / CONFIG).exists():
        return
    experiment = assemble(cell.config, data)
    folder = RunFolder.create(path, cell.config, about(experiment, cell.config, "flare", None), data.preparation)
    state, is_class = me.state, data.task == "classification"
    v = unscale(state["models"][candidate, 0], state["center"], state["spread"], is_class)
    with folder.personal_models("last") as keep:
        keep(data.clients[0], ridge.as_params(me.model, v))
    write_json(path / RESULTS, {"rounds": 1, "lines": 0})


def _in_units(outputs: Tensor, state: Tree, data: FederatedData) -> Tensor:
    """Numbers as the site's rows have them."""
    if data.task == "classification":
        return outputs
    features = data.shape[0]
    return outputs * state["spread"][features:] + state["center"][features:]


def is_fit(config: RunConfig) -> bool:
    """Whether a run is a fit of tables."""
    return config.algorithm.name.lower() == "tablefit"
