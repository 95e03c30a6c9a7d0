"""Rounds that close before the slowest site has answered."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor.core import codec
from fedtailor.errors import ConfigError
from fedtailor.experiments import runner
from fedtailor.flare.protocol import ENVELOPE, PING
from tests.flare.sites import on_loop
from tests.flare.test_flare import Federated, configured
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
    with pytest.raises(ConfigError, match=r"federation\.goal: .*sites"):
        runner.start(config("federation.goal=2"), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"federation\.goal: .* secure sums"):
        Federated(tmp_path, configured("fedavg", "federation.goal=2", "federation.min_replies=3")).run()


def test_late_replies_count_in_a_later_round(tmp_path: Path) -> None:
    """What the server sent and got, read off the link, gives its models by hand; the slow site keeps its late state."""
    federated = Federated(tmp_path, configured("fedrep", "federation.goal=3", "federation.late=buffer", "rounds=5"))
    slow, is_over, has_come = federated.names[0], threading.Event(), threading.Event()
    went_on_from: list[int] = []

    def before(site: str, header: dict[str, Any]) -> None:
        if site == slow and "function" in header and header["round"] == 1:
            assert is_over.wait(30)

    def after(site: str, header: dict[str, Any]) -> None:
        if site == slow and "function" in header:
            has_come.set()
        if site == slow and header.get("op") == "begin" and (job := federated.link.services[slow]._job):
            went_on_from.append(job.at)

    def told(progress: Any) -> None:
        is_over.set()
        assert has_come.wait(30)

    federated.link.before, federated.link.after = before, after
    folder = federated.run(told)
    sent: dict[int, Any] = {}
    replies: dict[int, dict[str, Any]] = {}
    for site, request, reply in federated.link.seen:
        if ENVELOPE.unpack_from(request)[1] == PING:
            continue
        header, message = codec.decode(request[ENVELOPE.size :])
        if "function" in header:
            sent[header["round"]] = message[0]
            replies.setdefault(header["round"], {})[site] = codec.decode(reply)[1]
    counted = set()
    for line in folder.metrics()[:-1]:
        round, late = line["round"], line.get("late", {})
        missing = {fault["client"] for fault in line.get("faults", [])}
        parts = {site: reply for site, reply in replies[round].items() if site not in missing}
        for site, by in late.items():  # who is not asked again in that round
            assert site not in replies[round]
            body, count = replies[round - by][site]
            moved = {k: sent[round][k] + (1 + by) ** -0.5 * (v - sent[round - by][k]) for k, v in body.items()}
            parts[site] = (moved, count)
            counted.add((site, round - by))
        samples = sum(n for _, n in parts.values())
        for k, next_one in sent[round + 1].items():
            mean = sum(n * body[k] for body, n in parts.values()) / samples
            torch.testing.assert_close(next_one, mean)
    assert (slow, 1) in counted
    assert went_on_from[:2] == [0, 1]  # the private state after its late round


@pytest.mark.parametrize("algorithm", ["learn2pfed-net", "pfedhn", "scaffold"])
def test_what_cannot_be_moved_to_a_later_model_is_refused(algorithm: str, tmp_path: Path) -> None:
    given = configured(algorithm, "federation.goal=3", "federation.late=buffer")
    with pytest.raises(ConfigError, match=r'federation\.late = "buffer": '):
        Federated(tmp_path, given).run()


def test_a_buffer_needs_a_goal(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set federation\.goal"):
        Federated(tmp_path, configured("fedavg", "federation.late=buffer")).run()
