"""A personal model as a file for other programs. Its predictions are compared before it appears."""

from __future__ import annotations

import copy
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from fedtailor import algorithms
from fedtailor.core.algorithm import Algorithm
from fedtailor.core.data import between
from fedtailor.core.model import call_module
from fedtailor.core.trees import Tree, leaves, tree_map
from fedtailor.data.tabular.preparation import NumberColumn, Preparation
from fedtailor.errors import RunError
from fedtailor.experiments import user_code as trusting
from fedtailor.experiments.building import at_client
from fedtailor.experiments.config import parse
from fedtailor.experiments.model_description import ModelDescription, make_described_model, read_description
from fedtailor.experiments.runner import reload_experiment
from fedtailor.experiments.store import RunFolder, write_atomically
from fedtailor.serving.linear_json import has_linear_base, linear_record, predict_by_hand
from fedtailor.serving.onnx_table import inputs_of_columns, require_packages, solved_graph, with_columns
from fedtailor.tables.boosted_trees import KINDS, NAMES, ON_TOP, SHARED, TREES, TreeParts, Trees, validate_trees
from fedtailor.tables.serve import Extras, Personal, extras_of, personal, run_of

__all__ = ["ENDINGS", "Format", "export", "read_safetensors"]

Format = Literal["onnx", "torch", "safetensors", "json"]
ENDINGS: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors", "json": ".json"}
TOLERANCE = 1e-5
SAMPLES = 256


class TreeModule(nn.Module):
    """Boosted trees as a module: their arrays are its buffers."""

    def __init__(self, trees: Trees) -> None:
        super().__init__()
        self.depth = trees.depth
        for name, value in trees.tensors.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return Trees(**{name: self.get_buffer(name) for name in NAMES}).sum_to_depth(x, self.depth)


class Served(nn.Module):
    """Features in; probabilities of the classes out, or numbers in units of the target."""

    def __init__(self, own: Personal) -> None:
        super().__init__()
        self.extras, parts = own.extras, own.extras.trees
        self.trees = nn.ModuleList()
        if parts is not None:
            modules = {kind: (w, TreeModule(t)) for kind, (w, t) in parts.by_kind.items() if isinstance(t, Trees)}
            self.trees.extend(module for _, module in modules.values())
            as_modules = TreeParts(parts.linear, *(modules.get(kind) for kind in KINDS))
            self.extras = replace(own.extras, trees=as_modules)
        self.is_class = own.task == "classification"
        self.readable = own.readable
        self.network = copy.deepcopy(own.model.module).eval()
        self.plain = type(own.algorithm).predict is Algorithm.predict
        if self.plain:
            places = dict(self.network.named_parameters()) | dict(self.network.named_buffers())
            with torch.no_grad():
                for name in own.params.keys() & places.keys():  # those of a state_dict lack some buffers
                    places[name].copy_(own.params[name])
        else:
            self.own = own
            for name, value in own.params.items():
                self.register_buffer(name.replace(".", "__"), value)

    def forward(self, x: Tree) -> Tree:
        if self.plain:
            out = call_module(self.network, x)
        else:
            params = {name: self.get_buffer(name.replace(".", "__")) for name in self.own.params}
            out = self.own.algorithm.predict(self.own.model, params, x)
        return self.readable(self.extras.apply(x, out, self.is_class))


def export(run: Path, site: str, to: Format, out: Path | None = None, data_root: Path | None = None) -> list[Path]:
    """Write the model of a site, and beside it how rows are prepared; returns the files."""
    if to not in ENDINGS:
        raise RunError(f'--to "{to}": known are {", ".join(ENDINGS)}')
    own, (folder, _) = personal(run, site, data_root), run_of(run, site)
    target = out or Path(f"{site}{ENDINGS[to]}".replace("/", "_"))
    if target.suffix != ENDINGS[to]:
        raise RunError(f"--out {target}: a file for {to} ends in {ENDINGS[to]}")
    if to == "json":
        return [_as_json(own, target)]
    x = _samples(own, folder, site, data_root)
    wanted = own.readable(own.outputs(x))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as part:
        part_file = Path(part) / target.name
        if to == "safetensors":
            part_file.write_bytes(as_safetensors(own, at_client(folder.config, site).plain(), x))
            predictions = reread_outputs(part_file, x)
        elif to == "onnx" and own.preparation is not None:
            wanted, predictions = _onnx_of_columns(own, part_file, x)
        else:
            predictions = _trace(own, to, part_file, x)
        _same(predictions, wanted, f"{target.name}: the exported model of {site}")
        files, note = [target], target.with_suffix(".preparation.json")
        if own.preparation is not None:
            content = own.preparation.model_dump(mode="json") | {"features": list(own.preparation.features)}
            write_atomically(note, json.dumps(content, indent=1).encode())
            files.append(note)
        os.replace(part_file, target)
    return files


def _as_json(own: Personal, target: Path) -> Path:
    """A linear model in units of the table; its predictions, computed from the file, are compared."""
    content = json.dumps(linear_record(own), indent=1, allow_nan=False, ensure_ascii=False).encode()
    record = json.loads(content)
    numeric, categorical = sample_columns(own)
    columns = numeric | categorical
    rows = [{name: values[i] for name, values in columns.items()} for i in range(SAMPLES)]
    predictions = torch.tensor([predict_by_hand(record, row) for row in rows], dtype=torch.float64, device="cpu")
    _same(
        predictions,
        _predictions_of_columns(own, numeric, categorical),
        f"{target.name}: the exported model of {own.site}",
    )
    write_atomically(target, content)
    return target


