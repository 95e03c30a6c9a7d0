"""Our methods beside PFLlib's on the same files, with the same hyper-parameters.

FEDTAILOR_DATA=... python benchmarks/against_pfllib.py DIR [--methods NAME ...] [--seeds 0 1] [--rounds 20]

DIR is a checkout of https://github.com/TsingZ0/PFLlib, which is not part of this repository; nothing is written there.
The clients are a Dirichlet split of MNIST in PFLlib's format, which both programs read: 20 clients, 150 training and 50
test images each (fewer at some), a dense network with 100 hidden units, batches of 10, step size 0.05, one local epoch,
all clients in every round. Figures are the accuracy of personal models over all test images in percent, last and best
round. PFLlib runs as its own main.py does, in a process of its own; packages that it imports and does not need here are
stood in for, and its dense network is one without the log-softmax that would lie between body and head.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

DATA = {"source": "mnist", "clients": 20, "partition": "dirichlet", "alpha": 0.1, "val": 0.0, "test": 0.25}
DATA |= {"max_samples": 200, "min_samples": 40}
NAME = "MNIST_against"
LR, BATCH = 0.05, 10
# by our name: PFLlib's name and flags, and our options beside the defaults
METHODS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "fedavg": ("FedAvg", [], {}),
    "local": ("Local", [], {}),
    "fedprox": ("FedProx", ["-mu", "0.1"], {"mu": 0.1}),
    "fedper": ("FedPer", [], {}),
    "fedrep": ("FedRep", ["-pls", "1"], {"head_epochs": 1}),
    "lg-fedavg": ("LG-FedAvg", [], {}),
    "ditto": ("Ditto", ["-mu", "1"], {"lam": 1.0}),
    "feddyn": ("FedDyn", ["-al", "0.1"], {"alpha": 0.1}),
    "apfl": ("APFL", ["-al", "0.5"], {"alpha": 0.5}),
    "fedrod": ("FedROD", [], {}),
    "fedala": ("FedALA", [], {}),
    "per-fedavg": ("PerAvg", ["-lr", "0.05"], {"alpha": 0.05, "order": "first"}),
    "fedcp": ("FedCP", ["-lam", "5"], {"lam": 5.0}),
    "fedas": ("FedAS", [], {}),
    "fedproto": ("FedProto", ["-lam", "1"], {}),
    "moon": ("MOON", ["-mu", "1", "-tau", "0.5"], {}),
    "fedcac": ("FedCAC", ["-tau", "0.5", "-bt", "100"], {}),
    "fml": ("FML", ["-al", "0.5", "-bt", "0.5"], {}),
    "gpfl": ("GPFL", ["-lam", "1"], {}),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the methods in both programs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=("ours", "theirs"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--theirs", help=argparse.SUPPRESS)  # in the process of PFLlib: its options, as JSON
    args = parser.parse_args(arguments)
    if args.theirs is not None:
        run_pfllib(args.checkout, json.loads(args.theirs))
        return
    if not (args.checkout / "system" / "main.py").is_file():
        parser.error(f"{args.checkout} is no checkout of PFLlib: it has no system/main.py")
    print("| method | seed | PFLlib last / best | fedtailor last / best |\n|---|---:|---:|---:|")
    records = []
    with tempfile.TemporaryDirectory() as folder:
        write_clients(Path(folder) / "dataset" / NAME)
        for name in args.methods:
            for seed in args.seeds:
                theirs = None if args.only == "ours" else their_curve(args.checkout, Path(folder), name, args.rounds)
                ours = None if args.only == "theirs" else our_curve(Path(folder), name, seed, args.rounds)
                records.append({"method": name, "seed": seed, "pfllib": theirs, "fedtailor": ours})
                print(f"| {name} | {seed} | {figures(theirs)} | {figures(ours)} |", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(records, indent=1))


def figures(curve: list[float] | None) -> str:
    """Last and best, without the round before training."""
    return "-" if curve is None else f"{100 * curve[-1]:.1f} / {100 * max(curve):.1f}"


def write_clients(folder: Path) -> None:
    """The clients in PFLlib's format."""
    from fedtailor import data
    from fedtailor.experiments.config import parse

    federated = data.load(parse({"data": DATA}).data, seed=0)
    for kind, rows in (("train", federated.train), ("test", federated.test)):
        (folder / kind).mkdir(parents=True)
        for client in range(len(federated.clients)):
            x, y = rows.of(client)
            content: Any = {"x": x.numpy().astype(np.float32), "y": y.numpy()}
            np.savez_compressed(folder / kind / f"{client}.npz", data=content)


