"""A personal model as a file for other programs. It is read again and must say the same before it appears."""

from __future__ import annotations

import copy
import json
import logging
import os
import tempfile
import warnings
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from fedtailor import algorithms
from fedtailor.core.algorithm import Algorithm
from fedtailor.data.preparation import Preparation
from fedtailor.errors import RunError
from fedtailor.experiments import trust as trusting
from fedtailor.experiments.config import parse
from fedtailor.experiments.model_building import at_client
from fedtailor.experiments.runner import reload_experiment
from fedtailor.experiments.source_code import changed_since, code_of
from fedtailor.experiments.store import RunFolder, write_atomically
from fedtailor.serving.described import described, model_in
from fedtailor.serving.personal import Personal, personal, run_of

Format = Literal["onnx", "torch", "safetensors"]
ENDINGS: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
TOLERANCE = 1e-5
SAMPLES = 256


class Served(nn.Module):
    """Features in; probabilities of the classes out, or numbers in units of the target."""

    def __init__(self, own: Personal) -> None:
        super().__init__()
        self.is_class = own.task == "classification"
        target = None if own.preparation is None else own.preparation.target
        self.mean, self.sd = (0.0, 1.0) if target is None else (target.mean, target.sd)
        self.network = copy.deepcopy(own.model.module).eval()
        self.plain = type(own.algorithm).predict is Algorithm.predict
        if self.plain:
            self.network.load_state_dict(own.params, strict=False)
        else:
            self.own = own
            for name, value in own.params.items():
                self.register_buffer(name.replace(".", "__"), value)

    def forward(self, x: Tensor) -> Tensor:
        if self.plain:
            out = self.network(x)
        else:
            params = {name: self.get_buffer(name.replace(".", "__")) for name in self.own.params}
            out = self.own.algorithm.predict(self.own.model, params, x)
        return out.softmax(1) if self.is_class else out * self.sd + self.mean


def export(run: Path, site: str, to: Format, out: Path | None = None, data_root: Path | None = None) -> list[Path]:
    """Write the model of a site, and beside it how rows are prepared; returns the files."""
    if to not in ENDINGS:
        raise RunError(f'--to "{to}": known are {", ".join(ENDINGS)}')
    own, (folder, _) = personal(run, site, data_root), run_of(run, site)
    target = out or Path(f"{site}{ENDINGS[to]}".replace("/", "_"))
    if target.suffix != ENDINGS[to]:
        raise RunError(f"--out {target}: a file for {to} ends in {ENDINGS[to]}")
    if own.extras.trees is not None:
        raise RunError(f'{run}: the model of "{site}" has boosted trees and cannot be exported; use fedtailor predict')
    x = _samples(own, folder, site, data_root)
    wanted = own.readable(own.outputs(x))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as part:
        made = Path(part) / target.name
        if to == "safetensors":
            made.write_bytes(as_safetensors(own, at_client(folder.config, site).plain(), x))
            found = readable_again(made, x)
        else:
            found = _traced(own, to, made, x)
        _same(found, wanted, f"{target.name}: the exported model of {site}")
        if own.preparation is not None:
            note = own.preparation.model_dump(mode="json") | {"features": list(own.preparation.features)}
            write_atomically(target.with_suffix(".json"), json.dumps(note, indent=1).encode())
        os.replace(made, target)
    return [target] + ([target.with_suffix(".json")] if own.preparation is not None else [])


def _samples(own: Personal, folder: RunFolder, site: str, data_root: Path | None) -> Tensor:
    """What the written model is compared on: of tables any features will do, and the files are not needed."""
    if own.preparation is not None:
        made = torch.randn((SAMPLES, len(own.preparation.features)), generator=torch.Generator().manual_seed(0))
        return made.to(own.model.dtype)
    data = reload_experiment(folder, data_root).data
    return data.train.of(data.clients.index(site) if site in data.clients else 0)[0][:SAMPLES]


def _same(found: Tensor, wanted: Tensor, what: str) -> None:
    apart = float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1))
    if not apart <= TOLERANCE:
        raise RunError(f"{what} differs from the run's by {apart:.2g}, more than {TOLERANCE:g}; nothing was written")


def _traced(own: Personal, to: str, path: Path, x: Tensor) -> Tensor:
    """Write the network as a graph, read it again, and let it predict."""
    module, rows = Served(own).eval(), torch.export.Dim("rows", min=1)
    shapes = {"x": {0: rows}}
    logging.disable(logging.CRITICAL)  # torch tells of packages that it could also use
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


def _onnx(module: nn.Module, path: Path, x: Tensor, shapes: dict[str, Any]) -> Tensor:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(name) is None:
            raise RunError(f"--to onnx needs the package {name}; install fedtailor[export]")
    onnxruntime: Any = import_module("onnxruntime")
    program = torch.onnx.export(
        module,
        (x,),
        dynamo=True,
        dynamic_shapes=shapes,
        input_names=["features"],
        output_names=["prediction"],
        verbose=False,
    )
    assert program is not None
    program.save(path, external_data=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"features": np.ascontiguousarray(x.numpy())})
    return torch.from_numpy(found)


def as_safetensors(own: Personal, config: dict[str, Any], x: Tensor) -> bytes:
    """Tensors, and in the header all that is needed to predict with them."""
    made_by: dict[str, Any] = {key: config[key] for key in ("seed", "model", "algorithm") if key in config}
    code = {key: its | {"folder": None} for key, its in code_of(parse(made_by)).items()}  # others may read the file
    about = {
        "site": own.site,
        "task": own.task,
        "classes": list(own.classes),
        "shape": list(x.shape[1:]),
        "outputs": own.outputs(x[:1]).shape[1],
        "config": made_by,
        "code": code,
        "options": {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(own.algorithm).items()},
        "preparation": None if own.preparation is None else own.preparation.model_dump(mode="json"),
    }
    tensors = {name: value.detach().contiguous() for name, value in (own.model.fixed | own.params).items()}
    return safetensors.torch.save(tensors, {"fedtailor": json.dumps(about)})


def read_safetensors(path: Path, trust: bool = False) -> Personal:
    """The model of a file that `export` wrote; what it names is run only if the user ran it before, or trusts it."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})["fedtailor"])
            params = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
        raise RunError(f"{path}: not a model that fedtailor export wrote ({error})") from None
    says = described(about, str(path))
    try:
        config, options, prepared, site = (about[key] for key in ("config", "options", "preparation", "site"))
        config = parse(config, origin=str(path))
        preparation = None if prepared is None else Preparation.model_validate(prepared)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path}: not a model that fedtailor export wrote ({error})") from None
    if trust:
        trusting.accept(config, str(path), trusting.say)
    if what := changed_since(about.get("code"), config, str(path)):
        raise RunError(f"{path}: {what} since it was exported; put back what it was, or export it again")
    return Personal(
        site=site,
        algorithm=algorithms.make(config.algorithm.name, options),
        model=model_in(config, says, params, str(path)),
        params=params,
        task=says.task,
        classes=tuple(says.classes),
        preparation=preparation,
        source=str(path),
    )


def readable_again(path: Path, x: Tensor) -> Tensor:
    """What the model of a written file says."""
    own = read_safetensors(path)
    return own.readable(own.outputs(x))
