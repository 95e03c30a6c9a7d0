"""What bounds a site's answer is fixed as a run begins: no request changes it, and no refusal tells of the data."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor.core import codec
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.trees import Tree, tree_map
from fedtailor.experiments import runner
from fedtailor.experiments.building import assemble
from fedtailor.experiments.store import RunFolder, round_line, write_json
from fedtailor.flare import server as flare
from fedtailor.flare.audit import audit_lines
from fedtailor.flare.policy import Budget
from fedtailor.flare.protocol import ENVELOPE, PROTOCOL, config_for, data_schema, hello_fault, promise
from fedtailor.flare.site import AUDIT, SERVER, SiteService, read_site
from fedtailor.version import __version__
from tests.flare.sites import Sites, write_sites
from tests.flare.test_flare import Federated, configured
from tests.flare.test_site import SESSION, Asked
from tests.helpers import make_data
from tests.small import config
from tests.trust.test_sites import EVALUATE, begun, evaluated

NAMES = ("ada", "bo", "cy")
CALL = {"function": "local", "round": 1, "call": 0, "placed": [False], "taped": False}


class Sealed:
    """Three sites in a run with secure sums, and a server that may say anything to them."""

    def __init__(self, root: Path, *settings: str, algorithm: str = "fedavg", **policy: Any) -> None:
        self.data = make_data(names=list(NAMES))
        self.settings = (
            f"algorithm.name={algorithm}",
            "data={source='sites'}",
            "model.dtype=float64",
            "privacy.secure_sum=true",
            *settings,
        )
        self.config = config(*self.settings)
        self.experiment = assemble(self.config, self.data)
        files = write_sites(root, self.data, **({"sums_of": 3} | policy))
        self.sites = {i: SiteService(read_site(file), name) for i, (name, file) in enumerate(files.items())}
        self.folders = {i: file.parent / "private" for i, file in enumerate(files.values())}
        self.numbers = dict.fromkeys(self.sites, 0)
        for i in self.sites:
            answer = self.start(i)
            assert "error" not in answer, answer
            assert "error" not in self.ask(i, BEGIN)[0]

    def start(self, site: int, *settings: str, cohort: tuple[str, ...] = NAMES, **changes: Any) -> dict[str, Any]:
        """What a site answers to hello and start, of which each may have another configuration."""
        made = config(*self.settings, *settings)
        hello = {"op": "hello", "protocol": PROTOCOL, "version": __version__, "run": changes.pop("run", "run-1")}
        hello |= {"algorithm": made.algorithm.name}
        hello |= {"model": made.model.name, "rounds": made.rounds, "seed": changes.pop("seed", made.seed)}
        about = {"schema": data_schema(self.data), "promise": promise(assemble(made, self.data)), "first": 0}
        self.ask(site, hello)
        start = {"op": "start", "config": config_for(made, site), "client": site, "cohort": list(cohort)}
        return self.ask(site, start | about | changes)[0]

    def raw(self, site: int, header: dict[str, Any], tree: Tree = None) -> bytes:
        self.numbers[site] += 1
        envelope = ENVELOPE.pack(SESSION, self.numbers[site])
        return self.sites[site].answer(SERVER, envelope + codec.encode(header, tree))

    def ask(self, site: int, header: dict[str, Any], tree: Tree = None) -> tuple[dict[str, Any], Tree]:
        return codec.decode(self.raw(site, header, tree))

    def lines(self, site: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folders[site] / AUDIT).read_text().splitlines()]


BEGIN = {"op": "begin", "round": 1, "kept": 0, "needed": []}


def test_b1_a_norm_in_a_request_tells_nothing(tmp_path: Path) -> None:
    """Bisection at chosen models gave every coordinate of a site's update."""
    made = Sealed(tmp_path)
    told = {made.raw(0, CALL | {"sealed": 10.0**power}, (made.experiment.model.params,)) for power in range(-9, 10)}
    assert len(told) == 1