def our_curve(folder: Path, name: str, seed: int, rounds: int) -> list[float]:
    """Accuracy over all test images after each round."""
    from fedtailor.experiments import runner
    from fedtailor.experiments.config import parse

    tables = {
        "rounds": rounds,
        "seed": seed,
        "data": {"source": "pfllib", "path": str(folder / "dataset" / NAME), "val": 0.0},
        "model": {"name": "mlp", "hidden": [100]},
        "local": {"lr": LR, "batch_size": BATCH},
        "evaluation": {"test_curve": True},
        "algorithm": {"name": name} | METHODS[name][2],
    }
    done = runner.start(parse(tables), folder / "runs" / f"{name}-{seed}-{len(list(folder.glob('runs/*')))}")
    sizes = test_sizes(folder / "dataset" / NAME)
    return [float(np.average(line["test"]["accuracy"], weights=sizes)) for line in done.metrics() if "test" in line]


def test_sizes(folder: Path) -> list[int]:
    """Test images of each client."""
    from fedtailor import data
    from fedtailor.experiments.config import parse

    loaded = data.load(parse({"data": {"source": "pfllib", "path": str(folder), "val": 0.0}}).data, seed=0)
    return [int(n) for n in loaded.test.sizes]


def their_curve(checkout: Path, folder: Path, name: str, rounds: int) -> list[float]:
    """The same from PFLlib, whose first figure is from before training."""
    theirs, flags, _ = METHODS[name]
    (folder / "system").mkdir(exist_ok=True)
    options = ["-data", NAME, "-m", "DNN", "-algo", theirs, "-gr", str(rounds), "-lbs", str(BATCH), "-lr", str(LR)]
    options += ["-ls", "1", "-nc", "20", "-dev", "cpu", *flags]
    given = json.dumps(options)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), str(checkout.resolve()), "--theirs", given],
        cwd=folder / "system",
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("CURVE ")]
    if not lines:
        raise SystemExit(f"PFLlib, {theirs}: {done.stdout[-800:]}{done.stderr[-1500:]}")
    curve: list[float] = json.loads(lines[-1].removeprefix("CURVE "))
    return curve[1:]


def _anything(name: str) -> type:
    """A class of any name, but for those that Python asks modules for."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


class StandIns:
    """Finds an empty module for packages that PFLlib imports for other methods and data."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        return ModuleSpec(name, self, is_package=True) if package in self.names else None  # type: ignore[arg-type]

    names = (
        "calmsize",
        "torchvision",
        "torchtext",
        "h5py",
        "ujson",
        "cvxpy",
        "cvxopt",
        "opacus",
        "matplotlib",
        "seaborn",
    )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


class _Silent:
    """Reports nothing."""

    def report(self) -> None:
        """Not asked for here."""


def _plain_network() -> type:
    """PFLlib's DNN has a log-softmax in `forward`, which lies between body and head where a method splits the two."""
    from torch import Tensor, nn

    class Dense(nn.Module):
        def __init__(self, inputs: int, hidden: int, num_classes: int) -> None:
            super().__init__()
            self.fc1, self.fc = nn.Linear(inputs, hidden), nn.Linear(hidden, num_classes)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(nn.functional.relu(self.fc1(x.flatten(1))))
            return out

    return Dense


def run_pfllib(checkout: Path, options: list[str]) -> None:
    """What `python main.py OPTIONS` does, up to its results, which are printed."""
    sys.meta_path.append(StandIns())
    sys.path.insert(0, str(checkout / "system"))
    sys.argv = ["main.py", *options]
    program: Any = importlib.import_module("main")
    server: Any = importlib.import_module("flcore.servers.serverbase")
    server.Server.save_results = lambda self: print("CURVE " + json.dumps([float(v) for v in self.rs_test_acc]))
    server.Server.save_global_model = lambda self: None
    program.average_data = lambda **given: None
    program.MemReporter = _Silent
    program.DNN = _plain_network()
    tree = ast.parse((checkout / "system" / "main.py").read_text(encoding="utf-8"))
    begin = next(node for node in tree.body if isinstance(node, ast.If))
    wanted = [node for node in begin.body if "parser" in ast.unparse(node).partition("(")[0]]
    wanted += [node for node in begin.body if "parse_args" in ast.unparse(node)]
    scope: dict[str, Any] = {"argparse": argparse}
    exec(compile(ast.Module(wanted, []), "main.py", "exec"), scope)  # noqa: S102 - the checkout's own options
    program.run(scope["args"])


if __name__ == "__main__":
    main()
