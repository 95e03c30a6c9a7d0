"""For authors of algorithms: does mine keep what every algorithm promises?

    from fedtailor.testing import check_algorithm

    def test_mine():
        check_algorithm(Mine())

The same on the command line: fedtailor check my.module:Mine
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from fedtailor.core.algorithm import Algorithm
from fedtailor.engines import machine
from fedtailor.errors import ConfigError
from fedtailor.testing import contract
from fedtailor.testing.contract import CASES, BrokenPromise
from fedtailor.testing.federations import ENGINES, make_data, make_model, suits, usual

__all__ = ["BrokenPromise", "Finding", "check_algorithm", "make_data", "make_model"]

Verdict = Literal["holds", "broken", "not promised"]


@dataclass(frozen=True)
class Finding:
    """One promise, where it was tried, and how that went."""

    promise: str
    where: str
    verdict: Verdict
    words: str = ""


def check_algorithm(
    algorithm: Algorithm | type[Algorithm],
    *,
    raises: bool = True,
    progress: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """Try every promise on small federations with every engine; seconds, no data needed.

    Raises `BrokenPromise` with all that is broken, in words; `raises=False` returns the findings instead.
    """
    subject = algorithm() if isinstance(algorithm, type) else algorithm
    try:
        usual(subject)
    except StopIteration:
        raise ConfigError(
            f"{_title(subject)}: its check() refuses each of a small MLP for classification, "
            "a linear model for regression and an MLP with BatchNorm; one of them must pass"
        ) from None
    findings = []
    with machine.training_settings(threads=1):
        for promise, where, reason, attempt in _attempts(subject):
            finding = Finding(promise, where, "not promised", reason) if reason else _try(promise, where, attempt)
            findings.append(finding)
            progress(finding)
    contract.reference.cache_clear()
    broken = [f"- {f.promise} ({f.where}): {f.words}" for f in findings if f.verdict == "broken"]
    if broken and raises:
        raise BrokenPromise(f"{_title(subject)} breaks {len(broken)} of {len(findings)} checks:\n" + "\n".join(broken))
    return findings


def _attempts(algorithm: Algorithm) -> Iterator[tuple[str, str, str, Callable[[], None]]]:
    """Promise, where, why it is not made if it is not, and the attempt."""
    absent = contract.part_is_promised(algorithm)
    yield "only what is declared crosses", "wire", "", partial(contract.only_declared_crosses, algorithm)
    for case in CASES:
        refused = "" if suits(algorithm, CASES[case]) else "its check() refuses this model or task"
        yield "something is learned", case, refused, partial(contract.something_is_learned, algorithm, case)
        for engine in contract.engines_for(algorithm, case):
            where = f"{case}, {engine}"
            yield "engines agree", where, refused, partial(contract.engines_agree, algorithm, case, engine)
    yield "pool is loop, bit for bit", "pool", "", partial(contract.pool_is_loop, algorithm)
    for engine in ("loop", "vmap2"):
        yield "order of clients is irrelevant", engine, "", partial(contract.order_is_irrelevant, algorithm, engine)
    for engine in ENGINES:
        yield (
            "absent clients are untouched",
            engine,
            "",
            partial(contract.absent_clients_are_untouched, algorithm, engine),
        )
        yield "a part is a federation", engine, absent, partial(contract.a_part_is_a_federation, algorithm, engine)
        yield "saved states continue", engine, "", partial(contract.saved_states_continue, algorithm, engine)
    for name, buffers in contract.reductions(algorithm):
        where = f"{name}, {buffers} statistics" if buffers else name
        yield "a special case is the other method", where, "", partial(contract.is_the_other, algorithm, name, buffers)
    yield "newcomers are served", "loop", "", partial(contract.newcomers_are_served, algorithm)


def _try(promise: str, where: str, attempt: Callable[[], None]) -> Finding:
    try:
        attempt()
    except BrokenPromise as broken:
        return Finding(promise, where, "broken", str(broken))
    except Exception as error:  # of the method under test, whatever it is
        text = (str(error).strip().splitlines() or [""])[0]
        case = CASES.get(where.partition(",")[0], {})
        return Finding(promise, where, "broken", f"{type(error).__name__}: {text}{_unsuited(case)}")
    return Finding(promise, where, "holds")


def _unsuited(case: contract.Case) -> str:
    """What to define if a method is not meant for the task or model of a case."""
    words = []
    if "task" in case:
        words.append(f'if task != "classification" (here it is "{case["task"]}")')
    if "model" in case:
        words.append("for a model that it does not support")
    if not words:
        return ""
    return f". If the method is not meant for this: check(self, model, task) raises a ConfigError {' or '.join(words)}"


def _title(algorithm: Algorithm) -> str:
    return algorithm.title or type(algorithm).__name__
