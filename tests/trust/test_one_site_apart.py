"""A server that lets one site compute another thing than the others, so that what it sums is that site's reply.

Each of these gave one site's reply, or a difference of its replies, out of sums that were all declared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor.core.trees import Tree, items, tree_map
from fedtailor.flare import approval
from fedtailor.flare.policy import Budget, round_metrics
from fedtailor.flare.protocol import Refused, config_for
from fedtailor.flare.site import SiteService
from tests.flare.sites import Authority
from tests.trust.test_bounds import BEGIN, CALL, NAMES, Sealed
from tests.trust.test_sites import EVALUATE, begun
from tests.trust.test_sums import Refusal
from tests.trust.test_sums import Server as LyingServer


class Line:
    def __init__(self, made: Sealed, site: int) -> None:
        self.made, self.site = made, site

    def answer(self, header: dict[str, Any], tree: Tree = None) -> tuple[dict[str, Any], Tree]:
        return self.made.ask(self.site, header, tree)


def message(made: Sealed) -> Tree:
    return (made.experiment.algorithm.server_init(made.experiment.model),)


def call(made: Sealed, *sites: int, number: int = 0) -> None:
    for site in sites:
        made.ask(site, CALL | {"call": number}, message(made))


def total(made: Sealed, sum: int, *, call: int = 0, round: int = 1) -> torch.Tensor:
    """The sum of the models and of the counts over all three sites."""
    server = LyingServer({i: Line(made, i) for i in made.sites}, round=round)  # type: ignore[misc]
    paths = [f"0/{path}" for path, _ in items(message(made)[0])]
    numbers = server.total(range(3), number=sum, term={"call": call, "paths": paths, "weight": "1"})
    return torch.tensor(numbers, dtype=torch.float64)


def test_s1_a_configuration_for_one_site_alone_opens_nothing(tmp_path: Path) -> None:
    """With a step size of nothing two sites send back what they were sent: the sum less that is the third's reply."""
    made = Sealed(tmp_path)
    for site in (1, 2):
        made.folders[site].joinpath("run-1/run.json").unlink()  # the run begins here
        assert "error" not in made.start(site, "local.lr=1e-30")
        made.ask(site, BEGIN)
    call(made, 0, 1, 2)
    with pytest.raises(Refusal, match="is not signed by it"):
        total(made, 1)


@pytest.mark.parametrize(
    ("key", "tables"),
    [
        ("environment.epochs", {"environment": {"epochs": [5]}}),
        ("model.by_client", {"model": {"name": "mlp", "dtype": "float64", "by_client": {"bo": {"hidden": [9]}}}}),
    ],
)
def test_s1_numbers_of_each_site_have_no_place_in_secure_sums(key: str, tables: dict[str, Any], tmp_path: Path) -> None:
    made = Sealed(tmp_path)
    sent = config_for(made.config, 0) | {"data": {"source": "digits"}} | tables
    assert key in made.start(0, config=sent)["refused"]


@pytest.mark.parametrize("key", ["seed", "rounds"])
def test_s2_hello_and_start_say_the_same(key: str, tmp_path: Path) -> None:
    """Rows are split by the seed of hello: another one is another training set at one site."""
    made = Sealed(tmp_path)
    answer = made.start(0, seed=7) if key == "seed" else made.start(0, config=made.config.plain() | {"rounds": 4})
    assert key in answer["refused"]


def of_another_state(made: Sealed) -> None:
    """The round is begun again; the first site goes on from what it has learned in it, the others do not."""
    made.ask(0, {"op": "keep", "round": 1})
    for site in made.sites:
        made.ask(site, BEGIN | {"kept": 1 if site == 0 else 0})
    call(made, 0, 1, 2)


def of_a_restored_state(made: Sealed) -> None:
    made.ask(0, {"op": "keep", "round": 1})
    for site in made.sites:
        made.ask(site, BEGIN)
    made.ask(0, {"op": "restore", "kept": 1})
    call(made, 0, 1, 2)


def of_a_rewritten_state(made: Sealed) -> None:
    """Under the same number."""
    made.ask(0, {"op": "keep", "round": 1})
    made.ask(0, BEGIN | {"round": 2, "kept": 1})
    made.ask(0, CALL | {"round": 2}, message(made))
    made.ask(0, {"op": "restore", "kept": 1})
    made.ask(0, {"op": "begin", "round": 1, "kept": 1, "needed": []})
    call(made, 0)
    made.ask(0, {"op": "keep", "round": 1})
    for site in made.sites:
        made.ask(site, BEGIN | {"kept": 1 if site == 0 else 0})
    call(made, 0, 1, 2)


def after_another_call(made: Sealed) -> None:
    """One site has one call more than the others, which trains its private part."""
    for site in made.sites:
        made.ask(site, BEGIN)
    call(made, 0, number=7)
    call(made, 0, 1, 2)


def after_a_call_that_was_refused(made: Sealed) -> None:
    """It is refused after it was computed."""
    for site in made.sites:
        made.ask(site, BEGIN)
    call(made, 0, 0, 1, 2, number=0)
    call(made, 0, 1, 2, number=1)


ATTACKS = {
    of_another_state: "from another private state",
    of_a_restored_state: "round 1 was not begun",
    of_a_rewritten_state: "from another private state",
    after_another_call: "not signed",
}


@pytest.mark.parametrize(("attack", "why"), ATTACKS.items(), ids=lambda its: getattr(its, "__name__", ""))
def test_s3_a_round_that_is_summed_twice_has_the_same_replies(
    attack: Callable[[Sealed], None], why: str, tmp_path: Path
) -> None:
    """Their difference would be one of one site."""
    made = Sealed(tmp_path, algorithm="fedrep")
    call(made, 0, 1, 2)
    first = total(made, 1)
    attack(made)
    with pytest.raises(Refusal, match=why):
        total(made, 2)
    assert first.isfinite().all()


