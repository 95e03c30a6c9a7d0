"""What both ends of a federation agree on: how a request is wrapped, and what is said before the first round."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import fields
from typing import Any

from torch import Tensor

from fedtailor.core.algorithm import client_functions, reply_example
from fedtailor.core.data import FederatedData
from fedtailor.core.experiment import Experiment
from fedtailor.core.trees import items, schema
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.user_source import names
from fedtailor.version import __version__

ENVELOPE = struct.Struct(">16sQ")  # the server's session, and the number of the request in it
PING = 0  # the number of a sign of life, which may come at any time


def data_schema(data: FederatedData) -> dict[str, Any]:
    """What the sites must agree on; the server learns no more of the data than this and the number of samples."""
    return {
        "task": data.task,
        "x": {path: _form(v) for path, v in items(data.train.first(1))},
        "y": _form(data.train.y),
        "outputs": data.outputs,
        "classes": list(data.classes),
        "features": list(data.features),
    }


def _form(v: Tensor) -> list[Any]:
    """Of a sample; floating-point numbers get the width of the model."""
    return [list(v.shape[1:]), "float32" if v.is_floating_point() else str(v.dtype).removeprefix("torch.")]


def promise(experiment: Experiment) -> dict[str, Any]:
    """Which text runs, with which options, and what may leave: equal at both ends, or nothing is done."""
    algorithm = experiment.algorithm
    sends = {
        name: {path: [list(shape), str(dtype)] for path, (shape, dtype) in schema(example).items()}
        for name in sorted(client_functions(algorithm))
        for example in [reply_example(algorithm, name, experiment.model)]
    }
    options = {f.name: getattr(algorithm, f.name) for f in fields(algorithm)}
    contract = {"version": __version__, "algorithm": algorithm.title, "options": options, "sends": sends}
    plain: dict[str, Any] = json.loads(json.dumps(contract, default=str))
    return plain


def digest(value: Any) -> str:
    """A short hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def other_code(config: RunConfig) -> list[str]:
    """What a configuration names as "module:name", beside algorithm and model: a site's policy lists what may run."""
    named = {key: name for key, name in names(config).items() if key not in ("algorithm.name", "model.name")}
    return sorted(set(named.values()))


def config_for(config: RunConfig, client: int) -> dict[str, Any]:
    """The part of a run's configuration that one site needs: nothing about the others."""
    epochs = config.environment.epochs
    plain = config.plain()
    plain["federation"] = {"threads": config.federation.threads, "max_norm": config.federation.max_norm}
    plain["environment"] = {"epochs": [epochs[client]]} if epochs else {}
    return plain
