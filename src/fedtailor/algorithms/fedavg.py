"""FedAvg: one model for all. McMahan et al., AISTATS 2017, Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Every client trains the common model; the server averages the results by sample count."""

    epochs: int = 1
    """Local epochs per round."""

    title: ClassVar[str] = "FedAvg"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "nothing"
    stale: ClassVar[bool] = True
    citation: ClassVar[str] = """@inproceedings{mcmahan2017communication,
  title={Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author={McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and {Ag\\"uera y Arcas}, Blaise},
  booktitle={AISTATS}, year={2017}
}"""

    def server_init(self, model: Model) -> Params:
        return model.params

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return {}, (me.sgd(w, epochs=self.epochs), me.n)

    def round(self, fed: Federation, w: Params) -> Params:
        models, n = fed.map(self.local, w)
        return fed.mean(models, n, stale=w)

    def personal(self, me: ClientContext, w: Params) -> Params:
        return w
