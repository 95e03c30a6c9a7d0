"""What make test leaves out is run by CI, and names tests and algorithms that there are."""

from pathlib import Path

from fedtailor.algorithms import algorithms
from tests.thorough import FEW, PRODUCTS, PROGRAMS

ROOT = Path(__file__).resolve().parents[2]


def test_listed_tests_and_algorithms_exist() -> None:
    for name in (*PRODUCTS, *PROGRAMS):
        file, _, test = name.partition("::")
        assert f"def {test}" in (ROOT / file).read_text(encoding="utf-8"), name
    assert set(FEW) <= set(algorithms())


def test_ci_runs_both_halves() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "-m 'not thorough'" in makefile
    assert "-m thorough" in makefile
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert {"make test", "make test-thorough"} <= set(lines)
