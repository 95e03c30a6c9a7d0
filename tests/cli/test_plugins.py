"""Algorithms and models of the user's own, by module:Class, from the current folder."""

from pathlib import Path

from tests.cli.conftest import Call

OWN = """
from dataclasses import dataclass

from fedtailor.algorithms.local import Local
from fedtailor.core.algorithm import Algorithm


@dataclass(frozen=True)
class Mine(Algorithm):
    epochs: int = 1
    client_init, local, round, personal = Local.client_init, Local.local, Local.round, Local.personal


not_one = 3
"""


def test_own_algorithm_on_the_command_line(call: Call) -> None:
    Path("own_algorithm_for_a_test.py").write_text(OWN)
    code, out, err = call("run", "small.toml", "--set", "algorithm.name=own_algorithm_for_a_test:Mine", "--out", "a")
    assert (code, err) == (0, "")
    assert "own_algorithm_for_a_test:Mine" in out
    for name, message in (
        ("own_algorithm_for_a_test:Nobody", 'cannot import "own_algorithm_for_a_test:Nobody"'),
        ("own_algorithm_for_a_test:not_one", '"own_algorithm_for_a_test:not_one" is not an Algorithm'),
        ("no_such_module_at_all:X", 'cannot import "no_such_module_at_all:X"'),
    ):
        code, _, err = call("run", "small.toml", "--set", f"algorithm.name={name}", "--out", "b")
        assert code == 2
        assert err.startswith(f"error: algorithm.name: {message}")