def test_s3_a_call_that_was_refused_counts_as_one(tmp_path: Path) -> None:
    made = Sealed(tmp_path, algorithm="fedrep")
    after_a_call_that_was_refused(made)
    with pytest.raises(Refusal, match="is not signed by it"):
        total(made, 1, call=1)


def test_s3_a_round_that_is_begun_again_is_summed_as_before(tmp_path: Path) -> None:
    """As after a crash of the server, also of the sites."""
    made = Sealed(tmp_path, algorithm="fedrep")
    call(made, 0, 1, 2)
    first = total(made, 1)
    for site in made.sites:
        assert "error" not in made.start(site)
        assert "error" not in made.ask(site, BEGIN)[0]
    call(made, 0, 1, 2)
    assert torch.equal(total(made, 1), first)


@pytest.mark.parametrize("first", [-1, 1, 3])
def test_s3_a_run_begins_with_its_first_state(first: int, tmp_path: Path) -> None:
    """Or a site would have the state of before the run under the number of any round."""
    assert f"round {first}" in Sealed(tmp_path).start(0, first=first)["refused"]


# budgets


@pytest.mark.parametrize("round", [-(2**31), -1, 6, 999])
def test_s4_a_round_that_was_not_announced_does_not_begin(round: int, tmp_path: Path) -> None:
    """What a run may need is booked by the number of its rounds: here five."""
    made = begun(tmp_path)
    assert str(round) in made.begin(round, 0)["refused"]
    assert "error" not in made.begin(5, 0)


def test_s5_a_run_that_is_started_again_has_the_calls_that_are_left(tmp_path: Path) -> None:
    made = begun(tmp_path)
    answers = [made.call(call=number)[0] for number in range(60)]
    made.start()
    made.begin(1, 0)
    answers += [made.call(call=number)[0] for number in range(60)]
    assert ["refused" in answer for answer in answers].count(True) == 20


def test_s5_a_run_has_four_times_the_calls_that_are_booked(tmp_path: Path) -> None:
    made, answers = begun(tmp_path), list[dict[str, Any]]()
    for round in range(6):
        made.begin(round, 0)
        answers += [made.call(round, call=number)[0] for number in range(90)]
    assert ["refused" in answer for answer in answers].count(False) == 4 * (100 + 5)


def test_s6_replies_that_were_limited_count_over_all_runs_of_a_day(tmp_path: Path) -> None:
    """A site that withdraws from a run tells one bit: a new name for each bit would be as many as one likes."""
    made = Sealed(tmp_path, "federation.max_norm=1e-6", budget={"min_rows": 1, "limited_per_day": 3})
    refused = [made.ask(0, CALL | {"call": number}, message(made))[0] for number in range(6)]
    assert ["refused" in answer for answer in refused] == [False] * 4 + [True] * 2
    made.sites[0] = SiteService(made.sites[0].site, NAMES[0])
    made.numbers[0] = 0
    assert "today" in made.start(0, run="run-2")["refused"]


# metrics


def test_s7_a_large_loss_has_no_more_digits_than_a_small_one(tmp_path: Path) -> None:
    """At a model that is a million times as large, three decimals were sixteen digits."""
    values = torch.tensor([0.12345, 1.23456, 1234.5678, 1.23456789e12, -98765.4, torch.inf, torch.nan, 0.0])
    for dtype in (torch.float64, torch.float32):
        told = round_metrics(Budget(), values.to(dtype))
        wanted = torch.tensor([0.123, 1.235, 1235.0, 1.235e12, -98770.0, torch.inf, torch.nan, 0.0])
        torch.testing.assert_close(told, wanted.to(dtype), rtol=1e-6, atol=0, equal_nan=True)
    made = begun(tmp_path, budget={"min_rows": 1, "decimals": 3})
    server = made.experiment.algorithm.server_init(made.experiment.model)
    metrics = made.ask(EVALUATE, tree_map(lambda v: 1e6 * v, server))[1][0]
    loss = float(metrics["val"]["loss"])
    assert loss > 1000
    assert loss == float(f"{loss:.3e}")


def test_s10_an_approval_is_for_what_was_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs whose descriptions begin with the same 48 bits of a hash are found in seconds."""
    monkeypatch.setattr(approval, "digest", lambda what: "0" * 16)
    Authority().write_kit(tmp_path / "kit", "ada")
    harmless, other = {"rounds": "1"}, {"rounds": "1000"}
    for what in (harmless, other):
        with pytest.raises(Refused, match="waits"):
            approval.require_approval(tmp_path, tmp_path / "kit", "run-1", what)
        if what is harmless:
            approval.decide(tmp_path, tmp_path / "kit", "0" * 12, approval.YES, "somebody")
            assert approval.require_approval(tmp_path, tmp_path / "kit", "run-1", what)


def test_s8_another_hello_ends_the_run(tmp_path: Path) -> None:
    """It would write its personal models into the folder of the other."""
    made = begun(tmp_path)
    made.hello(run="run-2")
    assert "before a run was started" in made.call()[0]["refused"]
    assert not (made.folder / "run-2").exists()


def test_s9_a_site_that_sums_says_nothing_of_errors_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first private states are computed from the data before there is a run."""
    made = Sealed(tmp_path)

    def fails(*args: Any) -> None:
        raise ZeroDivisionError("row 3")

    monkeypatch.setattr("fedtailor.engines.inprocess.InProcess.start", fails)
    assert made.start(0)["error"] == "ada: an error; see its audit log"
