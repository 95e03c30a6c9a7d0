"""Who took part in a run of sites, in which rounds, and why others did not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedtailor.cli.federation_progress import INCOMPLETE, print_participation
from fedtailor.errors import RetryableError, RunError
from fedtailor.experiments.runner import Listener, Progress
from fedtailor.experiments.store import RunFolder
from fedtailor.flare import server as flare
from fedtailor.flare.audit import read_runs
from fedtailor.flare.participation import SITES, attendance_words, missing, read_sites, rounds_taken, spans
from fedtailor.flare.site import AUDIT, set_participation
from fedtailor.report.run_page import run_page
from tests.flare.sites import Sites, on_loop
from tests.flare.test_flare import Federated, away, configured
from tests.helpers import assert_equal
from tests.small import config


def run(federated: Federated, least: int = 0, listener: Listener | None = None) -> RunFolder:
    """As `submit` does it: with the names of all sites."""
    plain = federated.config.model_copy(update={"data": config("data={source='sites'}").data})
    return flare.coordinate(federated.link, plain, "run", federated.root / "server", listener, federated.names, least)


def states(federated: Federated, site: str) -> list[tuple[int, int, str]]:
    record = read_sites(federated.server.path / SITES)[site]
    return [(first, last, its.state) for first, last, its in spans(record)]


def test_all_took_part(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedrep"))
    run(federated)
    assert {name: states(federated, name) for name in federated.names} == {
        name: [(1, 3, "took part")] for name in federated.names
    }
    assert print_participation(read_sites(federated.server.path / SITES)) == 0


@pytest.mark.parametrize("stage", ["hello", "start", "paused"])
def test_no_run_begins_without_a_named_site(stage: str, tmp_path: Path) -> None:
    """It refuses the algorithm as it is greeted, or what it sends as the run starts, or it is paused."""
    federated = Federated(tmp_path, configured("fedrep"))
    other = federated.names[2]
    if stage == "paused":
        set_participation(tmp_path / "sites" / other / "private", "paused")
    else:
        text = federated.files[other].read_text()
        federated.files[other].write_text(
            text.replace('"fedrep",', "") if stage == "hello" else text.replace('"body",', "")
        )
        federated.link.restart()
    state = "paused" if stage == "paused" else "refused"
    with pytest.raises(RunError, match=rf"4 sites; {other} is {state}.*--least 3") as refused:
        run(federated)
    assert refused.value.code == "run"
    assert states(federated, other) == [(1, 1, state)]
    assert missing(read_sites(federated.server.path / SITES)) == list(federated.names)
    federated.link.restart()
    run(federated, least=3)
    assert states(federated, other) == [(1, 3, state)]
    assert states(federated, federated.names[0]) == [(1, 3, "took part")]
    assert missing(read_sites(federated.server.path / SITES)) == [other]
    assert print_participation(read_sites(federated.server.path / SITES)) == INCOMPLETE
    page = run_page(federated.server.path)
    (section,) = (s for s in page.sections if s.id == "sites")
    assert any(other in str(row) and state in str(row) for row in section.tables[0].rows)


def test_a_site_that_is_not_connected_is_waited_for(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedrep"), sites=3)
    with pytest.raises(RetryableError, match=f"{federated.names[3]} is silent"):
        run(federated)
    federated.link = Sites(federated.files)
    run(federated)
    assert states(federated, federated.names[3]) == [(1, 3, "took part")]


def test_rounds_that_a_site_missed_are_listed(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedrep", "rounds=9"))
    federated.link.before = away("client-01", {3})
    run(federated)
    found = states(federated, "client-01")
    assert [state for *_, state in found] == ["took part", "silent", "took part"]
    assert found[0][:2] == (1, 2)
    assert found[-1][1] == 9
    record = read_sites(federated.server.path / SITES)["client-01"]
    assert rounds_taken(record) == 9 - (found[1][1] - found[1][0] + 1)
    assert "silent in round" in attendance_words(record)
    missed = {r: {"client-01"} for r in range(found[1][0], found[1][1] + 1)}
    assert_equal(federated.tensors(), on_loop(federated.config, missed), 1e-6)


def test_a_pause_in_between_is_told_as_one(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedrep", "rounds=4"))
    private = tmp_path / "sites/client-02/private"

    def pause(progress: Progress) -> None:
        if progress.round in (1, 2):
            set_participation(private, "paused" if progress.round == 1 else "active")

    run(federated, listener=pause)
    found = states(federated, "client-02")
    assert found[1] == (2, 2, "paused")
    assert found[2] == (3, 4, "took part")


def test_later_rounds_need_more_than_half(tmp_path: Path) -> None:
    """Two of four are silent from round 2 on: the job waits for them, and the record says who."""
    federated = Federated(tmp_path, configured("fedrep", "federation.deadline=0.3"))

    def gone(name: str, header: dict[str, Any]) -> None:
        if name in ("client-01", "client-02") and is_gone:
            raise TimeoutError("no reply")

    is_gone: list[int] = []
    federated.link.before = gone
    with pytest.raises(RetryableError, match="round 2"):
        run(federated, listener=lambda progress: is_gone.append(1))
    is_gone.clear()
    federated.link.restart()
    run(federated, listener=lambda progress: None)
    assert_equal(federated.tensors(), on_loop(federated.config), 1e-6)


def test_a_policy_may_keep_its_reasons(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedrep"), reasons=False, algorithms=["fedavg"])
    with pytest.raises(RunError) as refused:
        run(federated)
    assert "its policy does not allow it" in str(refused.value)
    assert "fedavg" not in str(refused.value)
    (record,) = read_runs(tmp_path / "sites/client-00/private" / AUDIT)
    assert "lists fedavg" in record.refused[0][0]
