"""An algorithm in one file: Reptile (Nichol, Achiam, Schulman, 2018) as a federation.

The server moves only a part of the way to the clients' mean, and every client fine-tunes for itself.

python examples/own_algorithm.py [ROUNDS]
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedtailor.algorithms import register
from fedtailor.core.algorithm import MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import new_path


@register
@dataclass(frozen=True)
class Reptile(Algorithm):
    """A start from which few steps lead every client to a good model of its own."""

    epochs: int = 2
    """Local epochs per round."""
    step: float = 0.5
    """Part of the way to the mean; 1 is FedAvg with equal weights, fine-tuned."""

    title: ClassVar[str] = "Reptile"
    private: ClassVar[str] = "the fine-tuned model"

    def server_init(self, model: Model) -> Params:
        return model.params

    @on_client(sends=MODEL)
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return me.state, me.sgd(w, epochs=self.epochs)

    def round(self, fed: Federation, w: Params) -> Params:
        mean = fed.mean(fed.map(self.local, w))
        return {k: w[k] + self.step * (mean[k] - w[k]) for k in w}

    def personal(self, me: ClientContext, w: Params) -> Params:
        return me.sgd(w, epochs=self.epochs)


rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
task = {"rounds": rounds, "data": {"source": "digits", "alpha": 0.3}, "local": {"lr": 0.1}}
for options in ({"name": "local"}, {"name": "fedavg"}, {"name": "reptile", "step": 0.5}):
    run = runner.start(parse(task | {"algorithm": options}), new_path(Path("runs"), f"own-{options['name']}"))
    print(f"{options['name']:8} {run.results['last']['test']['accuracy']['mean']:.3f}")
