"""Settings of the whole test run: one thread, the same examples every time, real data where it is at hand."""

import os
import tempfile
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the programs that tests start, too: two tests run side by side
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read as torch is loaded: threads that wait leave others the core

import pytest
import torch
from hypothesis import settings

from tests.skip_list import KEPT, reason_of, summary
from tests.thorough import is_thorough

torch.set_num_threads(1)  # tensors here are tiny; threads only cost, and tests run side by side
HOME = tempfile.TemporaryDirectory()
os.environ["XDG_CONFIG_HOME"] = HOME.name  # what tests run is not what the developer trusts
settings.register_profile("same-every-time", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("same-every-time")


@pytest.fixture(autouse=True, scope="session")
def without_fsync() -> Iterator[None]:
    """Files of a test outlive its process, not the machine: waiting for the disk would be half of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `data` read the real data sets; they run wherever FEDTAILOR_DATA names the folder, as in CI."""
    for item in items:
        if is_thorough(item):
            item.add_marker("thorough")
    if "FEDTAILOR_DATA" not in os.environ:
        for item in items:
            if item.get_closest_marker("data"):
                item.add_marker(pytest.mark.skip(reason="needs the real data under FEDTAILOR_DATA"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skip for a reason that is not on the list fails the run: nothing goes missing unseen."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    _, wrong = summary([reason_of(report) for report in reporter.stats.get("skipped", [])])
    if wrong and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests were skipped, and why."""
    lines, wrong = summary([reason_of(report) for report in terminalreporter.stats.get("skipped", [])])
    terminalreporter.write_line("\n".join(lines))
    if wrong:
        terminalreporter.write_line(f"skipped for reasons that are not in {KEPT.name}: {wrong}", red=True)
