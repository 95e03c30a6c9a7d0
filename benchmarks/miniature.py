"""Two rounds with few clients and samples, and otherwise the configuration of a row. Its digest is a few numbers.

A row of a results page keeps the digest. Where the code computes other numbers later, the row was made by something
else. Names, files and speed do not matter; an update rule, a default, a first value or a random stream does.
What two rounds of three clients do not exercise goes unnoticed: a late split of clusters, the length of an Adam step.
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtailor.core.data import SPLITS, FederatedData, Rows
from fedtailor.errors import UserError
from fedtailor.experiments import runner
from fedtailor.experiments.building import data_seed, load, model_of
from fedtailor.experiments.config import RunConfig, parse, with_values
from fedtailor.experiments.store import RunFolder

CLIENTS, ROUNDS = 3, 2
SAMPLES = {"train": 12, "val": 6, "test": 6}  # of each client
BATCH = 4  # several steps in an epoch, or a term that acts from the second step on would not show
CLOSE = 2e-4  # another machine rounds in another way
PROCESSES = 2
Digest = tuple[float, ...]
Found = Digest | str  # a text says why there is no digest


def shrink(data: FederatedData, clients: int = CLIENTS) -> FederatedData:
    """A few clients with the first of their samples."""
    few = data.only(range(min(clients, len(data.clients))))
    rows: dict[str, Any] = {split: _shorten(getattr(few, split), SAMPLES[split]) for split in SPLITS}
    return replace(few, **rows)


def _shorten(rows: Rows, samples: int) -> Rows:
    spans = [(a, min(a + samples, b)) for a, b in zip(rows.starts.tolist(), rows.starts[1:].tolist(), strict=False)]
    at = torch.cat([torch.arange(a, b, device="cpu") for a, b in spans])
    sizes = rows.starts.new_tensor([0, *(b - a for a, b in spans)])
    return replace(rows, x=rows.x[at], y=rows.y[at], starts=sizes.cumsum(0))


def shrunk(config: RunConfig, clients: int) -> RunConfig:
    """The configuration for so few clients, samples and rounds; nothing else is other."""
    values: dict[str, Any] = {
        "rounds": min(config.rounds, ROUNDS),
        "evaluation.every": ROUNDS,
        "evaluation.test_curve": False,
        "checkpoint.seconds": 3600,
        "federation.engine": "loop",
        "local.batch_size": min(config.local.batch_size, BATCH),
    }
    if config.federation.clients_per_round:
        values["federation.clients_per_round"] = min(config.federation.clients_per_round, clients - 1)
    for table in ("epochs", "answer", "speed"):
        values[f"environment.{table}"] = list(getattr(config.environment, table))[:clients]
    if config.algorithm.name.startswith("duw"):  # each outer iteration has the rounds of the horizon
        options = ("outer_iterations", "horizon")
        values |= {f"algorithm.{k}": min(int(config.algorithm.options.get(k, ROUNDS)), ROUNDS) for k in options}
    made: RunConfig = parse(with_values(config.plain(), values))
    return made


def digest(config: RunConfig, few: FederatedData) -> Digest:
    """Of the miniature of a configuration, on clients from `shrink`."""
    unseen = config.evaluation.unseen is not None  # one of the clients, then
    small = shrunk(config, len(few.clients) - unseen)
    if isinstance(config.evaluation.unseen, tuple):  # whoever it is has to be one of the few
        evaluation = small.evaluation.model_copy(update={"unseen": few.clients[-1:]})
        small = small.model_copy(update={"evaluation": evaluation})
    with tempfile.TemporaryDirectory() as temporary:
        return _numbers(runner.start(small, Path(temporary) / "run", cores=1, loaded=few), small, few)


def _numbers(folder: RunFolder, config: RunConfig, data: FederatedData) -> Digest:
    """Losses on test samples, and how far the clients' models have moved."""
    results = folder.results
    assert results is not None
    ends = [results[kind]["test"] for kind in ("last", "unseen") if kind in results]
    found = [end[name]["mean"] for end in ends for name in sorted(end) if name != "accuracy"]
    begun: Mapping[str, Tensor] = model_of(config, data.shape, folder.about["outputs"]).params
    for client in folder.about["clients"]:
        served = folder.personal(client, "last").items()
        moved = [v.double() - begun[k].double() if k in begun else v.double() for k, v in served]
        flat = torch.cat([v.flatten() for v in moved])
        found += [float(flat.norm()), float(flat.abs().mean())]
    return tuple(float(f"{value:.6g}") for value in found)


def agree(before: Found, now: Found) -> bool:
    """Whether two digests are of the same computation, up to rounding."""
    if isinstance(before, str) or isinstance(now, str) or len(before) != len(now):
        return before == now
    return all(
        math.isclose(a, b, rel_tol=CLOSE) or (math.isnan(a) and math.isnan(b)) for a, b in zip(before, now, strict=True)
    )


def digests(configs: Mapping[Any, RunConfig], data_root: Path | None) -> dict[Any, Found | None]:
    """The digests of many configurations; None where the data is not at hand. Equal ones run once."""
    texts = {key: config.model_dump_json() for key, config in configs.items()}
    tasks: dict[tuple[str, int, str], dict[str, RunConfig]] = defaultdict(dict)  # each loads its data once
    for key, config in configs.items():
        group = (config.data.model_dump_json(), data_seed(config), config.model.dtype)
        tasks[group][texts[key]] = config
    groups, one = [list(task.values()) for task in tasks.values()], partial(_of_one_source, data_root=data_root)
    if min(PROCESSES, len(groups)) > 1:
        with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
            answers = list(pool.map(one, groups))
    else:
        answers = list(map(one, groups))
    by_text = [dict(zip(task, each, strict=True)) for task, each in zip(tasks.values(), answers, strict=True)]
    found = {text: digest for each in by_text for text, digest in each.items()}
    return {key: found[text] for key, text in texts.items()}


def _of_one_source(configs: list[RunConfig], data_root: Path | None) -> list[Found | None]:
    torch.set_num_threads(1)
    try:
        few = shrink(load(configs[0], data_root))
    except UserError:
        return [None] * len(configs)
    return [_attempt(config, few) for config in configs]


def _attempt(config: RunConfig, few: FederatedData) -> Found:
    try:
        return digest(config, few)
    except UserError as error:  # a miniature that cannot run any more is a change, too
        return f"{type(error).__name__}: {error}"
