"""What crosses the wire, and how many bytes of it: exactly what is declared and exactly what is reported."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.core import codec
from fedtailor.core.algorithm import NUMBER, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Tree, items
from fedtailor.engines.wire import Site, Wire
from fedtailor.testing import contract
from tests.helpers import ENGINES, brief, federate, make_data, make_model, run, states, usual, variants

VARIANTS = {name: brief(algorithm) for name, algorithm in variants().items()}
every_algorithm = pytest.mark.parametrize("algorithm", VARIANTS)
Message = tuple[dict[str, Any], Tree]


def federation(algorithm: str, engine: str = "wire") -> Federation:
    case = usual(VARIANTS[algorithm])
    model = case.pop("model", "mlp")
    data = make_data(**case)
    return federate(VARIANTS[algorithm], data, make_model(model, data), engine)


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Message, Message]]:
    """Requests and replies of all sites, decoded from the bytes that went through."""
    seen: list[tuple[Message, Message]] = []
    handle = Site.handle

    def recording(self: Site, request: bytes) -> bytes:
        reply = handle(self, request)
        seen.append((codec.decode(request), codec.decode(reply)))
        return reply

    monkeypatch.setattr(Site, "handle", recording)
    return seen


@every_algorithm
def test_only_what_is_declared_crosses_and_is_counted(algorithm: str) -> None:
    contract.only_declared_crosses(VARIANTS[algorithm])


@pytest.mark.parametrize("algorithm", ["fedper", "fedrep"])
def test_the_head_stays(algorithm: str, messages: list[tuple[Message, Message]]) -> None:
    fed = federation(algorithm)
    head = fed.engine.experiment.model.head
    assert set(head) == {"out.weight", "out.bias"}
    secret = [*head.values(), *(leaf for _, leaf in items(states(fed)))]
    for rounds in range(3):
        fed.run_round(rounds, range(4), fed.engine.experiment.model.body)
        secret += [leaf for _, leaf in items(states(fed))]
    assert len(secret) == 2 + 4 * 4 * 2
    crossed = [part for request, reply in messages for _, tree in (request, reply) for part in items(tree)]
    assert len(crossed) == 3 * 4 * (2 + 3)  # the body down, the body and a count up
    for path, tensor in crossed:
        assert not any(name in path for name in head), path
        assert not any(_within(tensor, s) for s in secret), path


def _within(tensor: Tensor, secret: Tensor) -> bool:
    """Whether any value of the secret is in the tensor."""
    return bool(torch.isin(secret.flatten(), tensor.flatten()).any())


@dataclass(frozen=True)
class Curious(Algorithm):
    """Asks clients for something that is not a client function."""

    def client_init(self, me: ClientContext) -> Tree:
        return {"secret": me.n * torch.ones(2, dtype=me.n.dtype)}

    @on_client(sends=NUMBER)
    def allowed(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, me.n

    def tell(self, me: ClientContext) -> tuple[Tree, Tree]:
        return me.state, me.state["secret"]

    def round(self, fed: Federation, server: Tree) -> Tree:
        fed.map(self.tell)
        return server


@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_that_is_not_for_clients_is_refused(engine: str) -> None:
    data = make_data()
    fed = federate(Curious(), data, make_model("linear", data), engine)
    with pytest.raises(TypeError, match=r"tell .*@on_client"):
        run(fed)


@pytest.mark.parametrize("function", ["tell", "client_init", "round", "__init__", "nothing"])
def test_a_site_refuses_too(function: str) -> None:
    data = make_data()
    fed = federate(Curious(), data, make_model("linear", data), "wire")
    assert isinstance(fed.engine, Wire)
    header = {"function": function, "round": 0, "call": 0, "placed": [], "taped": False}
    answer, reply = codec.decode(fed.engine.sites[0].handle(codec.encode(header, ())))
    assert f"{function} is not a client function of Curious" in answer["error"]
    assert reply is None
    answer, reply = codec.decode(fed.engine.sites[0].handle(codec.encode(header | {"function": "allowed"}, ())))
    assert answer == {"round": 0, "call": 0}
    assert float(reply) == 9
