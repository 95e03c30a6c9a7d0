"""One site that lies, in every part of what it says: the run goes on without it and names it, with no exception."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor.cli.federation_commands import fit_config
from fedtailor.core import codec
from fedtailor.core.border import plain_text
from fedtailor.core.trees import Tree, tree_map
from fedtailor.errors import RunError
from fedtailor.experiments import runner
from fedtailor.experiments.store import RunFolder
from fedtailor.flare import server as flare
from fedtailor.flare.protocol import ENVELOPE, PING
from fedtailor.flare.server import ROSTER
from fedtailor.flare.site import fit_results
from tests.flare.sites import Sites
from tests.flare.test_federated_fit import SETTINGS, SIZES, site_files
from tests.flare.test_flare import Federated, configured
from tests.tables.test_table_fit import table

LIAR = "client-01"
Header = dict[str, Any]
Lie = Callable[[Header, Header, Tree], tuple[Header, Tree]]  # (request, answer, tree) -> what is said instead


class LyingSites(Sites):
    """A link on which one site's answers are what `lie` makes of them."""

    lie: Lie
    liar = LIAR

    def send(self, site: str, request: bytes, seconds: float) -> bytes:
        reply = super().send(site, request, seconds)
        if site != self.liar or ENVELOPE.unpack_from(request)[1] == PING:
            return reply
        asked, (answer, tree) = codec.decode_header(request[ENVELOPE.size :]), codec.decode(reply)
        said = self.lie(asked, answer, tree)
        return said[1] if isinstance(said[1], bytes) else codec.encode(*said)


def run_with(
    root: Path, lie: Lie, algorithm: str = "fedrep", *settings: str, **policy: Any
) -> tuple[Federated, RunFolder]:
    federated = Federated(root, configured(algorithm, *settings), **policy)
    link = LyingSites(federated.link.files)
    link.lie = lie
    federated.link = link
    return federated, federated.run()


def faults(folder: RunFolder) -> list[tuple[int, str]]:
    return [(line["round"], fault["client"]) for line in folder.metrics() for fault in line.get("faults", [])]


def said(op: str, change: Callable[[Header, Tree], tuple[Header, Tree]]) -> Lie:
    """A lie in the answers to one operation; "call" is any client function."""

    def lie(asked: Header, answer: Header, tree: Tree) -> tuple[Header, Tree]:
        kind = "call" if "function" in asked else asked.get("op", asked.get("step"))
        return change(answer, tree) if kind == op and asked.get("round") != 1 else (answer, tree)

    return lie


def metric(value: torch.Tensor, name: str = "") -> Lie:
    """Another value for every metric of validation data, or one more with a name of its own."""

    def change(answer: Header, tree: Tree) -> tuple[Header, Tree]:
        metrics, model = tree
        return answer, ({s: {name: value} if name else dict.fromkeys(m, value) for s, m in metrics.items()}, model)

    return said("evaluate", change)


