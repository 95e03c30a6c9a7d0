"""One run: rounds, validation, checkpoints, and at the end one look at the test data."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedtailor import algorithms, data, engines, models
from fedtailor.core.client import HIGHER_IS_BETTER, METRICS
from fedtailor.core.federation import Engine, Federation, Traffic
from fedtailor.core.me import Setting
from fedtailor.core.random import stream
from fedtailor.core.trees import Params, Tree, tree_map
from fedtailor.errors import ConfigError, RoundAbandoned, RunError
from fedtailor.metrics.summary import summarise
from fedtailor.runs.config import RunConfig
from fedtailor.runs.store import RESULTS, RunFolder, write_json

ABANDONED_IN_A_ROW = 10


@dataclass(frozen=True)
class Progress:
    """What is told after a round."""

    round: int
    rounds: int
    metric: str
    value: float  # mean over clients, on validation data; not a number in rounds without evaluation
    clients: int
    faults: int


Listener = Callable[[Progress], None]


def setting_of(config: RunConfig, data_root: Path | None = None) -> Setting:
    """Data, model and algorithm of a configuration, put together."""
    algorithm = algorithms.make(config.algorithm.name, config.algorithm.options)
    dtype = getattr(torch, config.model.dtype)
    federated = data.load(config.data, seed=config.seed, root=data_root).to(dtype)
    model = models.build(
        config.model.name,
        federated.shape,
        federated.outputs,
        seed=config.seed,
        head=config.model.head,
        options=config.model.options,
        buffers=config.model.buffers,
        dtype=dtype,
    )
    if config.federation.clients_per_round > len(federated.clients):
        raise ConfigError(
            f"federation.clients_per_round = {config.federation.clients_per_round}: "
            f"there are only {len(federated.clients)} clients"
        )
    if config.federation.min_replies > (config.federation.clients_per_round or len(federated.clients)):
        raise ConfigError(f"federation.min_replies = {config.federation.min_replies}: more than the clients of a round")
    return Setting(algorithm, model, federated, config.local.solver, config.seed)


def about(setting: Setting, config: RunConfig, engine: str, data_root: Path | None) -> dict[str, Any]:
    """What made a run, for people who find its folder."""
    names = ("fedtailor", "torch", "numpy", "safetensors")
    return {
        "versions": {name: version(name) for name in names} | {"python": platform.python_version()},
        "command": " ".join(["fedtailor", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        "engine": engine,
        "task_id": config.task_id,
        "data_root": None if data_root is None else str(data_root.resolve()),
        "data": setting.data.name,
        "task": setting.data.task,
        "clients": list(setting.data.clients),
        "train_samples": setting.data.train.sizes.tolist(),
        "parameters": sum(v.numel() for v in setting.model.trainable.values()),
        "notes": list(setting.data.notes),
    }


def start(config: RunConfig, path: Path, data_root: Path | None = None, listener: Listener | None = None) -> RunFolder:
    """A new run in a new folder, to its end."""
    setting = setting_of(config, data_root)
    name = engines.choose(setting) if config.federation.engine == "auto" else config.federation.engine
    folder = RunFolder.create(path, config, about(setting, config, name, data_root))
    return _train(folder, config, setting, name, listener)


def resume(path: Path, data_root: Path | None = None, listener: Listener | None = None) -> RunFolder:
    """Go on with a run from its last checkpoint; a finished one is left as it is."""
    folder = RunFolder.open(path)
    config, made_by = folder.config, folder.about
    if folder.results is not None:
        return folder
    if data_root is None and made_by["data_root"] is not None:
        data_root = Path(made_by["data_root"])
    torch.set_num_threads(made_by["threads"])  # sums over several threads round differently
    setting = setting_of(config, data_root)
    if (
        list(setting.data.clients) != made_by["clients"]
        or setting.data.train.sizes.tolist() != made_by["train_samples"]
    ):
        raise RunError(f"{path}: the data is no longer what the run was started with")
    return _train(folder, config, setting, made_by["engine"], listener)


class _Best:
    """The round with the best validation metric, and all that is needed to predict as it did."""

    def __init__(self) -> None:
        self.round = 0
        self.value = math.nan
        self.tree: Tree = None

    def offer(self, round: int, value: float, higher_is_better: bool, server: Tree, states: Tree) -> None:
        better = value > self.value if higher_is_better else value < self.value
        if better or (math.isnan(self.value) and not math.isnan(value)):
            self.round, self.value = round, value
            self.tree = tree_map(torch.clone, {"server": server, "clients": states})


def _train(
    folder: RunFolder, config: RunConfig, setting: Setting, engine_name: Any, listener: Listener | None
) -> RunFolder:
    with folder.locked():
        engine = engines.make(engine_name, setting, config.federation.chunk)
        fed = Federation(engine, config.federation.limits)
        engine.start()
        server = setting.algorithm.server_init(setting.model)
        first, best, spent, abandoned = 1, _Best(), 0.0, 0
        if saved := folder.load_checkpoint():
            status, trees = saved
            folder.cut_metrics(status["metrics_length"])
            first, spent, abandoned = status["round"] + 1, status["seconds"], status["abandoned"]
            server = trees["state"]["server"]
            engine.set_states(trees["state"]["clients"])
            fed.traffic = Traffic(**status["traffic"])
            fed.looked_at = set(status["looked_at"])
            if "best" in trees:
                best.round, best.value, best.tree = status["best_round"], status["best_value"], trees["best"]
        else:
            folder.cut_metrics(0)
        metric = METRICS[setting.data.task][0]
        saved_at = 0.0

        def save(round: int, metrics_length: int) -> None:
            status = {
                "round": round,
                "seconds": spent,
                "abandoned": abandoned,
                "metrics_length": metrics_length,
                "traffic": asdict(fed.traffic),
                "looked_at": sorted(fed.looked_at),
                "best_round": best.round,
                "best_value": best.value,
            }
            trees = {"state": (round, {"server": server, "clients": engine.get_states()})}
            if best.tree is not None:
                trees["best"] = (best.round, best.tree)
            folder.save_checkpoint(status, trees)

        for round in range(first, config.rounds + 1):
            begun = time.perf_counter()
            cohort, reason = _cohort(config, len(setting.data.clients), round), None
            faults = len(fed.faults)
            try:
                server = fed.run_round(round, cohort, server)
                abandoned = 0
            except RoundAbandoned as why:
                reason, abandoned = str(why), abandoned + 1
            line: dict[str, Any] = {"round": round, "cohort": list(cohort)}
            if reason:
                line["abandoned"] = reason
            if fed.faults[faults:]:
                line["faults"] = [asdict(f) for f in fed.faults[faults:]]
            value = math.nan
            if round % config.evaluation.every == 0 or round == config.rounds:
                splits = ["val", "test"] if config.evaluation.test_curve else ["val"]
                line |= measure(engine, round, server, splits)
                higher = HIGHER_IS_BETTER[metric]
                value = summarise(line["val"][metric], higher_is_better=higher).mean
                best.offer(round, value, higher, server, engine.get_states())
            seconds = time.perf_counter() - begun
            spent += seconds
            line |= asdict(fed.traffic) | {"seconds": round_to(seconds)}
            length = folder.append_metrics(line)
            if listener is not None:
                listener(Progress(round, config.rounds, metric, value, len(fed.cohort), len(fed.faults)))
            if abandoned >= ABANDONED_IN_A_ROW:
                raise RunError(f"{folder.path}: {abandoned} rounds in a row were abandoned; the last: {reason}")
            due = round % config.checkpoint.every == 0 and time.perf_counter() - saved_at >= config.checkpoint.seconds
            if due or round == config.rounds:
                save(round, length)
                saved_at = time.perf_counter()
        _finish(folder, engine, fed, config, server, best, spent)
    return folder


def _finish(
    folder: RunFolder, engine: Engine, fed: Federation, config: RunConfig, server: Tree, best: _Best, spent: float
) -> None:
    """Test both the last round and the one selected on validation data; save the personal models of both."""
    task = engine.setting.data.task
    last = (config.rounds, tree_map(torch.clone, {"server": server, "clients": engine.get_states()}))
    # without validation samples nothing can be selected: the last round stands for both
    snapshots = {"last": last, "selected": last if best.tree is None else (best.round, best.tree)}
    results: dict[str, Any] = {"metric": METRICS[task][0], "higher_is_better": HIGHER_IS_BETTER[METRICS[task][0]]}
    for kind, (round, tree) in snapshots.items():
        engine.set_states(tree["clients"])
        models: dict[int, Params] = {}
        test = measure(engine, round, tree["server"], ["test"], models)["test"]
        folder.save_personal(kind, {engine.setting.data.clients[c]: models[c] for c in sorted(models)})
        summary = {
            name: asdict(summarise(values, higher_is_better=HIGHER_IS_BETTER[name])) for name, values in test.items()
        }
        results[kind] = {"round": round, "test": summary, "clients": test}
    engine.set_states(last[1]["clients"])
    results |= {"traffic": asdict(fed.traffic), "seconds": round_to(spent), "gathered": sorted(fed.looked_at)}
    results["faults"] = sum(len(line.get("faults", [])) for line in folder.metrics())
    results["abandoned"] = sum("abandoned" in line for line in folder.metrics())
    write_json(folder.path / RESULTS, results)


def measure(
    engine: Engine, round: int, server: Tree, splits: list[str], models: dict[int, Params] | None = None
) -> dict[str, dict[str, list[float]]]:
    """Per split and metric one number per client, in the order of the data's clients; `models` collects the models."""
    clients = len(engine.setting.data.clients)
    out: dict[str, dict[str, list[float]]] = {s: {} for s in splits}
    for group, found, stack in engine.evaluate(range(clients), round, server, splits):
        for split, metrics in found.items():
            for name, values in metrics.items():
                column = out[split].setdefault(name, [math.nan] * clients)
                for client, value in zip(group, values.tolist(), strict=True):
                    column[client] = value
        if models is not None:
            models |= {client: {k: v[row] for k, v in stack.items()} for row, client in enumerate(group)}
    return out


def _cohort(config: RunConfig, clients: int, round: int) -> tuple[int, ...]:
    wanted = config.federation.clients_per_round or clients
    if wanted == clients:
        return tuple(range(clients))
    drawn = stream(config.seed, round, "cohort").choice(clients, size=wanted, replace=False)
    return tuple(sorted(int(c) for c in drawn))


def round_to(seconds: float) -> float:
    """Milliseconds are enough."""
    return float(f"{seconds:.3f}")
