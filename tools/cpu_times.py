"""Processor seconds of tests, those of the processes they start included: make test-times TESTS=tests/contract

Unlike seconds on the clock they hardly depend on what else the machine does. A fixture counts for the first test that
asks for it; processes that a test leaves to others are not seen.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator

import pytest

SHOWN = 40
SPENT: defaultdict[str, float] = defaultdict(float)


def spent() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test with its fixtures."""
    before = spent()
    try:
        return (yield)
    finally:
        SPENT[item.nodeid] += spent() - before


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """By file, and by test over all its cases."""
    for title, end in (("file", "::"), ("test", "[")):
        sums: defaultdict[str, float] = defaultdict(float)
        for name, seconds in SPENT.items():
            sums[name.partition(end)[0]] += seconds
        terminalreporter.write_line(f"\nprocessor seconds by {title}, {sum(sums.values()):.0f} in all")
        for name, seconds in sorted(sums.items(), key=lambda pair: -pair[1])[:SHOWN]:
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")
