"""Four ways to train ten clients whose digits differ, from Python: who gains, and who is hurt.

python examples/compare_four.py [ROUNDS]
"""

import sys
from pathlib import Path

from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import new_path
from fedtailor.metrics.summary import share_hurt

rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
task = {
    "rounds": rounds,
    "data": {"source": "digits", "clients": 10, "alpha": 0.3},
    "model": {"name": "mlp", "hidden": [32]},
    "local": {"lr": 0.1},
}
folder = new_path(Path("runs"), "compare-four")
accuracies = {}
for name in ("local", "fedavg", "fedrep", "ditto"):
    run = runner.start(parse(task | {"algorithm": {"name": name}}), folder / name)
    accuracies[name] = run.results["last"]["clients"]["accuracy"]

print(f"{'':8} {'mean':>6} {'worst':>6} {'hurt':>6}")
for name, values in accuracies.items():
    hurt = share_hurt(values, accuracies["local"], higher_is_better=True)
    print(f"{name:8} {sum(values) / len(values):6.3f} {min(values):6.3f} {hurt:6.0%}")
