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


OTHER_CASES = [(a, c) for a in VARIANTS for c in CASES if is_tried(a, c) and c != contract.usual_case(VARIANTS[a])]


@pytest.mark.parametrize("engine", ENGINES)
@every_algorithm
def test_the_usual_case(algorithm: str, engine: str) -> None:
    """One run on an engine shows several promises; many epochs are those of this case."""
    subject = (BRIEF if VARIANTS[algorithm].settles else VARIANTS)[algorithm]
    case = contract.usual_case(subject)
    if engine == "loop":
        contract.something_is_learned(subject, case)  # else equal results could be the results of nothing happening
    else:
        contract.engines_agree(subject, case, engine)
    if engine in engines_of(algorithm):
        contract.saved_states_continue(subject, engine)
    if engine == "wire":
        contract.only_declared_crosses(subject)
    if engine in ("loop", "vmap2"):
        contract.order_is_irrelevant(BRIEF[algorithm], engine)


@pytest.mark.parametrize(("algorithm", "case"), OTHER_CASES)
def test_engines_agree_and_learn(algorithm: str, case: str) -> None:
    subject = BRIEFEST[algorithm]
    contract.something_is_learned(subject, case)
    for engine in contract.engines_for(subject, case):
        contract.engines_agree(subject, case, engine)


@pytest.mark.parametrize(("algorithm", "engine"), [(a, engine) for a in VARIANTS for engine in engines_of(a)])
def test_absent_clients(algorithm: str, engine: str) -> None:
    contract.absent_clients_are_untouched(BRIEF[algorithm], engine)
    if not contract.part_is_promised(VARIANTS[algorithm]):
        contract.a_part_is_a_federation(BRIEF[algorithm], engine)
