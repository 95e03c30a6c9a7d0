"""What FedSelect keeps: how much of each layer is a client's own, and whose choices are alike.

python examples/fedselect_masks.py [ROUNDS]
"""

import sys
from pathlib import Path

from safetensors.torch import load_file

from fedtailor.experiments import runner
from fedtailor.experiments.building import build_experiment
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import new_path
from fedtailor.studies.explain import SHARES, explain

config = parse(
    {
        "rounds": int(sys.argv[1]) if len(sys.argv) > 1 else 15,
        "data": {"source": "digits", "clients": 5, "partition": "classes", "classes_per_client": 2},
        "model": {"name": "mlp", "hidden": [32]},
        "local": {"lr": 0.1},
        "algorithm": {"name": "fedselect", "alpha": 0.5},
    }
)
run = runner.start(config, new_path(Path("runs"), "fedselect-masks"))
layers, shares, _ = explain(run.path)
data = build_experiment(config).data

print("own entries, by layer")
for number, (client, row) in enumerate(shares.items()):
    classes = sorted({int(label) for label in data.train.of(number)[1]})
    print(f"{client} with digits {classes}:", ", ".join(f"{layer} {1 - row[layer]:.0%}" for layer in layers))

print("overlap of the own entries of every two clients (1 is the same choice), by layer")
for name, table in load_file(run.path / SHARES).items():
    if name.startswith("overlap/"):
        print(name.removeprefix("overlap/"))
        print("\n".join(" ".join(f"{value:.2f}" for value in row) for row in table.tolist()))

first, last = run.metrics()[0], run.metrics()[-1]
print(f"bytes up in the first round: {first['up']}, on average: {last['up'] // last['round']}")
