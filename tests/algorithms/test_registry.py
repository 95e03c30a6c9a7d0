"""Algorithms by name: what is found, and what is said when it is not."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest
import torch

import fedtailor.algorithms as registry
from fedtailor.algorithms import algorithms, make, register
from fedtailor.algorithms.fedrep import FedRep
from fedtailor.core.algorithm import (
    BODY,
    COUNT,
    LEARNS,
    Algorithm,
    client_functions,
    on_client,
    reply_example,
    reply_names,
    reply_positive,
)
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Tree
from fedtailor.errors import ConfigError
from tests.helpers import SIZES, brief, federate, make_data, make_model, models, run, usual

OURS = [name for name, kind in algorithms().items() if kind.__module__.startswith("fedtailor.")]


def test_names() -> None:
    known = algorithms()
    assert {"ditto", "fedavg", "fedavg+ft", "fedper", "fedprox", "fedprox+ft", "fedrep", "local"} <= set(known)
    assert list(known) == sorted(known)
    assert known["fedrep"] is FedRep
    assert Algorithm not in known.values()


@pytest.mark.parametrize("name", algorithms())
def test_every_algorithm_is_described(name: str) -> None:
    kind = algorithms()[name]
    assert kind.title.lower() == name
    assert kind.__doc__
    assert kind.private
    assert not {*kind.__mro__[1:]} & {*algorithms().values()}  # abstract or final, never a kind of another
    assert client_functions(kind)
    assert name in ("local", "tailor") or kind.citation.startswith("@")  # of no paper
    assert make(name, {}) == kind()
    assert all(f.default is getattr(kind(), f.name) for f in fields(kind))


def test_make() -> None:
    assert make("FedRep", {"head_epochs": 3}) == FedRep(head_epochs=3)
    with pytest.raises(AttributeError):
        make("fedrep", {}).head_epochs = 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("fedrap", {}, r'algorithm\.name: no algorithm "fedrap"; did you mean "fedrep"\?'),
        ("zzz", {}, r'algorithm\.name: no algorithm "zzz"; known: .*cfl, .*ditto, '),
        ("fedrep", {"head_epohcs": 3}, r'algorithm\.head_epohcs: FedRep has no option .*mean "head_epochs"\?'),
        ("fedrep", {"title": "x"}, r'algorithm\.title: FedRep has no option "title"'),
        ("fedrep", {"head_epochs": "many"}, r"algorithm\.head_epochs: 'many': .*integer"),
        ("fedrep", {"head_epochs": 1.5}, r"algorithm\.head_epochs: 1\.5: .*integer"),
        ("fedprox", {"mu": "big"}, r"algorithm\.mu: 'big': .*number"),
        ("fedprox", {"mu": None}, r"algorithm\.mu: None: "),
    ],
)
def test_mistakes_name_the_key(name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(name, options)


@pytest.mark.parametrize(
    ("name", "options"), [("fedavg", {"epochs": "3"}), ("fedavg", {"epochs": 3.0}), ("fedprox", {"mu": "3"})]
)
def test_a_value_is_of_its_type_or_refused(name: str, options: dict[str, object]) -> None:
    ((key, _),) = options.items()
    try:
        found = getattr(make(name, options), key)
    except ConfigError:
        return
    assert found == 3
    assert type(found) is type(getattr(algorithms()[name](), key))


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})

    @register
    @dataclass(frozen=True)
    class Mine(Algorithm):
        """Found by its title."""

        weight: float = 1.0
        title: ClassVar[str] = "My Own"

        @on_client(sends=(BODY, COUNT))
        def local(self, me: ClientContext, body: Tree) -> tuple[Tree, Tree]:
            return {}, (body, me.n)

        @on_client()
        def other(self, me: ClientContext) -> tuple[Tree, Tree]:
            return {}, None

        def round(self, fed: Federation, server: Tree) -> Tree:
            return server

    assert make("my own", {"weight": 2.0}) == Mine(weight=2.0)
    assert set(client_functions(Mine)) == {"local", "other"}
    assert reply_names(Mine) == ["body", "sample count"]
    model = make_model("mlp", make_data())
    body, count = reply_example(Mine(), "local", model)
    assert set(body) == set(model.body)
    assert count.shape == ()
    assert reply_example(Mine(), "other", model) is None
    assert reply_positive(Mine(), "local") == ["1"]
    assert reply_positive(Mine(), "other") == []


OPTIONS: dict[str, dict[str, Any]] = {
    "jointls": {"personal_features": (0,)},
    "empiricalbayes": {"hierarchical": False},  # these clients differ by chance alone, which it would find
}


def own_parts(name: str) -> dict[str, set[str]]:
    """Names of tensors of the clients' personal models after training: "own" differ between clients, "same" do not."""
    algorithm = brief(make(name, OPTIONS.get(name, {})))
    case = usual(algorithm)
    data = make_data(case.get("task", "classification"), sizes=case.get("sizes", SIZES))
    model = make_model(case.get("model", "mlp"), data, "mean")
    fed = federate(algorithm, data, model)
    mine = [m for c, m in models(fed, run(fed)).items() if c in ("ada", "di")]
    own = {k for k in mine[0] if not torch.equal(mine[0][k], mine[1][k])}
    half = {k for k in own if bool((mine[0][k] == mine[1][k]).any())}
    return {"own": own, "same": mine[0].keys() - own, "half": half, "head": {*model.head}, "body": {*model.body}}


@pytest.mark.parametrize("name", OURS)
def test_what_is_kept_is_what_differs(name: str) -> None:
    """`keeps` is no claim: the personal models of two clients are compared."""
    kind, found = algorithms()[name], own_parts(name)
    own, same = found["own"], found["same"]
    known = found["head"] | found["body"]
    assert kind.learns in LEARNS
    match kind.keeps:
        case "nothing":
            assert not own
        case "head":
            assert own
            assert not own & found["body"]
        case "body":
            assert own == found["body"]
        case "layers" | "entries":
            assert (own and same & known) or found["half"]
        case "features":
            assert not own & known
        case "model" if kind.settles:  # its spread between clients may be estimated as 0
            assert own <= known
        case "model" | "gates":
            assert known <= own
        case _:
            assert kind.keeps == "group"
            assert kind.learns == "groups"


@pytest.mark.parametrize(("old", "new"), [("join", "onboard_init"), ("adapt", "onboard"), ("fits", "onboards_fitted")])
def test_names_of_old_hooks_are_refused(old: str, new: str) -> None:
    with pytest.raises(TypeError, match=f"Mine.{old}: this is called {new} now"):
        type("Mine", (Algorithm,), {old: None})


@pytest.mark.parametrize("name", ["shares", "round", "title"])
def test_an_option_cannot_hide_a_member_of_algorithm(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Mine\.{name}"):
        type("Mine", (Algorithm,), {"__annotations__": {name: "float"}, name: 0.5})
    type("Mine", (Algorithm,), {"__annotations__": {name: "ClassVar[float]"}, name: 0.5})