LIES: dict[str, Lie] = {
    "kept of no round": said("keep", lambda answer, tree: ({"kept": 10**30}, None)),
    "kept of another round": said("keep", lambda answer, tree: ({"kept": 77}, None)),
    "kept is true": said("keep", lambda answer, tree: ({"kept": True}, None)),
    "a metric without measure": metric(torch.tensor(1e308, dtype=torch.float64)),
    "an accuracy above one": metric(torch.tensor(1.27)),
    "an unknown metric": metric(torch.tensor(0.5), "secret"),
    "a metric that is no number": metric(torch.tensor(True)),
    "a metric of many numbers": metric(torch.ones(3)),
    "an error that is a table": said("call", lambda answer, tree: ({"error": {"a": 1}}, None)),
    "an error that is nothing": said("call", lambda answer, tree: ({"error": None}, None)),
    "an error of a begin": said("begin", lambda answer, tree: ({"error": ["\x1b[2J"] * 3}, None)),
    "a count of others": said("call", lambda answer, tree: (answer, (tree[0], tree[1] * 1e6))),
    "a count below one": said("call", lambda answer, tree: (answer, (tree[0], -tree[1]))),
    "no number": said("call", lambda answer, tree: (answer, tree_map(lambda v: v * torch.nan, tree))),
    "another type": said("call", lambda answer, tree: (answer, tree_map(lambda v: v.to(torch.int32), tree))),
    "no tree": said("call", lambda answer, tree: (answer, None)),
    "no message": said("call", lambda answer, tree: (answer, b"\xff" * 99)),
    "a long message": said("call", lambda answer, tree: (answer, {"w": torch.zeros(10**6)})),
    "an infinite metric": metric(torch.tensor(torch.inf)),
    "a metric below all others": metric(torch.tensor(-torch.inf)),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_l1_a_run_goes_on_without_a_site_that_lies_and_names_it(lie: Lie, tmp_path: Path) -> None:
    _, folder = run_with(tmp_path, lie)
    assert folder.results is not None
    assert {client for _, client in faults(folder)} == {LIAR}
    assert {round for round, _ in faults(folder)} <= {2, 3}


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_l1_an_infinite_metric_is_absent_from_every_mean(value: float, tmp_path: Path) -> None:
    """Whether its model diverged or it lies: the others' mean is a number, and the best round is theirs."""

    def change(answer: Header, tree: Tree) -> tuple[Header, Tree]:
        return answer, (tree_map(lambda v: torch.full_like(v, value), tree[0]), tree[1])

    _, folder = run_with(tmp_path, said("evaluate", change))
    assert folder.results is not None
    for kind in ("last", "selected"):
        name = folder.results["metric"]
        each, at = folder.results[kind]["clients"][name], folder.about["clients"].index(LIAR)
        others = [v for i, v in enumerate(each) if i != at]
        assert each[at] is None or each[at] != each[at]
        assert folder.results[kind]["test"][name]["mean"] == pytest.approx(sum(others) / len(others))
    told = [fault for line in folder.metrics() for fault in line.get("faults", [])]
    assert {(fault["client"], fault["function"]) for fault in told} == {(LIAR, "evaluate")}


def test_l2_a_count_above_the_samples_does_not_move_the_mean(tmp_path: Path) -> None:
    """A site that said hello with some samples is not the federation."""

    def grown(answer: Header, tree: Tree) -> tuple[Header, Tree]:
        return answer, (tree_map(lambda v: torch.full_like(v, 9.0), tree[0]), torch.full_like(tree[1], 5e7))

    federated, folder = run_with(tmp_path, said("call", grown), "fedavg")
    assert {client for _, client in faults(folder)} == {LIAR}
    assert all(v.abs().max() < 5 for k, v in federated.tensors().items() if k.startswith("server"))


@pytest.mark.parametrize("where", ["call", "begin", "evaluate", "keep"])
def test_l3_words_of_a_site_are_short_and_plain(where: str, tmp_path: Path) -> None:
    long = said(where, lambda answer, tree: ({"error": "\x1b[31m\u202e" + 2_000_000 * "x"}, None))
    _, folder = run_with(tmp_path, long)
    reasons = [fault["reason"] for line in folder.metrics() for fault in line.get("faults", [])]
    assert all(reason.isprintable() and len(reason) < 400 for reason in reasons)
    assert len((folder.path / "metrics.jsonl").read_bytes()) < 20_000
    assert bool(reasons) == (where != "evaluate")  # a site may refuse metrics


@pytest.mark.parametrize("value", [{"a": 1}, None, 3, "\x1b[2J\x00", "\u200b" * 900, "x" * 10**6, ""])
def test_l3_any_value_is_plain_text(value: Any) -> None:
    shown = plain_text(value)
    assert shown.isprintable()
    assert len(shown) <= 303


def test_l3_names_and_conditions_of_a_hello_are_short_and_plain(tmp_path: Path) -> None:
    def named(asked: Header, answer: Header, tree: Tree) -> tuple[Header, Tree]:
        if asked.get("op") == "hello":
            answer = answer | {
                "condition": {"version": "\x1b]0;x\x07" + "y" * 10**6, "now": 10**400, "free": float("inf")}
            }
        return answer, tree

    _, folder = run_with(tmp_path, named)
    text = (folder.path / "sites.json").read_text()
    assert folder.results is not None
    assert len(text) < 20_000
    assert "\\u001b" not in text


def test_l4_the_first_site_does_not_decide_the_form_of_the_data(tmp_path: Path) -> None:
    """The others would be left out of the run in its place."""

    def narrow(asked: Header, answer: Header, tree: Tree) -> tuple[Header, Tree]:
        if asked.get("op") == "hello":
            answer = answer | {"schema": answer["schema"] | {"outputs": 2**20, "classes": []}}
        return answer, tree

    federated = Federated(tmp_path, configured("fedrep"))
    link = LyingSites({name: federated.files[name] for name in (LIAR, "client-02", "client-03")})
    link.lie, federated.link = narrow, link
    folder = federated.run()
    assert folder.about["clients"] == ["client-02", "client-03"]
    assert (folder.path / ROSTER).exists()


def test_l5_a_lie_on_the_way_back_of_a_tape_leaves_the_site_out(tmp_path: Path) -> None:
    def lie(asked: Header, answer: Header, tree: Tree) -> tuple[Header, Tree]:
        is_back = "function" not in asked and "op" not in asked
        return (answer, {"nothing": torch.zeros(3)}) if is_back else (answer, tree)

    _, folder = run_with(tmp_path, lie, "learn2pfed", "rounds=3")
    assert folder.results is not None
    lines = folder.metrics()
    assert LIAR in lines[0]["abandoned"]
    assert not any("abandoned" in line for line in lines[1:])


@pytest.mark.parametrize("step", ["keys", "deal", "mask", "confirm", "reveal"])
@pytest.mark.parametrize("what", ["transcript", "bytes", "type"])
def test_l6_a_lie_in_a_step_of_a_secure_sum_is_no_exception(step: str, what: str, tmp_path: Path) -> None:
    def change(answer: Header, tree: Tree) -> tuple[Header, Tree]:
        if what == "transcript":
            return answer | {"transcript": "no hash"}, tree
        return answer, torch.zeros_like(tree) if what == "bytes" else tree.to(torch.float64)

    settings = ("privacy.secure_sum=true", "rounds=3", "evaluation.every=3")
    federated = Federated(tmp_path, configured("fedavg", *settings))
    link = LyingSites(federated.files)
    link.lie, link.liar, federated.link = said(step, change), "client-00", link
    folder = federated.run()
    assert folder.results is not None  # the first round was as it should be
    assert "abandoned" not in folder.metrics()[0]


@pytest.mark.parametrize("factor", [1e5, -1e3, torch.inf])
def test_l7_terms_of_a_mixed_model_that_no_samples_give_do_not_count(factor: float, tmp_path: Path) -> None:
    federated, folder = run_with(tmp_path, times(factor), "mixedmodel", "rounds=1")
    assert folder.results is not None
    assert {client for _, client in faults(folder)} == {LIAR}
    honest = Federated(tmp_path / "honest", federated.config)
    honest.link = Sites({name: file for name, file in honest.files.items() if name != LIAR})
    wanted = honest.run().results
    assert wanted is not None
    name = folder.results["metric"]
    found = folder.results["last"]["clients"][name]
    others = [v for v, client in zip(found, federated.names, strict=True) if client != LIAR]
    assert others == pytest.approx(wanted["last"]["clients"][name], rel=0.05)


def times(factor: float) -> Lie:
    """Every number of every reply is this many times what it was."""

    def lie(asked: Header, answer: Header, tree: Tree) -> tuple[Header, Tree]:
        return (answer, tree_map(lambda v: v * factor, tree)) if "function" in asked else (answer, tree)

    return lie


@pytest.mark.parametrize("factor", [1e5, -1e3])
def test_l8_a_fit_of_tables_goes_on_without_terms_that_no_rows_give(factor: float, tmp_path: Path) -> None:
    """The others are served as well as they are alone, or better."""
    link = LyingSites(site_files(tmp_path / "sites", table(6, SIZES)))
    link.lie, link.liar = times(factor), "s1"
    run = flare.coordinate(link, fit_config({"source": "sites"}, 0, SETTINGS), "fit", tmp_path, None)
    assert run.results is not None
    assert {client for _, client in faults(run)} == {"s1"}
    for name in ("s0", "s2"):
        _, record = fit_results(tmp_path / "sites" / name / "site.toml")
        figures = record["sites"][name]
        assert figures["personal"] <= figures["alone"] * 1.05


def test_l9_a_late_reply_is_checked_as_any_other(tmp_path: Path) -> None:
    """It arrives after its round has closed, and would be counted in a later one."""
    federated = Federated(tmp_path, configured("fedrep", "federation.goal=3", "federation.late=buffer", "rounds=5"))
    link, is_over = LyingSites(federated.files), threading.Event()

    def before(site: str, header: Header) -> None:
        if site == LIAR and "function" in header and header["round"] == 1:
            assert is_over.wait(30)

    def lie(asked: Header, answer: Header, tree: Tree) -> tuple[Header, Tree]:
        is_late = "function" in asked and asked["round"] == 1
        return (answer, ({"nothing": torch.zeros(2)}, torch.ones(()))) if is_late else (answer, tree)

    def over(progress: runner.Progress) -> None:
        is_over.set()
        time.sleep(0.3)

    link.before, link.lie, federated.link = before, lie, link
    folder = federated.run(over)
    assert folder.results is not None
    assert {client for _, client in faults(folder)} == {LIAR}


def test_l10_a_secure_mean_whose_weights_are_above_all_samples_is_abandoned(tmp_path: Path) -> None:
    """Nobody sees whose weight it is; the sum shows that one of them lies."""
    federated = Federated(tmp_path, configured("fedavg", "privacy.secure_sum=true", "rounds=2"))

    def heavy(name: str, header: Header) -> None:
        job = federated.link.services[name]._job
        if header.get("step") == "keys" and header["round"] == 2 and name == LIAR and job is not None:
            assert job.client.sums is not None
            for number, kept in job.client.sums._replies.items():
                grown = {k: v * 1e4 if k == "1" else v for k, v in kept.reply.items()}
                job.client.sums._replies[number] = type(kept)(kept.function, grown, kept.history)

    federated.link.before = heavy
    lines = federated.run().metrics()
    assert "abandoned" not in lines[0]
    assert "samples" in lines[1]["abandoned"]


@pytest.mark.parametrize(
    ("algorithm", "kind", "settings"),
    [
        ("learn2pfed", "call", ()),
        ("fedavg", "mask", ("privacy.secure_sum=true", "federation.min_replies=4")),
    ],
)
def test_l11_a_site_that_spoils_every_round_is_named_and_left_out(
    algorithm: str, kind: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    """Where a round cannot go on without it, the run does: a taped round needs all, the other so many replies."""

    def lie(asked: Header, answer: Header, tree: Tree) -> tuple[Header, Tree]:
        is_asked = kind == ("call" if "function" in asked else asked.get("step"))
        return (answer, tree_map(lambda v: v.to(torch.float16), tree)) if is_asked else (answer, tree)

    if (
        "federation.min_replies=4" in settings
    ):  # as many as there are: nobody can be left out, and the last words name it
        with pytest.raises(RunError, match=LIAR):
            run_with(tmp_path, lie, algorithm, "rounds=4", *settings)
        return
    _, folder = run_with(tmp_path, lie, algorithm, "rounds=4", *settings)
    assert folder.results is not None
    lines = folder.metrics()
    assert ["abandoned" in line for line in lines if line["round"] > 0] == [True, True, False, False]
    assert {client for _, client in faults(folder)} == {LIAR}
