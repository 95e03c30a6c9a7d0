"""The state of a run from round to round: the server, the best round so far, what is measured and saved."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedtailor.aggregation import accountant
from fedtailor.core.client import onboard
from fedtailor.core.data import FederatedData
from fedtailor.core.engine import Blaming, Engine, Losing
from fedtailor.core.environment import Environment
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Fault, Federation, Traffic
from fedtailor.core.process_group import ProcessGroup
from fedtailor.core.trees import Params, Tree, to_device, tree_map
from fedtailor.engines import devices
from fedtailor.engines.disk import Disk
from fedtailor.errors import ConfigError, RoundAbandoned, RunError, nearest
from fedtailor.experiments.building import attack_of
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.sampling import cohort
from fedtailor.experiments.store import RESULTS, KnownTensors, RunFolder, read_json, write_json
from fedtailor.metrics.evaluation import evaluate
from fedtailor.metrics.summary import summarise
from fedtailor.numerics import solve_log

NOISY = "noise.json"  # how many sums with noise were seen, by round
NOT_PRIVATE = "not private: noise is reproducible"  # in place of an epsilon
EPOCHS = 3
"""Default epochs for a newcomer to fine-tune its private parameters."""


@dataclass(frozen=True)
class BestRound:
    """The round that is best on validation data so far."""

    round: int = 0
    value: float = math.nan
    snapshot: Tree = None  # all that is needed to predict as in that round


class RunState:
    """What changes from round to round."""

    def __init__(self, config: RunConfig, engine: Engine, ranks: ProcessGroup, disk: Disk) -> None:
        self.config = config
        self.disk = disk
        self.ranks = ranks
        self.engine = engine
        self.fed = Federation(engine, config.federation.limits, ranks)
        self.server = engine.experiment.algorithm.server_init(engine.experiment.model)
        self.round = -engine.experiment.algorithm.preparation  # the last one done
        self.abandoned = 0  # rounds in a row
        self.known = KnownTensors()  # of personal models that are written
        self.seconds = 0.0
        self.best = BestRound()  # on validation data
        self.kept = BestRound()  # the last that was better by early_stopping.min_delta
        self.validation: dict[str, list[float]] = {}  # by metric, of each client when it was evaluated last

    @property
    def device(self) -> torch.device:
        """Where the server and, in this process, the clients compute; what is saved is on the host."""
        return self.engine.experiment.device

    @property
    def metric(self) -> str:
        return self.engine.experiment.metrics[0].name

    @property
    def higher_is_better(self) -> bool:
        return self.engine.experiment.metrics[0].higher_is_better

    @property
    def is_stopped(self) -> bool:
        patience = self.config.early_stopping.patience
        return 0 < patience <= self.round - self.kept.round and self.kept.round > 0

    @property
    def goes_back(self) -> bool:
        """Whether the run ends with the round that early stopping found best."""
        section = self.config.early_stopping
        return section.patience > 0 and section.keep == "best" and self.kept.snapshot is not None

    def step(self, round: int) -> tuple[dict[str, Any], float]:
        """One round; returns what is recorded of it, and the mean validation metric where it was measured."""
        begun, faults = time.perf_counter(), len(self.fed.record.faults)
        cohort = self._cohort(round)
        line: dict[str, Any] = {"round": round, "cohort": list(cohort)}
        chunk = getattr(self.engine, "chunk", 0)
        devices.begin_peak(self.device)
        with solve_log.watched() as solves:
            try:
                with devices.memory_errors_at(self.device, f"round {round}"):
                    self.server = self.fed.run_round(round, cohort, self.server)
                self.abandoned = 0
            except RoundAbandoned as why:
                line["abandoned"] = str(why)
                self.abandoned += 1
                if isinstance(self.engine, Blaming):
                    named = {fault.client for fault in self.fed.record.faults[faults:]}
                    self.engine.blame([c for c in cohort if self.fed.names[c] in named], str(why))
        if (now := getattr(self.engine, "chunk", chunk)) != chunk:
            line["chunk"] = now
        if late := getattr(self.engine, "counted_late", None):
            line["late"] = late
        missed = self.fed.attendance.missed
        if any(missed):
            line["missed"] = [list(m) for m in missed] if round < 1 else list(missed[0])
        tally = sum(
            (solve_log.Tally(*each) for each in self.ranks.all_gather_object(solves.tally)),
            start=solve_log.Tally(),
        )
        if report := self.fed.record.reported | tally.figures:
            line["report"] = report
        if self.config.privacy.noise:
            line["epsilon"] = NOT_PRIVATE if self.config.privacy.repeatable_noise else self._privacy_cost().epsilon
        value = math.nan
        if round > 0 and (round % self.config.evaluation.every == 0 or round == self.config.rounds):
            splits = ["val", "test"] if self.config.evaluation.test_curve else ["val"]
            with devices.memory_errors_at(self.device, f"evaluation of round {round}"):
                line |= measure(self.engine, round, self.server, splits)
            self.validation = line["val"]
            value = self._select(round, line["val"][self.metric])
            if self.config.early_stopping.patience:
                self._watch(round, line["val"])
            for name, reason in getattr(self.engine, "disbelieved", {}).items():
                self.fed.record.faults.append(Fault(name, round, "evaluate", reason))
        if self.fed.record.faults[faults:]:
            line["faults"] = [asdict(f) for f in self.fed.record.faults[faults:]]
        if (peak := self._peak_memory()) is not None:
            line["device_memory"] = peak
        self.round = round
        seconds = time.perf_counter() - begun
        self.seconds += seconds
        return line | asdict(self.fed.traffic) | {"seconds": _milliseconds(seconds)}, value

    def _cohort(self, round: int) -> tuple[int, ...]:
        section, data = self.config.federation, self.engine.experiment.data
        wanted, sizes = section.clients_per_round, data.train.sizes.numpy()
        return cohort(section.sampler, self.config.seed, round, wanted, data.clients, sizes, self.validation)

    def _peak_memory(self) -> int | None:
        """The most bytes that were in use on a device, of whichever worker or rank."""
        own = getattr(self.engine, "peak_memory", None) or devices.peak_memory(self.device)
        every = self.ranks.all_gather_object(own) if self.device.type != "cpu" else [own]
        return max((peak for peak in every if peak is not None), default=None)

    def _privacy_cost(self) -> accountant.PrivacyCost:
        clients, wanted = len(self.engine.experiment.data.clients), self.config.federation.clients_per_round
        return accountant.privacy_cost(
            Counter(self.fed.sums.noisy.values()),
            clients=clients,
            cohort=wanted or clients,
            noise=self.config.privacy.noise,
            delta=self.config.privacy.delta,
        )

    def _select(self, round: int, values: list[float]) -> float:
        """Keep the round if it is the best one on validation data so far."""
        higher = self.engine.experiment.metrics[0].higher_is_better
        value = summarise(values, higher_is_better=higher).mean
        better = value > self.best.value if higher else value < self.best.value
        if better or (self.best.snapshot is None and not math.isnan(value)):
            self.best = BestRound(round, value, self._snapshot())
        return value

    def _watch(self, round: int, measured: dict[str, list[float]]) -> None:
        """Keep the round if it is better than the one that is kept, by as much as early stopping asks for."""
        section = self.config.early_stopping
        metric = section.metric or self.metric
        if metric not in measured:
            raise ConfigError(f'early_stopping.metric: no metric "{metric}" here; {nearest(metric, measured)}')
        higher = {m.name: m.higher_is_better for m in self.engine.experiment.metrics}[metric]
        value = summarise(measured[metric], higher_is_better=higher).mean
        gain = (value - self.kept.value) * (1 if higher else -1)
        if not math.isnan(value) and (self.kept.round == 0 or gain > section.min_delta):
            self.kept = BestRound(round, value, self._snapshot() if section.keep == "best" else None)

    def _snapshot(self) -> Tree:
        """Server and clients as they are now; of the clients, those of this rank."""
        return self.disk.copy({"server": self.server, "clients": self.engine.get_states()})

    def _whole(self, tree: Tree) -> Tree:
        """A snapshot with the clients of all ranks, on the first."""
        return tree | {"clients": self.ranks.gather_to_root(tree["clients"], self._everybody)}

    @property
    def _everybody(self) -> range:
        return range(len(self.engine.experiment.data.clients))

    def save(self, folder: RunFolder, metrics_length: int) -> None:
        """Write a checkpoint; `metrics_length` is how much of the rounds' file counts with it."""
        status = {
            "round": self.round,
            "seconds": self.seconds,
            "abandoned": self.abandoned,
            "metrics_length": metrics_length,
            "traffic": asdict(self.fed.traffic),
            "looked_at": sorted(self.fed.record.gathered),
            "noisy_sums": {str(round): sums for round, sums in self.fed.sums.noisy.items()},
            "best_round": self.best.round,
            "best_value": self.best.value,
            "kept": [self.kept.round, self.kept.value],
        }
        state = {"server": self.server, "clients": self.engine.get_states()}
        moments = {"moments": self.fed.sums.moments} if self.fed.sums.moments else {}  # of the server's optimizer
        trees = {"state": (self.round, self._whole(state) | moments)}
        if self.best.snapshot is not None:
            trees["best"] = (self.best.round, self._whole(self.best.snapshot))
        if self.kept.snapshot is not None:
            trees["kept"] = (self.kept.round, self._whole(self.kept.snapshot))
        if self.ranks.rank == 0:
            folder.save_checkpoint(status, trees, self.disk.touch)
        if isinstance(self.engine, Losing):
            self.engine.saved([tree["clients"] for _, tree in trees.values()])

    def load(self, folder: RunFolder) -> None:
        """Go back to the last checkpoint, or to the start. Sums with noise that were seen since then count."""
        if self.config.privacy.noise and not self.config.privacy.repeatable_noise:
            self._count_noisy_sums(folder.path / NOISY)
        saved = folder.load_checkpoint()
        if self.ranks.rank == 0:
            folder.drop_stale()
            folder.cut_metrics(saved[0]["metrics_length"] if saved else 0)
        if saved is None:
            return
        status, trees = saved[0], {name: self._part(tree) for name, tree in saved[1].items()}
        self.server = to_device(trees["state"]["server"], self.device)
        self.engine.set_states(trees["state"]["clients"])
        if isinstance(self.engine, Losing):
            self.engine.saved([tree["clients"] for tree in trees.values()])
        self.round, self.abandoned, self.seconds = status["round"], status["abandoned"], status["seconds"]
        evaluated = [line["val"] for line in folder.metrics() if "val" in line] if self.ranks.rank == 0 else []
        self.validation = self.ranks.all_gather_object(evaluated[-1] if evaluated else {})[0]
        self.best = BestRound(status["best_round"], status["best_value"], trees.get("best"))
        round, value = status.get("kept", (0, math.nan))
        self.kept = BestRound(round, value, trees.get("kept"))
        self.fed.traffic = Traffic(**status["traffic"])
        self.fed.record.gathered = set(status["looked_at"])
        self.fed.sums.moments = trees["state"].get("moments", {})
        before = {int(round): sums for round, sums in status.get("noisy_sums", {}).items()}
        seen = self.fed.sums.noisy
        self.fed.sums.noisy = {r: max(before.get(r, 0), seen.get(r, 0)) for r in sorted(before.keys() | seen.keys())}

    def _count_noisy_sums(self, path: Path) -> None:
        """Those of an interrupted process, and from now on each before it is seen: fresh noise costs as much again."""
        if path.exists():
            self.fed.sums.noisy = {int(round): int(sums) for round, sums in read_json(path)["sums"].items()}
        self.fed.sums.before_noise = lambda: write_json(
            path, {"sums": {str(r): n for r, n in self.fed.sums.noisy.items()}}
        )

    def _part(self, tree: Tree) -> Tree:
        """Of a whole snapshot, server and this rank's clients."""
        return tree | {"clients": self.ranks.own(tree["clients"], self._everybody)}

    def finish(self, folder: RunFolder) -> None:
        """Test both the last round and the one selected on validation data; save the personal models of both."""
        if self.abandoned >= self.config.rounds:
            reason = folder.metrics()[-1]["abandoned"] if self.ranks.rank == 0 else ""
            raise RunError(f"{folder.path}: none of its {self.config.rounds} rounds could be used; the last: {reason}")
        stopped = {"stopped": self.round} if self.is_stopped else {}
        if self.goes_back:
            self.round, tree = self.kept.round, self.kept.snapshot
            self.server = tree["server"]
            self.engine.set_states(tree["clients"])
        last = (self.round, self._snapshot())
        # without validation samples nothing can be selected: the last round stands for both
        selected = last if self.best.snapshot is None else (self.best.round, self.best.snapshot)
        snapshots = {"last": last, "selected": selected}
        results: dict[str, Any] = {
            "metric": self.metric,
            "higher_is_better": self.engine.experiment.metrics[0].higher_is_better,
        }
        for kind, (round, tree) in snapshots.items():
            self.engine.set_states(tree["clients"])
            test = self._test_metrics(folder, kind, round, to_device(tree["server"], self.device))
            results[kind] = {"round": round, "test": self._summaries(test), "clients": test}
            if missing := missing_metrics(self.engine.experiment, test):
                results[kind]["missing"] = missing
        self.engine.set_states(last[1]["clients"])
        if self.ranks.rank:
            return
        if self.engine.experiment.unseen is not None:
            results["unseen"] = self._onboard(folder, self.engine.experiment.unseen, results["last"]["test"])
        lines = folder.metrics()
        results |= {
            "traffic": asdict(self.fed.traffic),
            "seconds": _milliseconds(self.seconds),
            "gathered": sorted(self.fed.record.gathered),
            "lines": len(lines),
            **self._attackers(),
            "faults": sum(len(line.get("faults", [])) for line in lines),
            "abandoned": sum("abandoned" in line for line in lines),
            **stopped,
        }
        if self.config.privacy.secure_sum or self.config.privacy.clip:
            results["privacy"] = self._privacy()
        write_json(folder.path / RESULTS, results)

    def _summaries(self, metrics: dict[str, list[float]]) -> dict[str, Any]:
        directions = {m.name: m.higher_is_better for m in self.engine.experiment.metrics}
        return {k: asdict(summarise(v, higher_is_better=directions[k])) for k, v in metrics.items()}

    def _attackers(self) -> dict[str, Any]:
        """The malicious clients of a simulated attack, whose figures mean nothing."""
        names = self.engine.experiment.data.clients
        liars = attack_of(self.config).clients(len(names))
        return {"attackers": sorted(names[c] for c in liars)} if liars else {}

    def _privacy(self) -> dict[str, Any]:
        """What protected the clients, for the results."""
        section = self.config.privacy
        figures: dict[str, Any] = {"secure_sum": section.secure_sum, "clip": section.clip, "noise": section.noise}
        if section.noise:
            figures |= {
                "delta": section.delta,
                "noisy_sums": sum(self.fed.sums.noisy.values()),
                **asdict(self._privacy_cost()),
            }
        if section.noise and section.repeatable_noise:
            figures |= {"epsilon": NOT_PRIVATE, "epsilon_add_remove": NOT_PRIVATE}
        return figures

    def _test_metrics(self, folder: RunFolder, kind: str, round: int, server: Tree) -> dict[str, list[float]]:
        """Test metrics of all clients; their personal models are saved as they come."""
        names = self.engine.experiment.data.clients
        if self.ranks.count == 1:
            with folder.personal_models(kind, self.known) as keep:
                return measure(self.engine, round, server, ["test"], lambda c, m: keep(names[c], m), kind)["test"]
        mine: dict[int, Params] = {}
        test = measure(self.engine, round, server, ["test"], mine.__setitem__)["test"]
        stack = tree_map(lambda *rows: torch.stack(rows), *(mine[c] for c in sorted(mine))) if mine else None
        rows = self.ranks.gather_to_root(stack, self._everybody)
        if rows is not None:
            with folder.personal_models(kind, self.known) as keep:
                for c in self._everybody:
                    keep(names[c], {k: v[c] for k, v in rows.items()})
        return test

    def _onboard(self, folder: RunFolder, newcomers: FederatedData, trained: dict[str, Any]) -> dict[str, Any]:
        """Onboard clients that took no part: what they reach, and by how much those who trained are better off."""
        epochs = self.config.evaluation.unseen_epochs
        served = list(
            onboard_newcomers(self.engine.experiment, newcomers, self.server, EPOCHS if epochs is None else epochs)
        )
        with folder.personal_models("unseen") as keep:
            for client, (model, _) in zip(newcomers.clients, served, strict=True):
                keep(client, model)
        test = {k: [float(metrics["test"][k]) for _, metrics in served] for k in trained}
        summary = self._summaries(test)
        gap = {k: trained[k]["mean"] - summary[k]["mean"] for k in trained}
        return {"round": self.round, "names": list(newcomers.clients), "test": summary, "clients": test, "gap": gap}


