"""The second device for all tests here; where there is no compiler, they are skipped."""

import pytest

from tests.devices import sim


@pytest.fixture(autouse=True, scope="session")
def device() -> None:
    if sim.compiler() is None:
        pytest.skip("no C++ compiler: the second device cannot be made")
    sim.load()
