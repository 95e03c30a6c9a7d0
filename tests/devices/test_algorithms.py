"""Every algorithm on another device gives the CPU's numbers, and can go on on the other one."""

import pytest
import torch

from fedtailor.core.trees import to_device, tree_map
from fedtailor.testing.contract import tolerance
from tests.contract.test_tape import Taped
from tests.devices.federations import CASES, CPU, federation, play, results
from tests.helpers import assert_equal, brief, states, suits, usual, variants

VARIANTS = {name: brief(algorithm, epochs=1) for name, algorithm in variants().items() if ":" not in name}
MATRIX = ("classification", "regression", "conv", "batchnorm-private", "adam")
TAPED = ("classification", "regression", "conv", "batchnorm-private", "batchnorm-mean", "adam")
every_case = pytest.mark.parametrize(
    ("algorithm", "case"), [(a, c) for a, kind in VARIANTS.items() for c in MATRIX if suits(kind, CASES[c])]
)  # those for linear models only: in the tests of resuming


def case_of(algorithm: str) -> str:
    """The first case that an algorithm can serve."""
    return next(name for name, case in CASES.items() if case == usual(VARIANTS[algorithm]))


@every_case
def test_the_cpu_s_numbers(algorithm: str, case: str) -> None:
    subject = VARIANTS[algorithm]
    fed = federation(subject, case)
    wanted = results(fed, play(fed))
    for engine in ("loop", "vmap2"):
        fed = federation(subject, case, "sim:0", engine)
        assert_equal(results(fed, play(fed)), wanted)


@pytest.mark.parametrize("algorithm", ["ditto", "fedselect", "pfedla"])  # states, ragged replies, a tape
def test_messages_as_bytes_know_no_device(algorithm: str) -> None:
    fed = federation(VARIANTS[algorithm], "classification")
    wanted = results(fed, play(fed))
    there = federation(VARIANTS[algorithm], "classification", "sim:0", "wire")
    assert_equal(results(there, play(there)), wanted)
    assert (there.traffic.up, there.traffic.down) == (fed.traffic.up, fed.traffic.down)


@pytest.mark.parametrize("case", TAPED)
def test_the_cpu_s_gradients(case: str) -> None:
    fed = federation(Taped(), case)
    wanted = play(fed), states(fed)
    for engine in ("loop", "vmap2"):
        fed = federation(Taped(), case, "sim:0", engine)
        found = play(fed), states(fed)
        assert found[0]["gradient"]["lr"].device.type == "sim"
        assert_equal(to_device(found, CPU), wanted)


@pytest.mark.parametrize("algorithm", VARIANTS)
def test_begun_on_one_and_resumed_on_the_other(algorithm: str) -> None:
    subject, case, engine = VARIANTS[algorithm], case_of(algorithm), "vmap2"
    fed = federation(subject, case, engine=engine)
    first = play(fed)
    saved = tree_map(torch.clone, fed.engine.get_states())
    wanted = results(fed, play(fed, first, 1))
    there = federation(subject, case, "sim:0", engine)
    there.engine.set_states(saved)
    assert_equal(results(there, play(there, to_device(first, torch.device("sim:0")), 1)), wanted, tolerance(subject))
    begun = federation(subject, case, "sim:0", engine)
    server = play(begun)
    back = federation(subject, case, engine=engine)
    back.engine.set_states(to_device(begun.engine.get_states(), CPU))
    assert_equal(results(back, play(back, to_device(server, CPU), 1)), wanted, tolerance(subject))
