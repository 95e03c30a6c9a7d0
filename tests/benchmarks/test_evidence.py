"""Records of results pages: what a miniature notices, what check marks, and that pages are those of their records."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import evidence, miniature, records
from benchmarks.records import Provenance, RecordedPart, RecordedRow
from fedtailor import COUNT, MODEL, Algorithm, ClientContext, Federation, Model, Params, Tree, on_client
from fedtailor.experiments.building import load
from fedtailor.experiments.config import RunConfig, parse
from tests.docs.pages import ROOT
from tests.small import one_after_the_other

TASK: dict[str, Any] = {
    "rounds": 30,
    "data": {"source": "digits", "clients": 6, "alpha": 0.5},
    "model": {"hidden": [8]},
    "local": {"lr": 0.1, "batch_size": 8},
    "federation": {"clients_per_round": 4},
}


@dataclass(frozen=True)
class AsIs(Algorithm):
    """The mean of locally trained models."""

    keeps: ClassVar[str] = "nothing"

    def server_init(self, model: Model) -> Params:
        return model.params

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def local(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return {}, (me.sgd(w, epochs=2), me.n)

    def round(self, fed: Federation, w: Params) -> Params:
        models, n = fed.map(self.local, w)
        return fed.mean(models, n)

    def personal(self, me: ClientContext, w: Params) -> Params:
        return w


@dataclass(frozen=True)
class Renamed(Algorithm):
    """The same under other names."""

    keeps: ClassVar[str] = "nothing"

    def server_init(self, model: Model) -> Params:
        return model.params

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def train_on_own_samples(self, context: ClientContext, common: Params) -> tuple[Tree, Tree]:
        trained = context.sgd(common, epochs=2)
        return {}, (trained, context.n)

    def round(self, fed: Federation, common: Params) -> Params:
        return fed.mean(*fed.map(self.train_on_own_samples, common))

    def personal(self, me: ClientContext, common: Params) -> Params:
        return common


@dataclass(frozen=True)
class LongerStep(AsIs):
    """Another update: a hundredth more."""

    def round(self, fed: Federation, w: Params) -> Params:
        mean = super().round(fed, w)
        return {k: w[k] + 1.01 * (mean[k] - w[k]) for k in w}


def configured(algorithm: str, **further: Any) -> RunConfig:
    made: RunConfig = parse(TASK | further | {"algorithm": {"name": algorithm}})
    return made


def digest_of(config: RunConfig) -> miniature.Digest:
    return miniature.digest(config, miniature.shrink(load(config)))


def test_other_names_change_nothing_and_another_update_does() -> None:
    as_is, renamed, longer = (digest_of(configured(f"{__name__}:{k.__name__}")) for k in (AsIs, Renamed, LongerStep))
    assert miniature.agree(as_is, renamed)
    assert not miniature.agree(as_is, longer)
    assert miniature.agree(as_is, tuple(v * (1 + 1e-5) for v in as_is))  # another machine


def test_a_term_that_acts_from_the_second_step_on_is_noticed() -> None:
    near, nearer = (parse(TASK | {"algorithm": {"name": "fedprox", "mu": mu}}) for mu in (0.01, 0.1))
    assert not miniature.agree(digest_of(near), digest_of(nearer))


@pytest.mark.parametrize("change", [{"local": {"lr": 0.11, "batch_size": 8}}, {"seed": 1}, {"model": {"hidden": [9]}}])
def test_another_configuration_is_another_miniature(change: dict[str, Any]) -> None:
    assert not miniature.agree(digest_of(configured("fedavg")), digest_of(configured("fedavg", **change)))


def test_only_size_is_less() -> None:
    environment = {"epochs": [2, 1, 1, 1, 1, 1], "answer": [0.5] * 6}
    config = configured("ditto", environment=environment, data=TASK["data"] | {"test": 0.3})
    few = miniature.shrink(load(config))
    assert [len(few.clients), int(few.train.sizes.max()), int(few.test.sizes.max())] == [3, 12, 6]
    small = miniature.shrunk(config, 3)
    assert (small.rounds, small.federation.clients_per_round) == (2, 2)
    assert (small.environment.epochs, small.environment.answer) == ((2, 1, 1), (0.5, 0.5, 0.5))
    assert small.local == config.local.model_copy(update={"batch_size": 4})
    assert (small.algorithm, small.model, small.data) == (config.algorithm, config.model, config.data)
    weighted = parse(TASK | {"algorithm": {"name": "duw-fedavg", "outer_iterations": 400, "outer_lr": 0.5}})
    options = miniature.shrunk(weighted, 3).algorithm.options
    assert options == {"outer_iterations": 2, "horizon": 2, "outer_lr": 0.5}


def test_equal_miniatures_run_once_and_what_has_no_data_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(miniature, "PROCESSES", 1)
    monkeypatch.delenv("FEDTAILOR_DATA", raising=False)
    absent = configured("fedavg", data={"source": "mnist", "clients": 3})
    found = miniature.digests({"a": configured("fedavg"), "b": configured("fedavg"), "c": absent}, tmp_path)
    assert found["a"] == found["b"]
    assert found["c"] is None


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one small table and one comparison."""
    monkeypatch.chdir(tmp_path)
    for module in (evidence, records):
        monkeypatch.setattr(module, "ROOT", tmp_path)
        monkeypatch.setattr(module, "RESULTS", tmp_path / "docs")
    monkeypatch.setattr(records, "RECORDS", tmp_path / "docs" / "records")
    monkeypatch.setattr(evidence, "CONFIGS", tmp_path / "configs")
    monkeypatch.setattr(records, "commit", lambda: "abc1234")
    monkeypatch.setattr(miniature, "PROCESSES", 1)
    one_after_the_other(monkeypatch)
    (tmp_path / "configs" / "own").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.intro.md").write_text("# A page\n")
    (tmp_path / "configs" / "own" / "table.toml").write_text("""
title = "A table"
metric = "accuracy"
unit = "%"
seeds = 2
columns = [{ name = "small" }, { name = "large", set = { "local.lr" = 0.5 } }]

[common]
rounds = 2
data = { source = "digits", clients = 3, max_samples = 40 }
model = { name = "mlp", hidden = [4] }

[[rows]]
name = "FedAvg"
set = { "algorithm.name" = "fedavg" }
paper = ["50.00", "60.00"]

[[rows]]
name = "FedPer"
set = { "algorithm.name" = "fedper" }
""")
    return tmp_path


