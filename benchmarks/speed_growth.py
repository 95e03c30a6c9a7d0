"""Growth: clients, parameters and rounds; and the time until a run has begun."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.learn2pfed_epoch import CELLS, F64, data, ours
from benchmarks.speed_core import Figure, Options, Ours, in_turns, on_threads
from fedtailor import algorithms
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.experiment import Experiment
from fedtailor.engines import EngineName, machine
from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import METRICS
from fedtailor.models import build
from fedtailor.training.solver import Solver

GB = 1e9


def learn2pfed(options: Options) -> Iterator[Figure]:
    """An epoch of Learn2pFed on linear models of 16 features; the limit is autograd over the stack of clients."""
    for clients in (100, 200) if options.small else (1_000, 10_000, 100_000):
        task = data(clients, 20, 16)
        rivals = {"ours": ours(task), "limit": stacked(task)}
        with machine.freed_memory_kept():  # as a run has it
            found = in_turns({k: on_threads(1, run) for k, run in rivals.items()}, options.repeats)
        name, against = f"D: Learn2pFed, {clients} clients", "the same equations stacked, autograd"
        yield Figure(name, found["ours"], found["limit"], against, 1.0, clients=clients)


def stacked(task: FederatedData, chunk: int = 4096) -> Callable[[], None]:
    """An epoch with all clients stacked, in parts that fit the cache, differentiated by autograd."""
    clients, k = len(task.clients), task.shape[0]
    x, y = task.train.x.reshape(clients, -1, k), task.train.y.reshape(clients, -1, 1)
    a, b, eye = x.mT @ x, x.mT @ y, torch.eye(k, dtype=F64)
    names = {"lam": (k, 1)} | dict.fromkeys(("p", "rho", "eta", "gamma", "theta"), (1, 1))
    raw = {s: torch.zeros(clients, *shape, dtype=F64, requires_grad=True) for s, shape in names.items()}
    parts = [slice(i, i + chunk) for i in range(0, clients, chunk)]

    def epoch() -> None:
        n = [{s: r[part].exp() for s, r in raw.items()} for part in parts]
        w = torch.zeros(k, 1, dtype=F64)
        state = [(w, w, w)] * len(parts)
        for _ in range(CELLS):
            top, bottom = torch.zeros_like(w), torch.zeros((), dtype=F64)
            for i, (part, (v, z, dual)) in enumerate(zip(parts, state, strict=True)):
                dual = dual + n[i]["theta"] * (z - v + w)
                rho, eta, weight = n[i]["rho"], n[i]["eta"], n[i]["p"] * n[i]["gamma"]
                v = torch.linalg.solve(a[part] + rho * eye, rho * (w + z + dual) + b[part])
                z = eta / (n[i]["lam"] + eta) * (v - w - dual)
                state[i] = v, z, dual
                top, bottom = top + (weight * (v - z - dual)).sum(0), bottom + weight.sum()
            w = top / bottom
        ends = zip(parts, state, strict=True)
        errors: list[Tensor] = [(x[part] @ v - y[part]).square().sum() for part, (v, _, _) in ends]
        gradients = torch.autograd.grad(torch.stack(errors).sum() / len(task.train.x), list(raw.values()))
        with torch.no_grad():
            torch._foreach_add_(list(raw.values()), gradients, alpha=-1e-3)

    return epoch


def growth(options: Options) -> Iterator[Figure]:
    """Everything that should not grow, does not; and starting is quick."""
    yield from registered(options)
    small = ["--small"] if options.small else []
    peak = _alone("parameters", "--engine", options.engine, *small)["peak"]
    clients = 20 if options.small else 1000
    yield Figure(f"E: {clients} clients x 1 M private parameters", peak / GB, 4.0, "4 GB of memory", 1.0, "gb")
    found = _alone("rounds", *small)
    first, last = found
    name = f"E: memory at round {last} of a tiny task"
    yield Figure(name, found[last] / GB, found[first] / GB, f"at round {first}", 1.02, "gb")
    yield Figure("E: fedtailor run to the end of its first round", until_first_round(), 4.0, "4 s", 1.0)
    yield Figure("E: import fedtailor", import_seconds(), 0.3, "0.3 s", 1.0)


def small_clients(clients: int, samples: int, features: int, classes: int) -> FederatedData:
    """Clients with little data each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * samples, features, generator=generator)
    y = torch.randint(classes, (clients * samples,), generator=generator)
    none = Rows(x[:0], y[:0], torch.zeros(clients + 1, dtype=torch.int64))
    names = tuple(f"c{i}" for i in range(clients))
    every = torch.arange(clients + 1) * samples
    return FederatedData("noise", "classification", names, Rows(x, y, every), none, none, classes)


