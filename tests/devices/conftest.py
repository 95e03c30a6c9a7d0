"""The second device for all tests here; where there is no compiler, they are skipped.

They are run by tests/engines/test_devices.py in processes of their own: torch counts the devices of a process when the
first gradient is computed in it, and `auto` would take this one for all other tests.
"""

import os

import pytest

from tests.devices import sim

collect_ignore_glob = [] if os.environ.get("FEDTAILOR_SECOND_DEVICE") else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def second_device() -> None:
    if sim.compiler() is None:
        pytest.skip("no C++ compiler: the second device cannot be made")
    sim.load()