@pytest.mark.parametrize(
    ("what", "settings"),
    [
        ("a large reply", ("federation.max_norm=1e-6",)),
        ("no number", ("local.lr=1e200",)),
    ],
)
def test_b1_a_reply_beyond_the_bound_is_answered_as_any_other(
    what: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    usual, beyond = Sealed(tmp_path / "usual"), Sealed(tmp_path / "beyond", *settings)
    message = (usual.experiment.model.params,)
    assert beyond.raw(0, CALL, message) == usual.raw(0, CALL, message)
    assert ["limited" in line for line in usual.lines(0)].count(True) == 0
    assert ["limited" in line for line in beyond.lines(0)].count(True) == 1
    assert "  limited once: " in "\n".join(audit_lines(beyond.folders[0] / AUDIT))


def test_b1_what_is_limited_is_bounded_and_then_the_site_is_away(tmp_path: Path) -> None:
    made = Sealed(tmp_path, "federation.max_norm=1e-6", budget={"min_rows": 1, "limited_replies": 2})
    message = (made.experiment.model.params,)
    answers = [made.ask(0, CALL | {"call": number}, message)[0] for number in range(4)]
    assert ["refused" in answer for answer in answers] == [False, False, False, True]
    assert "withdrawn" in answers[3]["refused"]  # as when its operator decides so
    assert "norm" not in answers[3]["refused"]


def test_b1_the_sum_of_limited_replies_is_that_of_bounded_ones(tmp_path: Path) -> None:
    federated = Federated(
        tmp_path, configured("fedavg", "privacy.secure_sum=true", "rounds=1", "federation.max_norm=0.5"), sums_of=4
    )
    folder = federated.run()
    assert folder.results is not None
    assert "faults" not in folder.metrics()[0]
    server = torch.cat([v.flatten() for k, v in federated.tensors().items() if k.startswith("server")])
    assert 0.1 < server.norm() <= 0.5


@pytest.mark.parametrize("bits", [0, 8, 52])
def test_b2_bits_and_thresholds_in_a_request_are_refused(bits: int, tmp_path: Path) -> None:
    made = Sealed(tmp_path)
    told = {
        key: made.ask(0, {"round": 1, "sum": 1, "step": "deal", "clients": [0, 1, 2], key: bits})[0]["refused"]
        for key in ("fraction_bits", "threshold")
    }
    assert all(f'"{key}"' in text for key, text in told.items())


def test_b2_a_number_beyond_the_range_of_a_sum_is_not_told(tmp_path: Path) -> None:
    federated = Federated(
        tmp_path, configured("fedavg", "privacy.secure_sum=true", "rounds=1", "privacy.fraction_bits=52"), sums_of=4
    )

    def large(name: str, header: dict[str, Any]) -> None:
        site = federated.link.services[name]
        if header.get("step") == "keys" and name == "client-01" and site._job is not None:
            sums = site._job.client.sums
            assert sums is not None
            for number, kept in sums._replies.items():
                grown = {k: v * 1e9 if k.startswith("0/") else v for k, v in kept.reply.items()}
                sums._replies[number] = type(kept)(kept.function, grown, kept.history)

    federated.link.before = large
    folder = federated.run()
    assert "faults" not in folder.metrics()[0]
    record = (tmp_path / "sites" / "client-01" / "private" / AUDIT).read_text()
    assert "range" in record


def test_b2_bounds_are_in_the_promise(tmp_path: Path) -> None:
    made = Sealed(tmp_path)
    other = assemble(
        made.config.model_copy(update={"federation": config("federation.max_norm=7").federation}), made.data
    )
    assert promise(made.experiment)["bounds"] == {"fraction_bits": 32, "max_norm": 1e8}
    assert promise(other)["bounds"]["max_norm"] == 7


def test_b2_a_run_that_goes_on_has_the_bounds_that_it_began_with(tmp_path: Path) -> None:
    """A server that starts the same run again with another norm, or with fewer sites, could compare its sums."""
    made = Sealed(tmp_path)
    for settings, cohort in ((("federation.max_norm=7",), NAMES), ((), NAMES[:2])):
        other = config(
            *("algorithm.name=fedavg", "data={source='sites'}", "model.dtype=float64", "privacy.secure_sum=true"),
            *settings,
        )
        about = {"schema": data_schema(made.data), "promise": promise(assemble(other, made.data)), "first": 0}
        start = {"op": "start", "config": config_for(other, 0), "client": 0, "cohort": list(cohort)} | about
        assert "another configuration" in made.ask(0, start)[0]["refused"]


def test_b2_a_partner_that_was_not_in_the_run_is_refused(tmp_path: Path) -> None:
    from tests.trust.test_sums import Refusal
    from tests.trust.test_sums import Server as LyingServer

    made = Sealed(tmp_path, sums_of=2)

    class Line:
        def __init__(self, site: int) -> None:
            self.site = site

        def answer(self, header: dict[str, Any], tree: Tree = None) -> tuple[dict[str, Any], Tree]:
            return made.ask(self.site, header, tree)

    for site in made.sites.values():
        assert site._job is not None
        site._job.client._cohort = frozenset({"ada", "bo"})
    for i in made.sites:
        made.ask(i, CALL, (made.experiment.model.params,))
    server = LyingServer({i: Line(i) for i in made.sites})  # type: ignore[misc]
    term = {"call": 0, "paths": ["1"], "weight": None}
    with pytest.raises(Refusal, match='"cy"'):
        server.total(range(3), term=term)
    assert server.total(range(2), number=2, term={"call": 0, "paths": ["0/out.bias"], "weight": "1"})


def test_b3_an_error_of_a_client_is_not_told(tmp_path: Path) -> None:
    """Whether a function fails at a chosen model depends on the data."""
    made = Sealed(tmp_path)
    message = made.experiment.model.params
    usual = made.raw(0, CALL, (message,))
    site = made.sites[0]
    assert site._job is not None

    def fails(*args: Any, **options: Any) -> Any:
        raise FloatingPointError("row 3")

    site._job.client.inside._invoke = fails  # type: ignore[method-assign]
    made.ask(0, BEGIN)
    assert made.raw(0, CALL, (message,)) == usual


def test_b3_a_failed_evaluation_is_not_told_where_no_metrics_leave(tmp_path: Path) -> None:
    made = begun(tmp_path, metrics=False)
    server = made.experiment.algorithm.server_init(made.experiment.model)
    broken = tree_map(lambda v: v[..., :1], server)
    told = {made.ask(EVALUATE | {"keep": keep}, tree)[0]["error"] for keep in ("", "last") for tree in (server, broken)}
    assert len(told) == 1


# budgets


def test_b5_metrics_are_for_rounds_that_began(tmp_path: Path) -> None:
    made = begun(tmp_path)
    assert "error" not in evaluated(made)[0]
    assert ["refused" in evaluated(made, round=round)[0] for round in (0, 2, 3)] == [True] * 3
    made.begin(2, 0)
    assert "error" not in evaluated(made, round=2)[0]


def test_b5_a_new_name_is_no_new_budget(tmp_path: Path) -> None:
    """A run of five rounds may need 22 evaluations."""
    made = Asked(tmp_path, budget={"min_rows": 1, "evaluations_per_day": 50})
    told = []
    for number in range(4):
        told.append(made.start(run=f"run-{number}"))
        made.restart()
    assert ["refused" in answer for answer in told] == [False, False, True, True]
    assert "22 evaluations" in told[2]["refused"]
    assert "6 left" in told[2]["refused"]
    assert not (made.folder / "run-2" / "run.json").exists()
    assert "error" not in made.start(run="run-1")  # what is booked may go on
    assert (made.folder / "booked.json").exists()


@pytest.mark.parametrize(("limit", "what"), [("calls_per_day", "calls"), ("calls_in_all", "calls")])
def test_b5_calls_are_booked_as_well(limit: str, what: str, tmp_path: Path) -> None:
    made = Asked(tmp_path, budget={"min_rows": 1, limit: 2})
    assert f"105 {what}" in made.start()["refused"]  # five rounds, and 100 spare ones


def test_b5_a_round_has_the_calls_that_its_algorithm_needs(tmp_path: Path) -> None:
    made = begun(tmp_path)
    answers = [made.call(call=number)[0] for number in range(101)]
    assert ["refused" in answer for answer in answers].count(True) == 1


@pytest.mark.parametrize("algorithm", ["mixedmodel", "mixedlogit", "mixedpoisson"])
def test_b7_a_mixed_model_runs_under_the_default_policy(algorithm: str, tmp_path: Path) -> None:
    federated = Federated(tmp_path, configured(algorithm, "rounds=1"), budget={"min_rows": 1})
    results = federated.run().results
    assert results is not None
    assert results["faults"] == 0


def slow_to_settle() -> FederatedData:
    """Sites whose slopes vary together, in units far apart: a mixed model makes some 660 calls of each of them."""
    draw, names, features = torch.Generator().manual_seed(0), ("ada", "bo", "cy"), 5
    spread = torch.randn(3, features + 1, 1, generator=draw, dtype=torch.float64)
    own = torch.randn(features + 1, features + 1, generator=draw, dtype=torch.float64) @ spread
    parts = list[Rows]()
    for rows in (30, 12, 12):
        x = torch.randn(3, rows, features, generator=draw, dtype=torch.float64)
        y = x @ own[:, :-1] + own[:, -1:] + torch.randn(3, rows, 1, generator=draw, dtype=torch.float64)
        x = x * torch.logspace(-1.5, 1.5, features, dtype=torch.float64)
        parts.append(Rows(x.flatten(0, 1), y.flatten(0, 1), torch.arange(4) * rows))
    train, val, test = parts
    return FederatedData("made", "regression", names, train, val, test, 1)


def test_b7_a_round_of_more_than_400_calls_fits_the_default_policy(tmp_path: Path) -> None:
    files = write_sites(tmp_path / "sites", slow_to_settle(), budget=Budget().model_dump())
    made = config(
        "algorithm.name=mixedmodel",
        "data={source='sites'}",
        "model={name='linear', dtype='float64'}",
        "rounds=1",
    )
    results = flare.coordinate(Sites(files), made, "run", tmp_path / "server", None).results
    assert results is not None
    assert results["traffic"]["trips"] > 400
    assert (results["faults"], results["abandoned"]) == (0, 0)


def test_b7_a_run_that_cannot_fit_is_refused_before_it_begins(tmp_path: Path) -> None:
    made = Asked(tmp_path, "mixedmodel", budget={"min_rows": 1, "calls_per_round": 400})
    made.config = configured("mixedmodel").model_copy(update={"data": made.config.data})
    data = make_data("regression", names=["ada"])
    made.file = write_sites(tmp_path / "regression", data, budget={"calls_per_round": 400})["ada"]
    made.restart()
    why = made.start()["refused"]
    assert "5000" in why
    assert "400" in why
    assert Budget().calls_per_round == 0


# limits come first


@pytest.mark.parametrize("hidden", [[65_536, 65_536], [65_536] * 999, [8] * 20_000])
def test_b8_a_model_is_refused_before_it_is_built(hidden: list[int], tmp_path: Path) -> None:
    """Two layers of 65536 are 17 GB."""
    made = Asked(tmp_path)
    made.hello()
    assert made.site._data is not None
    tables = config_for(made.config, 0) | {"model": {"name": "mlp", "hidden": hidden}}
    about = {"client": 0, "schema": data_schema(made.site._data), "promise": {}, "first": 0}
    tracemalloc.start()
    why = made.ask({"op": "start", "config": tables} | about)[0]["refused"]
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    assert "the model has" in why


def test_b8_a_long_request_is_not_read(tmp_path: Path) -> None:
    made = begun(tmp_path, budget={"min_rows": 1, "message_mb": 1})
    answer, _ = made.ask({"op": "keep", "round": 1}, {"w": torch.zeros(10**6)})
    assert "bytes" in answer["refused"]
    assert "error" not in made.call()[0]


def test_b8_there_is_no_room_for_a_reply_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE hands out memory for as many bytes as a message says that it has."""
    pytest.importorskip("nvflare")
    from nvflare.fuel.f3.streaming import blob_streamer
    from nvflare.fuel.f3.streaming.stream_types import BlobSizeError, Stream, StreamFuture

    from fedtailor.flare.nvidia import LimitedBlob

    federated = Federated(tmp_path, configured("fedavg", "rounds=1"))
    federated.run()
    most = federated.link.most
    model = sum(v.numel() for k, v in federated.tensors().items() if k.startswith("server"))
    assert 4 * model < most < 2**24 + 2**20 + 100 * model
    monkeypatch.setattr(LimitedBlob, "most", most)

    class Announced(Stream):
        def read(self, chunk_size: int) -> bytes:
            return b""

    tracemalloc.start()
    for whole in (False, True):
        with pytest.raises(BlobSizeError):
            blob_streamer.BlobTask(StreamFuture(1), Announced(400_000_000, {}), 0, preserve_chunks=whole)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert len(blob_streamer.BlobTask(StreamFuture(1), Announced(most, {}), 0).buffer) == most


def test_b8_a_long_header_is_not_parsed() -> None:
    message = codec._LENGTH.pack(2**25) + b"{" * 2**20
    with pytest.raises(codec.BrokenMessage, match=str(2**25)):
        codec.decode_header(message)


@pytest.mark.parametrize(
    "form",
    [
        {"x": {f"part {i}": [[2**24], "float32"] for i in range(90)}},
        {"x": {f"part {i}": [[1], "float32"] for i in range(200)}},
        {"x": {"\x1b[2J": [[1], "float32"]}},
        {"classes": ["\x1b]0;title\x07"]},
        {"features": ["x" * 10**6]},
        {"task": "y" * 10**6},
    ],
)
def test_b8_what_a_site_says_of_its_data_is_small_and_plain(form: dict[str, Any]) -> None:
    good = {"task": "classification", "x": {"": [[4], "float32"]}, "y": [[], "int64"], "outputs": 3}
    schema = good | {"classes": ["a", "b", "c"], "features": []}
    assert hello_fault({"samples": 10, "schema": schema}) == ""
    assert hello_fault({"samples": 10, "schema": schema | form})


def test_b8_control_characters_of_a_folder_are_not_shown(tmp_path: Path) -> None:
    """A stranger's folder has good checksums, and names that clear the screen."""
    folder = runner.start(config("rounds=1"), tmp_path / "run")
    about = json.loads((folder.path / "run.json").read_text())["content"]
    about["clients"][0] = "\x1b[2Jada\x9b\x07"
    write_json(folder.path / "run.json", about)
    line = {"round": 1, "faults": [{"client": "\x1b[31mbo", "round": 1, "function": "f", "reason": "\x00"}]}
    (folder.path / "metrics.jsonl").write_bytes(round_line(line))
    assert RunFolder(folder.path).about["clients"][0].isprintable()
    fault = RunFolder(folder.path).metrics()[0]["faults"][0]
    assert all(text.isprintable() for text in (fault["client"], fault["reason"]))