def registered(options: Options) -> Iterator[Figure]:
    """Rounds of FedRep with as many clients as ever, out of more and more; the limit is the smallest federation."""
    cohort, counts = (10, (20, 200)) if options.small else (100, (100, 1_000, 10_000, 100_000))
    rivals: dict[str, Ours] = {}
    for clients in counts:
        task = small_clients(clients, 20, 32, 10)
        model = build("mlp", task.shape, 10, seed=0, options={"hidden": (64,)})
        setting = Experiment(algorithms.make("fedrep", {"head_epochs": 2}), model, task, Solver(batch_size=10), 0)
        rivals[str(clients)] = Ours(setting, options.engine, cohort)
    found = in_turns(rivals, 20 * options.repeats)  # rounds of a hundredth of a second
    for run in rivals.values():
        run.close()
    for clients in counts:
        name, least = f"E: {cohort} of {clients} clients", counts[0]
        against = f"{cohort} of {least} clients"
        engine = rivals[str(clients)].engine_name
        yield Figure(name, found[str(clients)], found[str(least)], against, 1.15, clients=clients, engine=engine)


def many_parameters(engine: EngineName, small: bool) -> None:
    """A run in which every client has a model of its own of a million parameters; files and results included."""
    clients, cohort, rounds = (20, 10, 2) if small else (1000, 100, 10)
    tables = {
        "rounds": rounds,
        "data": {"source": "polynomial", "clients": clients, "samples": 4 * clients},
        "model": {"name": "mlp", "hidden": [1000, 993]},
        "algorithm": {"name": "ditto"},
        "local": {"batch_size": 0, "lr": 1e-4},
        "federation": {"engine": engine, "clients_per_round": cohort, "memory": 1000},
        "evaluation": {"every": rounds},
        "checkpoint": {"every": rounds},
    }
    with tempfile.TemporaryDirectory() as folder:
        runner.start(parse(tables), Path(folder) / "run")


def many_rounds(small: bool) -> dict[str, float]:
    """Memory early and late in a run, files and checkpoints included."""
    rounds = 60 if small else 10_000
    marks = (rounds // 10, rounds)
    tables = {
        "rounds": rounds,
        "data": {"source": "digits", "clients": 4},
        "model": {"name": "linear"},
        "algorithm": {"name": "fedavg"},
        "local": {"batch_size": 0},
        "evaluation": {"every": rounds},
    }
    found: dict[str, float] = {}

    def listen(progress: runner.Progress) -> None:
        if progress.round in marks:
            found[str(progress.round)] = resident()

    with tempfile.TemporaryDirectory() as folder:
        runner.start(parse(tables), Path(folder) / "run", listener=listen)
    return found


def peak_of(run: Callable[[], None]) -> float:
    """The most memory while something runs."""
    most, done = resident(), threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.05):
            most = max(most, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return max(most, resident())


def resident() -> float:
    """Bytes in memory of this process and its children; what they share counts once."""
    family, total = [os.getpid()], 0.0
    while family:
        pid = family.pop()
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
            for task in Path(f"/proc/{pid}/task").iterdir():
                family += map(int, (task / "children").read_text(encoding="ascii").split())
        except FileNotFoundError:  # it has just ended
            continue
        total += next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def until_first_round() -> float:
    """From the command to the first line of results: all of the start and one small round."""
    config = "rounds = 100000\n[data]\nsource = 'digits'\n[evaluation]\nevery = 100000\n"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "task.toml").write_text(config, encoding="utf-8")
        begun = time.perf_counter()
        command = [sys.executable, "-m", "fedtailor", "run", "task.toml", "--out", "run"]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        metrics = Path(folder) / "run" / METRICS
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.005)
        seconds = time.perf_counter() - begun
        gone = process.poll() is not None
        process.kill()
        said = process.communicate()[1]
    if gone:
        raise RuntimeError(f"fedtailor run ended before its first round: {said}")
    return seconds


def import_seconds() -> float:
    """As `python -X importtime` tells it."""
    command = [sys.executable, "-X", "importtime", "-c", "import fedtailor"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    (line,) = (row for row in told.splitlines() if row.endswith(" fedtailor"))
    return int(line.split("|")[1]) / 1e6


def _alone(*arguments: str) -> dict[str, float]:
    """In a process that does nothing else."""
    command = [sys.executable, "-m", "benchmarks.speed_growth", *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["parameters", "rounds"])
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    if asked.part == "rounds":
        found = many_rounds(asked.small)
    else:
        found = {"peak": peak_of(lambda: many_parameters(asked.engine, asked.small))}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
