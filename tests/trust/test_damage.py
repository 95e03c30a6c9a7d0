"""One byte changed, a file cut short or gone: it is named, or what comes out is the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedtailor.cli.folder_commands import print_folder
from fedtailor.cli.operators import pause
from fedtailor.core.trees import items
from fedtailor.errors import UserError
from fedtailor.experiments import runner
from fedtailor.experiments.config import CompareConfig, parse
from fedtailor.flare.site import AUDIT
from fedtailor.report.write import page_of
from fedtailor.studies.compare import rows, run_grid
from fedtailor.studies.explain import explain
from fedtailor.studies.result_tables import files
from tests.flare.test_site import Asked
from tests.small import DIGITS, config, one_after_the_other
from tests.trust.folders import MAKERS
from tests.trust.sweep import sweep

Use = Callable[[Path], Any]


def tensors(tree: Any) -> list[tuple[str, list[Any]]]:
    return [(path, leaf.tolist()) for path, leaf in items(tree)]


def shown(path: Path) -> Any:
    print_folder(path, True)


def damages(content: bytes) -> dict[str, bytes | None]:
    """A byte here and there, a piece of it, nothing of it, no file."""
    places = sorted(
        {0, len(content) // 3, len(content) // 2, len(content) - 2, len(content) - 1} & set(range(len(content)))
    )
    changed = {f"byte {i}": content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in places}
    return {**changed, "half": content[: len(content) // 2], "nothing": b"", "no file": None}


def outcome(use: Use, path: Path) -> str:
    """What it gives, as text; an error for people by its name, any other is a failure."""
    try:
        return json.dumps(use(path), default=str)
    except UserError:
        return "named"


def test_t6_damage_to_a_comparison_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one_after_the_other(monkeypatch)
    grid: CompareConfig = parse(
        DIGITS | {"rounds": 1, "compare": {"algorithms": ["local"], "seeds": [0], "workers": 1}}, CompareConfig
    )
    silent = lambda cell, round, rounds: None  # noqa: E731
    for file, text in files(rows(run_grid(grid, Path("grid"), None, silent)), []).items():
        Path("grid", file).write_text(text)
    wanted = Path("grid/table.md").read_text()
    for what, content in damages(Path("grid/compare.json").read_bytes()).items():
        shutil.copytree("grid", what)
        (Path(what) / "compare.json").unlink() if content is None else (Path(what) / "compare.json").write_bytes(
            content
        )
        for use in (
            shown,
            lambda path: page_of(path) and None,
            lambda path: run_grid(grid, path, None, silent) and None,
        ):
            text, out = outcome(use, Path(what)), capsys.readouterr().out
            assert text == "named" or (text, out.strip()) in (("null", ""), ("null", wanted.strip())), what


def test_explain_names_what_was_learned_and_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner.start(parse(DIGITS | {"rounds": 1, "algorithm": {"name": "fedselect"}}), Path("run"))
    before = explain(Path("run"))
    checkpoint = list(Path("run").glob("checkpoint/*"))
    assert checkpoint
    for file in checkpoint:
        content = file.read_bytes()
        for changed in damages(content).values():
            file.unlink() if changed is None else file.write_bytes(changed)
            assert outcome(explain, Path("run")) in ("named", json.dumps(before))
        file.write_bytes(content)


def talk(folder: Path) -> tuple[list[str], list[str]]:
    """A server comes back to a site that has kept round 1: what it is answered, and what the site notes of errors."""
    made = Asked.__new__(Asked)
    made.file, made.folder, made.algorithm, made.number = folder / "site.toml", folder / "private", "fedrep", 0
    made.config = config("algorithm.name=fedrep", "data={source='sites'}", "model.dtype=float64")
    made.restart()
    made.hello()
    if made.site._data is None:
        return ["error"], []
    answers = [made.start(), made.begin(2, 1)]
    reply = made.call(2) if all("error" not in answer for answer in answers) else ({}, None)
    lines = [json.loads(line) for line in (made.folder / AUDIT).read_text().splitlines()]
    errors = [line["text"] for line in lines if "text" in line]
    return [str(a.get("error", "well")) for a in answers], [str(tensors(reply[1])), *errors]


def test_t6_damage_to_what_a_site_keeps_is_named(tmp_path: Path) -> None:
    made = Asked(tmp_path)
    made.start()
    made.begin(1, 0)
    made.call()
    assert "error" not in made.ask({"op": "keep", "round": 1})[0]
    made.ask(
        {"op": "evaluate", "round": 1, "splits": ["val"], "keep": "last"},
        made.experiment.algorithm.server_init(made.experiment.model),
    )
    pause(made.file.parent, off=True)
    root = made.file.parent
    wanted = talk(shutil.copytree(root, tmp_path / "whole"))
    assert wanted[0] == ["well", "well"]
    used = [p for p in (root / "private").rglob("*") if p.is_file() and p.name != AUDIT and "personal" not in p.parts]
    assert {p.name for p in used} >= {"run.json", "spent.json", "standing.json", "state+000001.safetensors"}
    for number, file in enumerate(used):
        for i, (what, changed) in enumerate(damages(file.read_bytes()).items()):
            copy = shutil.copytree(root, tmp_path / f"{number}-{i}")
            place = copy / file.relative_to(root)
            place.unlink() if changed is None else place.write_bytes(changed)
            answers, told = talk(copy)
            named = any("error" in a or "refuses" in a for a in answers) or any(file.name in text for text in told[1:])
            assert named or (answers, told) == wanted or changed is None, f"{file.name}: {what}: {answers} {told[1:]}"


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_t6_damage_in_every_reader_of_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes of each file; tools/damage.py takes all of them."""
    one_after_the_other(monkeypatch)
    swept = sweep(*MAKERS[name](tmp_path), most=2, commands=1)
    assert swept.wrong == []
    assert swept.count["named"] > 5 * swept.count["files"]
