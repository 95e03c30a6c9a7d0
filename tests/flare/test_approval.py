"""A person's approval at a site, and quotas per day and in all."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedtailor.cli.operators import pending
from fedtailor.errors import RunError
from fedtailor.flare import quotas
from fedtailor.flare.approval import APPROVALS, NO, YES, decide, read_pending
from fedtailor.flare.participation import SITES, read_sites
from fedtailor.flare.site import AUDIT
from tests.flare.sites import on_loop
from tests.flare.test_flare import Federated, configured
from tests.flare.test_participation import run, states
from tests.flare.test_site import Asked
from tests.helpers import assert_equal


def test_a_run_waits_for_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Asked(tmp_path, approve="ask")
    first = asked.start()
    assert (first["state"], first["refused"]) == ("waiting", "waits for the approval of its operator")
    assert not (asked.folder / "run-1" / "run.json").exists()
    folder = asked.file.parent
    pending(folder)
    shown = capsys.readouterr().out
    for word in ("FedRep", "body", "rows.safetensors", "openly", "metrics    leave", "no epsilon", "waiting"):
        assert word in shown
    (identity,) = read_pending(asked.folder)
    with pytest.raises(RunError, match='no request "nothing"'):
        decide(asked.folder, folder / "kit", "nothing", YES, "Dr. Ada")
    pending(folder, yes=identity, by="Dr. Ada")
    assert "yes, by Dr. Ada" in capsys.readouterr().out
    assert '"by": "Dr. Ada"' in (asked.folder / AUDIT).read_text()
    assert "error" not in asked.start()
    assert "error" not in asked.begin(1, 0)
    assert read_pending(asked.folder)[identity]["run"] == "run-1"
    asked.restart()
    assert "error" not in asked.start()  # the same run goes on
    assert asked.start(run="run-2")["state"] == "waiting"  # another one asks again
    assert read_pending(asked.folder)[identity]["decision"] == ""
    decide(asked.folder, folder / "kit", identity, NO, "Dr. Ada")
    assert asked.start(run="run-2")["refused"] == "Dr. Ada has declined this run"


def test_an_approval_is_for_one_run_and_what_it_says(tmp_path: Path) -> None:
    asked = Asked(tmp_path, approve="ask")
    asked.start()
    (identity,) = read_pending(asked.folder)
    decide(asked.folder, asked.file.parent / "kit", identity, YES, "ada")
    assert "error" not in asked.start()
    assert "error" not in asked.start(run="run-2")  # neither has begun a round
    assert "error" not in asked.begin(1, 0)
    asked.restart()
    assert asked.start(run="run-1")["state"] == "waiting"  # its operator's yes went to run-2
    assert "error" not in asked.start(run="run-2")


def test_a_decision_that_another_key_signed_does_not_count(tmp_path: Path) -> None:
    asked = Asked(tmp_path, approve="ask")
    asked.start()
    (identity,) = read_pending(asked.folder)
    decide(asked.folder, asked.file.parent / "kit", identity, NO, "ada")
    path = asked.folder / APPROVALS / f"{identity}.json"
    record = json.loads(path.read_text())["content"]
    from fedtailor.experiments.store import write_json

    write_json(path, record | {"decision": YES})
    assert "RunError" in asked.start()["error"]


def test_a_federation_waits_and_goes_on(tmp_path: Path) -> None:
    """Client-01 is asked; its operator says yes while the job waits."""
    settings = ("federation.deadline=30", "federation.silence=0.2")
    federated = Federated(tmp_path, configured("fedrep", *settings), approve="ask")
    said = []

    def before(name: str, header: dict[str, object]) -> None:
        private = tmp_path / "sites" / name / "private"
        for identity, record in read_pending(private).items():
            if not record["decision"]:
                decide(private, tmp_path / "sites" / name / "kit", identity, YES, "operator")
                said.append(name)

    federated.link.before = before
    run(federated)
    assert sorted(said) == sorted(federated.names)
    assert_equal(federated.tensors(), on_loop(federated.config), 1e-6)


def test_a_run_that_nobody_approves_does_not_begin(tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured("fedrep", "federation.deadline=0.3", "federation.silence=0.2"))
    file = federated.files["client-01"]
    file.write_text(file.read_text().replace("[policy]", '[policy]\napprove = "ask"'))
    federated.link.restart()
    with pytest.raises(RunError, match="client-01 is waiting"):
        run(federated)
    assert states(federated, "client-01") == [(1, 1, "waiting")]
    assert set(read_sites(federated.server.path / SITES)) == set(federated.names)


@pytest.mark.parametrize(
    ("limit", "why"),
    [({"runs_per_day": 1}, "1 runs; of 1 today"), ({"rounds_in_all": 7}, "rounds; of 7 in all the policy has 2 left")],
)
def test_runs_and_rounds_have_quotas(limit: dict[str, int], why: str, tmp_path: Path) -> None:
    asked = Asked(tmp_path, budget={"min_rows": 1} | limit)
    assert "error" not in asked.start()
    assert "error" not in asked.start()  # it is booked once
    asked.restart()
    assert why in asked.start(run="run-2")["refused"]


def test_bytes_hours_and_memory_have_quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(tmp_path, budget={"min_rows": 1, "megabytes_per_day": 0.001})
    asked.start()
    asked.begin(1, 0)
    reply = asked.call()[1]
    assert reply is not None  # 5 kB, with which the quota of 1 kB is spent
    assert asked.begin(2, 0)["refused"] == "the policy's 0.001 megabytes today are spent"
    asked.site._quotas.write()  # as every two seconds
    asked.restart()
    assert asked.hello()["refused"] == "the policy's 0.001 megabytes today are spent"
    tomorrow = datetime.now().astimezone() + timedelta(days=1)
    monkeypatch.setattr(quotas, "datetime", SimpleNamespace(now=lambda zone: tomorrow))
    assert "error" not in asked.start()
    asked.site._quotas.budget = asked.site.site.policy.budget.model_copy(update={"megabytes_in_all": 0.001})
    assert asked.begin(1, 0)["refused"] == "the policy's 0.001 megabytes in all are spent"
    asked.site._quotas.budget = asked.site.site.policy.budget.model_copy(update={"memory_mb": 10})
    assert "MB, more than the policy's 10" in asked.begin(1, 0)["refused"]
    asked.site._quotas.budget = asked.site.site.policy.budget.model_copy(update={"hours_in_all": 1e-9})
    assert asked.begin(1, 0)["refused"] == "the policy's 1e-09 hours in all are spent"
