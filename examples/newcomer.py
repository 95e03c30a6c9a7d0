"""A fifth of the clients takes no part in training. How well does each method serve them when they come?

python examples/newcomer.py [ROUNDS]
"""

import sys
from pathlib import Path

from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import new_path

task = {
    "rounds": int(sys.argv[1]) if len(sys.argv) > 1 else 20,
    "data": {"source": "digits", "clients": 10, "alpha": 0.3},
    "model": {"name": "mlp", "hidden": [32]},
    "local": {"lr": 0.1},
    "evaluation": {"unseen": 0.2, "unseen_epochs": 5},
}
folder = new_path(Path("runs"), "newcomers")
print(f"{'':10} {'trained':>8} {'newcomers':>10}")
for name in ("local", "fedavg", "fedavg+ft", "fedrep"):
    run = runner.start(parse(task | {"algorithm": {"name": name}}), folder / name)
    trained, unseen = (run.results[kind]["test"]["accuracy"]["mean"] for kind in ("last", "unseen"))
    print(f"{name:10} {trained:8.3f} {unseen:10.3f}")
print("newcomers:", ", ".join(run.results["unseen"]["names"]))
