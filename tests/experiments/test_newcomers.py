"""Clients held out of a run, and newcomers that get a model from a finished one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

from fedtailor import data
from fedtailor.data.sources.table_folder import load_newcomer
from fedtailor.errors import ConfigError, DataError, RunError, UserError
from fedtailor.experiments import runner
from fedtailor.experiments.building import hold_out
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import RunFolder, read_json
from fedtailor.serving.onboard import onboard
from fedtailor.studies.grid import Cell
from fedtailor.studies.reproduce import measured
from tests.helpers import assert_equal, make_data
from tests.small import DIGITS, config, files, records, stop_after

QUICK = ("rounds=2", "algorithm.name=fedrep", "algorithm.head_epochs=1")


@pytest.mark.parametrize(("share", "count"), [(0.25, 1), (0.5, 2), (0.01, 1), (0.7, 3)])
def test_held_out(share: float, count: int) -> None:
    whole = make_data()
    seen, unseen = hold_out(whole, share, seed=5)
    assert len(unseen.clients) == count
    assert sorted(seen.clients + unseen.clients) == sorted(whole.clients)
    assert hold_out(whole, share, seed=5)[1].clients == unseen.clients
    for part in (seen, unseen):
        for i, name in enumerate(part.clients):
            for split in ("train", "val", "test"):
                x, y = getattr(whole, split).of(whole.clients.index(name))
                assert torch.equal(getattr(part, split).of(i)[0], x)
                assert torch.equal(getattr(part, split).of(i)[1], y)
    assert f"{count} of 4 clients take no part" in seen.notes[-1]


def test_somebody_must_train() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.unseen.*0\.9.*\b4\b"):
        hold_out(make_data(), 0.9, seed=0)


def test_unseen_clients_are_measured_at_the_end(tmp_path: Path) -> None:
    wanted = config(*QUICK, "evaluation.unseen=0.25", "evaluation.unseen_epochs=2")
    folder = runner.start(wanted, tmp_path / "straight")
    results = folder.results
    assert results is not None
    (name,) = results["unseen"]["names"]
    assert name not in folder.about["clients"]
    assert len(results["last"]["clients"]["accuracy"]) == 3
    last, unseen = results["last"]["test"]["accuracy"]["mean"], results["unseen"]["test"]["accuracy"]["mean"]
    assert results["unseen"]["clients"]["accuracy"] == [unseen]
    assert results["unseen"]["gap"]["accuracy"] == pytest.approx(last - unseen)
    assert measured(Cell("", 0, folder.path, wanted), "unseen") == unseen
    body = folder.personal(folder.about["clients"][0], "last")["hidden.0.weight"]
    assert torch.equal(folder.personal(name, "unseen")["hidden.0.weight"], body)  # only its head is its own

    # those who train know nothing of it, and a resumed run ends the same
    with pytest.raises(KeyboardInterrupt):
        runner.start(wanted, tmp_path / "stopped", listener=stop_after(1))
    assert records(runner.resume(tmp_path / "stopped")) == records(folder)
    # the same as a newcomer from outside
    (tmp_path / "data.toml").write_text(tomli_w.dumps({"data": DIGITS["data"]}))
    onboard(folder.path, tmp_path / "data.toml", name, epochs=2)
    assert_equal(folder.newcomer(name), folder.personal(name, "unseen"), tolerance=0)


def test_without_unseen_clients_a_task_is_what_it_was() -> None:
    assert "unseen" not in str(config().plain())
    assert config().task_id != config("evaluation.unseen=0.5").task_id


@pytest.fixture
def digits(tmp_path: Path) -> RunFolder:
    """A finished run of four clients; more.toml has a newcomer."""
    (tmp_path / "more.toml").write_text(tomli_w.dumps({"data": DIGITS["data"] | {"clients": 6}}))
    return runner.start(config(*QUICK), tmp_path / "run")


def test_a_newcomer_by_configuration(digits: RunFolder, tmp_path: Path) -> None:
    before = records(digits)
    path, samples, metrics, _ = onboard(digits.path, tmp_path / "more.toml", "client-05", epochs=1)
    assert path == digits.path / "newcomers" / "client-05"
    assert files(path) == ["client-05.safetensors", "index.json", "newcomer.json"]
    assert sum(samples.values()) == 40
    assert 0 <= metrics["test"]["accuracy"] <= 1
    assert set(digits.newcomer("client-05")) == set(digits.personal("client-00"))
    about = read_json(path / "newcomer.json")
    assert (about["round"], about["epochs"], about["test"]) == (2, 1, metrics["test"])
    assert records(digits) == before


def test_one_client_may_have_any_name(digits: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(tomli_w.dumps({"data": DIGITS["data"] | {"clients": 1}}))
    path, _, _, _ = onboard(digits.path, tmp_path / "one.toml", "Anna_B.2")
    assert path.name == "Anna_B.2"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("client-05", {"data": {"source": "digits", "clientz": 3}}, 'unknown key "data.clientz"'),
        ("client-05", {"rounds": 3}, "has no [data] table"),
        ("client-00", {"data": {"source": "digits"}}, "a client of the run already"),
        ("nobody", {"data": {"source": "digits"}}, 'has several clients and none is "nobody"'),
        ("anna", {"data": {"source": "polynomial", "clients": 1}}, "task of its samples is regression, of the run's"),
        ("../anna", {"data": {"source": "digits", "clients": 1}}, '--name "../anna": use letters'),
        ("", {"data": {"source": "digits", "clients": 1}}, '--name "": use letters'),
    ],
)
def test_what_does_not_fit_leaves_nothing(
    digits: RunFolder, tmp_path: Path, name: str, content: dict[str, Any], message: str
) -> None:
    (tmp_path / "wrong.toml").write_text(tomli_w.dumps(content))
    with pytest.raises(UserError) as error:
        onboard(digits.path, tmp_path / "wrong.toml", name)
    assert message in str(error.value)
    assert not (digits.path / "newcomers").exists()


def test_what_is_there_stays(digits: RunFolder, tmp_path: Path) -> None:
    onboard(digits.path, tmp_path / "more.toml", "client-04")
    before = digits.newcomer("client-04")
    with pytest.raises(RunError, match=r"client-04.*--name"):
        onboard(digits.path, tmp_path / "more.toml", "client-04", epochs=5)
    assert_equal(digits.newcomer("client-04"), before, tolerance=0)


def test_a_failed_write_leaves_nothing(digits: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedtailor.experiments.store.os.rename", full)
    with pytest.raises(OSError, match="No space left"):
        onboard(digits.path, tmp_path / "more.toml", "client-04")
    assert files(digits.path / "newcomers") == []


def test_the_run_must_be_finished(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        runner.start(config(*QUICK), tmp_path / "run", listener=stop_after(1))
    with pytest.raises(RunError, match=r"run: .*fedtailor resume"):
        onboard(tmp_path / "run", tmp_path / "more.toml", "client-05")


def write_site(path: Path, seed: int, rows: int = 60, shift: float = 0.0) -> None:
    rng = np.random.default_rng(seed)
    age, dose = rng.normal(50 + shift, 9, rows), rng.normal(3, 1, rows)
    arm = rng.choice(["a", "b"], rows)
    outcome = np.where(age / 10 + dose + rng.normal(0, 1, rows) > 8, "yes", "no")
    lines = ["age,dose,arm,outcome"]
    lines += [f"{a:.3f},{d:.3f},{b},{o}" for a, d, b, o in zip(age, dose, arm, outcome, strict=True)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def sites(tmp_path: Path) -> dict[str, Any]:
    for seed, name in enumerate(("north", "south")):
        write_site(tmp_path / "sites" / f"{name}.csv", seed, shift=10.0 * seed)
    return {"source": "folder", "path": str(tmp_path / "sites"), "target": "outcome"}


@pytest.mark.parametrize("standardise", ["pooled", "client", "none"])
def test_a_file_is_prepared_as_those_of_the_run(sites: dict[str, Any], tmp_path: Path, standardise: str) -> None:
    checked = parse({"data": sites | {"standardise": standardise, "test": 0.0, "val": 0.0}}).data
    there = data.load(checked, seed=0)
    copy = tmp_path / "copy.csv"
    copy.write_text((tmp_path / "sites" / "south.csv").read_text())
    mine = load_newcomer(checked, copy, "copy", seed=0)
    assert (mine.clients, mine.features, mine.classes) == (("copy",), there.features, there.classes)
    for found, wanted in zip(mine.train.of(0), there.train.of(1), strict=True):
        torch.testing.assert_close(found, wanted)  # scaled by north and south, not counting the copy


def test_a_newcomer_by_file(sites: dict[str, Any], tmp_path: Path) -> None:
    folder = runner.start(parse({"rounds": 2, "data": sites, "model": {"hidden": [4]}}), tmp_path / "run")
    write_site(tmp_path / "west.csv", 7, shift=5.0)
    _, samples, metrics, _ = onboard(folder.path, tmp_path / "west.csv", "west")
    assert samples == {"train": 39, "val": 6, "test": 15}
    assert 0 <= metrics["test"]["accuracy"] <= 1


@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        (
            "west.csv",
            ("arm", "arms"),
            'west.csv: no column "arm", which every client of the run has; did you mean "arms"?',
        ),
        ("west.csv", ("outcome", "out"), 'west.csv: no column "outcome"'),
        (
            "west.csv",
            (",yes", ",maybe"),
            'target column "outcome" has the class "maybe", which no client of the run has',
        ),
        ("west.csv", (",a,", ",c,"), 'column "arm" has the value "c", which no client of the run has; known: a, b'),
        ("west.csv", (",a,", ",,"), 'column "arm" has the value "missing", which no client of the run has'),
        ("west.csv", (",yes", ","), 'target column "outcome" has no value in'),
        ("west.csv", ("age,dose", "age,age"), 'column "age" appears more than once'),
        ("west.toml", ("", ""), "west.toml: not a data file; the run reads .csv"),
        ("gone.csv", None, "gone.csv: cannot be read"),
    ],
)
def test_files_that_do_not_fit(
    sites: dict[str, Any], tmp_path: Path, file: str, spoil: tuple[str, str] | None, message: str
) -> None:
    if spoil is not None:
        write_site(tmp_path / file, 7)
        (tmp_path / file).write_text((tmp_path / file).read_text().replace(*spoil))
    with pytest.raises(DataError) as error:
        load_newcomer(parse({"data": sites}).data, tmp_path / file, "west", seed=0)
    assert message in str(error.value)


def test_text_where_a_number_belongs(sites: dict[str, Any], tmp_path: Path) -> None:
    write_site(tmp_path / "west.csv", 7)
    lines = (tmp_path / "west.csv").read_text().splitlines()
    (tmp_path / "west.csv").write_text("\n".join([lines[0], "old" + lines[1][lines[1].index(",") :], *lines[2:]]))
    with pytest.raises(DataError, match=r'"age".*"old".*\b1\b'):
        load_newcomer(parse({"data": sites}).data, tmp_path / "west.csv", "west", seed=0)


def test_a_name_of_the_run_is_taken(sites: dict[str, Any], tmp_path: Path) -> None:
    write_site(tmp_path / "west.csv", 7)
    with pytest.raises(DataError, match='"north" is a client'):
        load_newcomer(parse({"data": sites}).data, tmp_path / "west.csv", "north", seed=0)
