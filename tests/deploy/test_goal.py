"""Rounds that close before the slowest site has answered."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from fedtailor.errors import ConfigError
from fedtailor.experiments import runner
from tests.deploy.sites import on_loop
from tests.deploy.test_flare import Federated, configured
from tests.helpers import assert_equal
from tests.small import config


def test_a_round_closes_at_its_goal_and_the_late_site_comes_back(tmp_path: Path) -> None:
    """The slow site answers once the round is over, and takes part in the next ones, from the state it kept."""
    federated = Federated(tmp_path, configured("fedrep", "federation.goal=3", "rounds=4"))
    slow, is_over, came_late = federated.names[0], threading.Event(), []

    def before(site: str, header: dict[str, Any]) -> None:
        if site == slow and "function" in header and header["round"] == 1:
            assert is_over.wait(30)
            came_late.append(header["round"])

    federated.link.before = before
    folder = federated.run(lambda progress: is_over.set())
    missed = {line["round"]: {fault["client"] for fault in line.get("faults", [])} for line in folder.metrics()}
    assert missed[1] == {slow}
    assert "is late: 3 replies close the round" in str(folder.metrics()[0]["faults"])
    assert came_late == [1]
    assert_equal(federated.tensors(), on_loop(configured("fedrep", "rounds=4"), missed), 1e-6)


def test_a_goal_needs_sites_and_goes_with_what_they_can(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"federation\.goal: for a federation of sites"):
        runner.start(config("federation.goal=2"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"federation\.goal: not with secure sums"):
        Federated(tmp_path, configured("fedavg", "federation.goal=2", "federation.min_replies=3")).run()
