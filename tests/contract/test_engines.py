"""Every algorithm keeps its promises on every engine, for every kind of model and local step; traffic included."""

import pytest

from fedtailor.core.algorithm import Algorithm
from fedtailor.testing import contract
from fedtailor.testing.contract import CASES
from tests.helpers import ENGINES, brief, suits, usual, variants

VARIANTS = variants()
BRIEF = {name: brief(algorithm) for name, algorithm in VARIANTS.items()}
BRIEFEST = {name: brief(algorithm, epochs=1) for name, algorithm in VARIANTS.items()}
every_algorithm = pytest.mark.parametrize("algorithm", VARIANTS)
# what is trained on adapters is trained as any parameter: a few show that, beside the methods for adapters alone
ON_ADAPTERS = ("fedavg", "fedper", "learn2pfed-net", "fedselect", *(a for a, kind in VARIANTS.items() if usual(kind)))


def is_tried(name: str, case: str) -> bool:
    """Where a case can show more than another one."""
    kind: Algorithm = VARIANTS[name]
    if case == "adapters" and name not in ON_ADAPTERS:
        return False
    if case == "counts" and usual(kind) != CASES[case] and name not in ("fedavg", "linearalone", "learn2pfed-net"):
        return False
    if case.startswith("linear-one") and usual(kind).get("model") != "linear":  # they have one-client and one-sample
        return False
    return suits(kind, CASES[case])


def engines_of(name: str) -> list[str]:
    """All clients in one stack only where that could differ from two stacks."""
    return [engine for engine in ENGINES if engine != "vmap" or VARIANTS[name].at_once]


every_case = pytest.mark.parametrize(("algorithm", "case"), [(a, c) for a in VARIANTS for c in CASES if is_tried(a, c)])
on_every_engine = pytest.mark.parametrize(
    ("algorithm", "engine"), [(a, engine) for a in VARIANTS for engine in engines_of(a)]
)


@every_case
def test_engines_agree_and_learn(algorithm: str, case: str) -> None:
    is_usual = CASES[case] in ({}, usual(VARIANTS[algorithm]))
    many = BRIEF if VARIANTS[algorithm].settles else VARIANTS
    subject = (many if is_usual else BRIEFEST)[algorithm]  # many epochs are those of the usual case
    contract.something_is_learned(subject, case)  # else equal results could be the results of nothing happening
    for engine in contract.engines_for(subject, case):
        contract.engines_agree(subject, case, engine)


@pytest.mark.parametrize("engine", ["loop", "vmap2"])
@every_algorithm
def test_order_of_clients_is_irrelevant(algorithm: str, engine: str) -> None:
    contract.order_is_irrelevant(BRIEF[algorithm], engine)


@on_every_engine
def test_absent_clients_are_untouched(algorithm: str, engine: str) -> None:
    contract.absent_clients_are_untouched(BRIEF[algorithm], engine)


@pytest.mark.parametrize(
    ("algorithm", "engine"),
    [(a, e) for a, kind in VARIANTS.items() for e in engines_of(a) if not contract.part_is_promised(kind)],
)
def test_a_part_of_the_clients_is_as_a_federation_of_that_part(algorithm: str, engine: str) -> None:
    contract.a_part_is_a_federation(BRIEF[algorithm], engine)


@on_every_engine
def test_saved_states_continue_as_the_straight_run(algorithm: str, engine: str) -> None:
    contract.saved_states_continue(BRIEF[algorithm], engine)
