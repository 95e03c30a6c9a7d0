"""An exported model of fedtailor: tensors, and in the header all that is needed to predict with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from fedtailor import algorithms
from fedtailor.core.trees import Tree, leaves, tree_map
from fedtailor.data.tabular.preparation import Preparation
from fedtailor.errors import RunError
from fedtailor.experiments import user_code as trusting
from fedtailor.experiments.config import parse
from fedtailor.experiments.model_description import ModelDescription, make_described_model, read_description
from fedtailor.experiments.user_code import code_of
from fedtailor.tables.boosted_trees import KINDS, ON_TOP, SHARED, TREES, TreeParts, Trees, validate_trees
from fedtailor.tables.serve import Extras, Personal, extras_of

LINEAR = "linear"


def as_safetensors(own: Personal, config: dict[str, Any], x: Tree) -> bytes:
    """Tensors, and in the header all that is needed to predict with them."""
    made_by: dict[str, Any] = {key: config[key] for key in ("seed", "model", "algorithm") if key in config}
    if own.window:
        made_by["evaluation"] = {"window": list(own.window)}
    code = {key: its | {"folder": None} for key, its in code_of(parse(made_by)).items()}  # others may read the file
    about = {
        "site": own.site,
        "task": own.task,
        "classes": list(own.classes),
        "shape": tree_map(lambda v: list(v.shape[1:]), x),
        "outputs": _width(own.outputs(tree_map(lambda v: v[:1], x)), own.task),
        "config": made_by,
        "code": code,
        "options": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(own.algorithm).items()},
        "preparation": None if own.preparation is None else own.preparation.model_dump(mode="json"),
        "extras": _extras_record(own.extras),
    }
    tensors = {name: value.detach().contiguous() for name, value in (own.model.fixed | own.params).items()}
    return safetensors.torch.save(tensors | _tree_tensors(own.extras), {"fedtailor": json.dumps(about)})


def _width(outputs: Tree, task: str) -> int:
    """How many numbers a model gives, as its constructor is told."""
    first = leaves(outputs)[0]
    return int(first.shape[-1 if task == "tokens" else 1]) if first.dim() > 1 else 1


def _extras_record(extras: Extras) -> dict[str, Any]:
    """Weights of linear model and trees, calibration and intervals."""
    parts = {} if extras.trees is None else {kind: weight for kind, (weight, _) in extras.trees.by_kind.items()}
    return {
        "parts": parts if extras.trees is None else parts | {LINEAR: extras.trees.linear},
        "calibration": [extras.slope, extras.offset],
        "levels": list(extras.half_widths),
        "half_widths": list(extras.half_widths.values()),
    }


def _tree_tensors(extras: Extras) -> dict[str, Tensor]:
    """The arrays of all trees, by the name of their kind and their own."""
    if extras.trees is None:
        return {}
    kinds = {kind: trees for kind, (_, trees) in extras.trees.by_kind.items() if isinstance(trees, Trees)}
    return {f"{kind}/{name}": value for kind, trees in kinds.items() for name, value in trees.tensors.items()}


def _extras_in(
    record: Mapping[str, Any], tensors: Mapping[str, Tensor], description: ModelDescription, origin: str
) -> Extras:
    parts, trees = record["parts"], None
    if parts and isinstance(description.shape, list):
        by_kind = {}
        for kind, extra in ((TREES, 0), (ON_TOP, description.outputs), (SHARED, 0)):
            if kind in parts:
                own = {name.removeprefix(f"{kind}/"): v for name, v in tensors.items() if name.startswith(f"{kind}/")}
                by_kind[kind] = (
                    float(parts[kind]),
                    validate_trees(own, description.shape[0] + extra, description.outputs, origin),
                )
        trees = TreeParts(float(parts.get(LINEAR, 0.0)), *(by_kind.get(kind) for kind in KINDS))
    return extras_of(record, record, trees)


def read_safetensors(path: Path, trust: bool = False) -> Personal:
    """The model of a file that `export` wrote; what it names is run only if the user ran it before, or trusts it."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})["fedtailor"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
        raise RunError(f"{path}: not a model that fedtailor export wrote ({error})") from None
    description = read_description(about, str(path))
    try:
        config, options, prepared, site = (about[key] for key in ("config", "options", "preparation", "site"))
        config = parse(config, origin=str(path))
        preparation = None if prepared is None else Preparation.model_validate(prepared)
        extras = _extras_in(about["extras"], tensors, description, str(path)) if "extras" in about else Extras()
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path}: not a model that fedtailor export wrote ({error})") from None
    if trust:
        trusting.accept(config, str(path), trusting.say)
    notes = trusting.serving_notes(about.get("code"), config, str(path))
    params = {
        name: value for name, value in tensors.items() if not name.startswith(tuple(f"{kind}/" for kind in KINDS))
    }
    return Personal(
        site=site,
        algorithm=algorithms.make(config.algorithm.name, options),
        model=make_described_model(config, description, params, str(path)),
        params=params,
        task=description.task,
        classes=tuple(description.classes),
        preparation=preparation,
        source=str(path),
        inputs=description.inputs,
        notes=notes,
        extras=extras,
        window=config.evaluation.window or (),
    )


def reread_outputs(path: Path, x: Tree) -> Tree:
    """Predictions of the model in a written file."""
    own = read_safetensors(path)
    return own.readable(own.outputs(x))
