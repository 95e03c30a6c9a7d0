"""Adapters of MiniLM on CLINC150: who keeps what, accuracy and bytes

FEDTAILOR_DATA=... python benchmarks/adapters.py [--runs runs/adapters] [--seeds 0 1] [--finished]

Seeds are the outer loop. A run that was interrupted is resumed, a finished one is not run again; with --finished, only
finished runs are in the table and nothing is run.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.leaderboard import finished  # noqa: E402
from fedtailor import algorithms  # noqa: E402
from fedtailor.core.data import FederatedData  # noqa: E402
from fedtailor.experiments.building import load, model_of  # noqa: E402
from fedtailor.experiments.config import RunConfig, parse  # noqa: E402
from fedtailor.experiments.store import RESULTS, RunFolder  # noqa: E402

METHODS: dict[str, dict[str, Any]] = {
    "local": {},
    "fedavg": {},
    "fedsa-lora": {},
    "feddpa": {},
    "fedalt": {},
    "learn2pfed-net": {"algorithm": {"epochs": 1}},
}
SMALL = {"max_samples": 40, "test": 0.4, "val": 0.1}
ADAPTER = {"rank": 4, "targets": ["*.layer.[45].*.query", "*.layer.[45].*.value"]}  # the last two of six layers


def configured(name: str, seed: int) -> RunConfig:
    """One method; what is not set here is as in the example."""
    from minilm_adapters import TASK

    own = METHODS[name]
    return parse(
        TASK
        | {"rounds": 3, "seed": seed, "evaluation": {"every": 3}}
        | {"data": TASK["data"] | SMALL, "model": TASK["model"] | {"adapter": ADAPTER}}
        | {"algorithm": {"name": name} | own.get("algorithm", {})}
    )


def row(name: str, folders: list[RunFolder]) -> str:
    """Mean over clients and seeds of the test accuracy, its spread over seeds, and bytes."""
    results = [folder.results for folder in folders]
    each = [100 * r["last"]["test"]["accuracy"]["mean"] for r in results if r is not None]
    rounds, clients = folders[0].config.rounds, len(folders[0].about["clients"])
    up, down = (mean(r["traffic"][way] for r in results if r is not None) / rounds / clients for way in ("up", "down"))
    seeds = " / ".join(f"{v:.1f}" for v in each)
    return f"| {algorithms.find(name).title} | {mean(each):.1f} | {seeds} | {up:,.0f} | {down:,.0f} |"


def untrained(seed: int) -> float:
    """Mean over clients of the test accuracy in percent before any round."""
    config = configured("local", seed)
    data = load(config)
    model = model_of(config, data.shape, data.outputs)
    with torch.no_grad():
        tests = [data.test.of(i) for i in range(len(data.clients))]
        each = [float((model(model.params, x).argmax(1) == y).double().mean()) for x, y in tests]
    return 100 * mean(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/adapters"))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--only", nargs="*", default=list(METHODS))
    parser.add_argument("--finished", action="store_true")
    asked = parser.parse_args()
    done: dict[str, list[RunFolder]] = {name: [] for name in asked.only}
    loaded: dict[int, FederatedData] = {}
    for seed in asked.seeds:
        for name in asked.only:
            folder = asked.runs / f"{name}-seed{seed}"
            if asked.finished and not (folder / RESULTS).exists():
                continue
            if not (folder / RESULTS).exists() and seed not in loaded:
                loaded[seed] = load(configured(name, seed))
            run = RunFolder(folder) if asked.finished else finished(configured(name, seed), folder, loaded.get(seed))
            done[name].append(run)
            print(row(name, done[name]), file=sys.stderr, flush=True)
    print("| method | accuracy, % | by seed | bytes up per client and round | bytes down |")
    print("|---|---:|---:|---:|---:|")
    before = [untrained(seed) for seed in asked.seeds]
    print(f"| no training | {mean(before):.1f} | {' / '.join(f'{v:.1f}' for v in before)} | 0 | 0 |")
    for name, runs in done.items():
        if runs:
            print(row(name, runs))


if __name__ == "__main__":
    main()