def _milliseconds(seconds: float) -> float:
    return float(f"{seconds:.3f}")


def missing_metrics(experiment: Experiment, test: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Which clients with test samples have no number of a metric, and why."""
    sizes, names = experiment.data.test.sizes.tolist(), experiment.data.clients
    out = {}
    for metric in experiment.metrics:
        without = [c for c, v, n in zip(names, test[metric.name], sizes, strict=True) if n and math.isnan(v)]
        if without:
            out[metric.name] = {"clients": without, "reason": metric.missing}
    return out


def measure(
    engine: Engine,
    round: int,
    server: Tree,
    splits: list[str],
    keep: Callable[[int, Params], None] = lambda client, model: None,
    kind: str = "",
) -> dict[str, dict[str, list[float]]]:
    """Per split and metric one number per client, in the order of the data's clients; `keep` is given the models."""
    clients = len(engine.experiment.data.clients)
    names = [metric.name for metric in engine.experiment.metrics]
    out = {s: {name: [math.nan] * clients for name in names} for s in splits}  # not a number: it did not answer
    for group, by_split, stack in engine.evaluate(range(clients), round, server, splits, kind):
        for split, metrics in by_split.items():
            for name, values in metrics.items():
                for client, value in zip(group, values.tolist(), strict=True):
                    out[split][name][client] = value
        for row, client in enumerate(group if stack else ()):  # the models of other ranks and of sites are there
            keep(client, {k: v[row] for k, v in stack.items()})
    return out


def onboard_newcomers(
    experiment: Experiment, newcomers: FederatedData, server: Tree, epochs: int
) -> Iterator[tuple[Params, dict[str, dict[str, Tensor]]]]:
    """The personal model of each newcomer, and its metrics by split; nobody else is touched."""
    own = replace(experiment, data=newcomers, unseen=None, environment=Environment())
    for i in range(len(newcomers.clients)):
        model = onboard(own, i, server, epochs)
        yield model, evaluate(own, [i], model, ("val", "test"), is_stacked=False)
