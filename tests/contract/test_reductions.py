"""Special cases that are another method: every algorithm is what its `equals` says, to ten digits."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from fedtailor import COUNT, MODEL, Algorithm, ClientContext, Federation, Model, Params, Tree, algorithms, on_client
from fedtailor.testing import BrokenPromise, contract
from tests.helpers import brief

KINDS = {name: brief(kind()) for name, kind in algorithms.algorithms().items()}
REDUCTIONS = [(a, *reduction) for a, kind in KINDS.items() for reduction in contract.reductions(kind)]


@pytest.mark.parametrize(("algorithm", "name", "buffers"), REDUCTIONS)
def test_a_special_case_is_the_other_method(algorithm: str, name: str, buffers: str) -> None:
    contract.is_the_other(KINDS[algorithm], name, buffers)


@dataclass(frozen=True)
class Shrinks(Algorithm):
    """FedAvg whose clients shrink what they send."""

    by: float = 0.1
    equals: ClassVar[dict[str, tuple[Any, ...]]] = {
        "by = 0": ({"by": 0.0}, "fedavg", {}),
        "by = 0.2": ({"by": 0.2}, "fedavg", {}),
        "no option": ({"by": 0.0}, "fedavg", {}, "half-batch"),
    }

    def server_init(self, model: Model) -> Params:
        return model.params

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return me.state, ({k: (1 - self.by) * v for k, v in me.sgd(w).items()}, me.n)

    def round(self, fed: Federation, w: Params) -> Params:
        return fed.mean(*fed.map(self.local, w))

    def personal(self, me: ClientContext, w: Params) -> Params:
        return w


@dataclass(frozen=True)
class ShrinksNothing(Shrinks):
    """Its option does nothing."""

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return me.state, (me.sgd(w), me.n)


def test_a_special_case_that_is_another_is_broken() -> None:
    contract.is_the_other(Shrinks(), "by = 0")
    with pytest.raises(BrokenPromise, match=r"by = 0\.2: .* FedAvg"):
        contract.is_the_other(Shrinks(), "by = 0.2")
    with pytest.raises(BrokenPromise, match="half-batch"):
        contract.is_the_other(Shrinks(), "no option")
    with pytest.raises(BrokenPromise, match="without these options"):
        contract.is_the_other(ShrinksNothing(), "by = 0")