def sample_columns(own: Personal) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rows of a table such as the model may meet: missing and wild values, unknown categories."""
    assert own.preparation is not None
    draw = np.random.default_rng(0)
    numeric: dict[str, Any] = {}
    categorical: dict[str, Any] = {}
    for column in own.preparation.columns:
        gaps = draw.random(SAMPLES) < 0.1
        if isinstance(column, NumberColumn):
            scale = column.sites[own.site]
            values = scale.mean + scale.sd * draw.standard_t(2, SAMPLES)
            values[draw.random(SAMPLES) < 0.05] = 0.0
            numeric[column.name] = np.where(gaps, np.nan, values)
        else:
            texts = draw.choice([*column.categories, "a value that nobody knows"], SAMPLES).tolist()
            categorical[column.name] = [None if gap else text for gap, text in zip(gaps, texts, strict=True)]
    return numeric, categorical


def _predictions_of_columns(own: Personal, numeric: dict[str, Any], categorical: dict[str, Any]) -> Tensor:
    assert own.preparation is not None
    x = own.preparation.encode(own.site, numeric, categorical, "samples", [])
    return own.readable(own.outputs(torch.from_numpy(x).to(own.model.dtype)))


def _onnx_of_columns(own: Personal, path: Path, x: Tensor) -> tuple[Tensor, Tensor]:
    """Write a graph that takes the columns of a file; returns predictions of the model and of the graph."""
    assert own.preparation is not None
    require_packages("onnx", "onnxruntime")
    numeric, categorical = sample_columns(own)
    if has_linear_base(own):
        path.write_bytes(solved_graph(own).SerializeToString())
    elif own.extras.trees is not None:
        raise RunError(f"{own.title} with trees on top cannot be written as onnx; use --to torch or --to safetensors")
    else:
        _trace(own, "onnx", path, x)
        path.write_bytes(with_columns(import_module("onnx").load(path), own).SerializeToString())
    predictions = _run_onnx(path, inputs_of_columns(own.preparation, numeric, categorical), ["prediction"])
    return _predictions_of_columns(own, numeric, categorical), predictions["prediction"]


def _samples(own: Personal, folder: RunFolder, site: str, data_root: Path | None) -> Tree:
    """What the written model is compared on: of tables any features will do, and the files are not needed."""
    if own.preparation is not None:
        features = torch.randn((SAMPLES, len(own.preparation.features)), generator=torch.Generator().manual_seed(0))
        return features.to(own.model.dtype)
    data = reload_experiment(folder, data_root, serves=True).data
    (start,), (rows,) = data.train.bounds([data.clients.index(site) if site in data.clients else 0])
    return between(data.train.x, start, start + min(rows, SAMPLES))


def _same(predictions: Tree, wanted: Tree, subject: str) -> None:
    pairs = list(zip(leaves(predictions), leaves(wanted), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        raise RunError(f"{subject} gives other shapes than the run's; nothing was written")
    difference = max((_difference(a.double(), b.double()) for a, b in pairs if b.numel()), default=0.0)
    if not difference <= TOLERANCE:
        raise RunError(
            f"{subject} differs from the run's by {difference:.2g}, more than {TOLERANCE:g}; nothing was written"
        )


def _difference(value: Tensor, wanted: Tensor) -> float:
    return float((value - wanted).abs().max() / wanted.abs().max().clamp(min=1))


def _trace(own: Personal, to: str, path: Path, x: Tree) -> Tree:
    """Write the network as a graph, read it again, and let it predict."""
    module, rows = Served(own).eval(), torch.export.Dim("rows", min=1)
    shapes = {"x": tree_map(lambda v: {0: rows}, x)}
    logging.disable(logging.CRITICAL)  # torch reports optional packages
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if to == "onnx":
                return _onnx(module, path, x, shapes)
            program = torch.export.export(module, (x,), dynamic_shapes=shapes)
            torch.export.save(program, path)
            return torch.export.load(path).module()(x)
    except RunError:
        raise
    except Exception as error:
        why = str(error).strip().split("\n", 1)[0][:200]
        raise RunError(
            f"{own.title} with this model cannot be written as {to} ({type(error).__name__}: {why}); "
            "use fedtailor predict, or --to safetensors"
        ) from None
    finally:
        logging.disable(logging.NOTSET)


def _onnx(module: nn.Module, path: Path, x: Tree, shapes: dict[str, Any]) -> Tree:
    require_packages("onnx", "onnxscript", "onnxruntime")
    inputs = x if isinstance(x, dict) else {"features": x}
    with torch.no_grad():
        form = module(x)
    names = list(form) if isinstance(form, dict) else ["prediction"]
    program = torch.onnx.export(
        module,
        (),
        kwargs={"x": x},  # a dict among positional arguments would be taken for keywords
        dynamo=True,
        dynamic_shapes=shapes,
        input_names=list(inputs),
        output_names=names,
        verbose=False,
    )
    assert program is not None
    program.save(path, external_data=False)
    predictions = _run_onnx(path, {k: np.ascontiguousarray(v.numpy()) for k, v in inputs.items()}, names)
    return predictions if isinstance(form, dict) else predictions["prediction"]


def _run_onnx(path: Path, inputs: dict[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
    onnxruntime: Any = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    outputs = session.run(list(names), inputs)
    return {name: torch.from_numpy(value) for name, value in zip(names, outputs, strict=True)}


LINEAR = "linear"


def as_safetensors(own: Personal, config: dict[str, Any], x: Tree) -> bytes:
    """Tensors, and in the header all that is needed to predict with them."""
    made_by: dict[str, Any] = {key: config[key] for key in ("seed", "model", "algorithm") if key in config}
    if own.window:
        made_by["evaluation"] = {"window": list(own.window)}
    code = {
        key: its | {"folder": None} for key, its in trusting.code_of(parse(made_by)).items()
    }  # others may read the file
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
