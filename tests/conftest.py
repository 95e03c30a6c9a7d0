"""Settings of the whole test run: one thread, the same examples every time, real data where it is at hand."""

import os
import tempfile

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # tensors here are tiny; threads only cost, and tests run side by side
HOME = tempfile.TemporaryDirectory()
os.environ["XDG_CONFIG_HOME"] = HOME.name  # what tests run is not what the developer trusts
settings.register_profile("same-every-time", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("same-every-time")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `data` read the real data sets; they run wherever FEDTAILOR_DATA names the folder, as in CI."""
    if "FEDTAILOR_DATA" not in os.environ:
        for item in items:
            if item.get_closest_marker("data"):
                item.add_marker(pytest.mark.skip(reason="needs the real data under FEDTAILOR_DATA"))