def test_a_table_is_recorded_marked_and_written(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = evidence.table("own/table")
    records.write("page", [part])
    (saved,) = records.read("page")
    row = saved.row("FedAvg")
    assert row == part.row("FedAvg")
    assert (row.made.commit, row.digest_commit, row.made.seeds) == ("abc1234", "abc1234", (0, 1))
    assert row.made.command == "fedtailor reproduce own/table"
    assert row.digests.keys() == {"small", "large"}
    assert row.cells["small"].endswith("(50.00)")
    assert evidence.check(["page"], None) == 0
    text = (site / "docs" / "page.md").read_text()
    assert f"| FedAvg | {row.cells['small']} | {row.cells['large']} | a |" in text
    assert records.CHANGED not in text

    path = site / "configs" / "own" / "table.toml"  # one row runs something else now
    path.write_text(path.read_text().replace('"fedper"', '"fedper", "algorithm.epochs" = 2'))
    capsys.readouterr()
    assert evidence.check(["page"], None) == 1
    assert "page: fedtailor reproduce own/table: FedPer: small, large" in capsys.readouterr().out
    assert (site / "docs" / "page.md").read_text().count(f"a, {records.CHANGED} |") == 1
    assert records.read("page")[0].row("FedPer").changed == ("small", "large")
    assert evidence.check(["page"], None) == 0  # marked already


def test_rows_of_one_table_come_one_after_the_other(site: Path) -> None:
    first = evidence.table("own/table", rows="FedPer", seeds=1)
    parts = [first]
    evidence.merge(parts, evidence.table("own/table", rows="FedAvg", seeds=1))
    assert [row.name for row in parts[0].rows] == ["FedPer", "FedAvg"]
    kept = json.loads((site / "runs" / "own-table-cpu" / evidence.MADE).read_text())
    assert set(kept) == {f"fed{x}_{c}-seed0" for x in ("avg", "per") for c in ("small", "large")}


def test_a_row_may_have_some_of_its_columns(site: Path) -> None:
    part = evidence.table("own/table", rows="FedAvg", only=["large"], seeds=1)
    assert part.columns == ("", "small", "large")
    assert part.row("FedAvg").cells.keys() == part.row("FedAvg").digests.keys() == {"large"}
    assert f"| FedAvg |  | {part.row('FedAvg').cells['large']} | a |" in records.markdown(part)
    assert not (site / "runs" / "own-table-cpu" / "fedavg_small-seed0").exists()


def test_what_is_shown_of_rows_without_runs() -> None:
    lost = RecordedRow("A", {"x": "1"}, Provenance("0.1.0", "1111111", (0, 2), is_kept=False), digests={"x": (1.0,)})
    lost.digest_commit = "2222222"
    kept = RecordedRow("B", {"x": "2"}, Provenance("0.2.0", "3333333", (0,)))
    part = RecordedPart("own/table", "T", "fedtailor reproduce own/table", columns=("", "x"), rows=[lost, kept])
    lines = records.markdown(part).splitlines()
    assert "| A | 1 | a |" in lines
    assert "| B | 2 | b |" in lines
    (a,) = [line for line in lines if line.startswith("- a: ")]
    assert all(word in a for word in ("0.1.0", "1111111", "seeds 0, 2", "2222222", "lost"))


@pytest.mark.parametrize("page", records.pages())
def test_pages_are_those_of_their_records(page: str) -> None:
    intro = (ROOT / "docs" / "results" / f"{page}.intro.md").read_text(encoding="utf-8")
    written = (ROOT / "docs" / "results" / f"{page}.md").read_text(encoding="utf-8")
    assert written == records.page_text(intro, records.read(page))
