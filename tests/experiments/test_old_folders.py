"""Folders of 0.1.0, which tell less and drew from other streams: used as they are, never mixed with new rounds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from fedtailor.errors import RunError
from fedtailor.experiments import runner
from fedtailor.experiments.config import CompareConfig, parse
from fedtailor.experiments.store import ABOUT, METRICS, RunFolder, read_json, write_json
from fedtailor.report.write import write
from fedtailor.serving.export import export
from fedtailor.studies.compare import GRID, local_reference, run_grid
from tests.cli.conftest import Call
from tests.cli.conftest import call as call
from tests.small import DIGITS, config, stop_after

NEW = ("streams", "checked_lines", "code")  # what the record of a run has since then


def age(path: Path) -> None:
    """Take away what 0.1.0 did not write."""
    write_json(path / ABOUT, {k: v for k, v in read_json(path / ABOUT).items() if k not in NEW})
    lines = [line.rpartition(', "check"')[0] + "}\n" for line in (path / METRICS).read_text().splitlines()]
    (path / METRICS).write_text("".join(lines))


def test_a_finished_run_is_shown_reported_exported_and_left_as_it_is(call: Call, tmp_path: Path) -> None:
    folder = runner.start(config("algorithm.name=ditto", "rounds=2"), tmp_path / "run")
    age(folder.path)
    before = folder.fingerprint()
    shown = call("show", "run")
    assert (shown.code, shown.err) == (0, "")
    assert write(folder.path).exists()
    assert export(folder.path, folder.about["clients"][0], "safetensors")[0].exists()
    assert runner.resume(folder.path).fingerprint() == before


def test_an_unfinished_run_does_not_go_on_with_other_random_numbers(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        runner.start(config("rounds=3"), tmp_path / "my run", None, stop_after(1))
    age(tmp_path / "my run")
    with pytest.raises(RunError) as refused:
        runner.resume(tmp_path / "my run")
    assert refused.value.code == "run.version"
    assert f"fedtailor run '{tmp_path / 'my run' / 'config.toml'}' --out NEW" in str(refused.value)
    assert len(RunFolder(tmp_path / "my run").metrics()) == 1


def test_a_comparison_from_before_there_was_a_key_goes_on(tmp_path: Path) -> None:
    def grid(*algorithms: str) -> CompareConfig:
        tables = DIGITS | {"rounds": 1, "compare": {"algorithms": list(algorithms), "seeds": [0]}}
        made: CompareConfig = parse(tables, CompareConfig)
        return made

    run = partial(run_grid, folder=tmp_path, data_root=None, listener=lambda cell, round, rounds: None)
    first = [cell.folder for cell in run(grid("local"))]
    saved = read_json(tmp_path / GRID)
    del saved["evaluation"]["batch_size"]
    write_json(tmp_path / GRID, dict(saved))
    about = dict(read_json(first[0] / ABOUT)) | {"task_id": "of another version"}
    write_json(first[0] / ABOUT, about)
    before = RunFolder(first[0]).fingerprint()
    local, fedavg = run(grid("local", "fedavg"))
    assert RunFolder(local.folder).fingerprint() == before
    assert local_reference(RunFolder(fedavg.folder)) == RunFolder(local.folder).results
    del saved["evaluation"]["every"]
    write_json(tmp_path / GRID, dict(saved) | {"rounds": 2})
    with pytest.raises(RunError, match=r"another task.* --fresh"):
        run(grid("local"))
