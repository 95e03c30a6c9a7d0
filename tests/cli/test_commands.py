"""What each command prints and writes when all is well, and when a run stops half-way."""

from __future__ import annotations

import errno
import os
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from fedtailor import __version__, algorithms
from fedtailor.cli import main as cli
from fedtailor.cli import output
from fedtailor.core.algorithm import COUNT, LEARNS, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Params, Tree
from fedtailor.data import SOURCES
from fedtailor.engines import ENGINES
from fedtailor.experiments import run_state as rounds
from fedtailor.experiments import runner
from fedtailor.experiments.config import RunConfig, parse
from fedtailor.experiments.progress import show_grid, show_progress
from fedtailor.experiments.runner import Progress
from fedtailor.experiments.store import RunFolder, read_json
from fedtailor.models import MODELS
from fedtailor.studies import grid
from tests.cli.conftest import Call
from tests.small import config, interrupt_after_a_run, one_after_the_other, records, stop_after

COMMANDS = (
    "demo",
    "init",
    "schema",
    "download",
    "fit",
    "predict",
    "export",
    "onboard",
    "update",
    "model",
    "advise",
    "leave",
    "check",
    "run",
    "resume",
    "compare",
    "reproduce",
    "list",
    "show",
    "explain",
    "drift",
    "report",
    "watch",
    "federation",
)
TABLES = (
    "demo",
    "fit",
    "onboard",
    "check",
    "run",
    "resume",
    "compare",
    "reproduce",
    "list",
    "show",
    "explain",
    "drift",
)


def test_version(call: Call) -> None:
    assert call("--version") == (0, f"fedtailor {__version__}\n", "")


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_fits_80_columns(call: Call, command: tuple[str, ...]) -> None:
    code, out, err = call(*command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: {' '.join(('fedtailor', *command))}")
    assert max(map(len, out.splitlines())) <= 80
    if not command:
        assert [line.split()[0] for line in out.split("Commands:\n")[1].splitlines()[: len(COMMANDS)]] == list(COMMANDS)


def test_notes_are_aligned_for_a_terminal() -> None:
    notes = ["", "", "Tests:", "", "| against | p |", "|---|---:|", "| Local | 0.5 |", "", "", "End."]
    assert output.align_tables(notes) == ["Tests:", "", "against  p", "Local    0.5", "", "End."]


def test_commands_that_print_a_table_take_json(call: Call) -> None:
    federation = ("status", "audit", "personal", "certificates")
    for command in (*((name,) for name in TABLES), *(("federation", name) for name in federation)):
        assert "--json" in call(*command, "--help")[1], command


def test_unknown_command_and_missing_argument(call: Call) -> None:
    for arguments, message in ((("rnu",), "No such command 'rnu'"), (("run",), "Missing argument 'CONFIG'")):
        code, _, err = call(*arguments)
        assert code == 2
        assert message in err


@pytest.mark.parametrize(
    ("kind", "names"),
    [("algorithms", algorithms.algorithms()), ("data", SOURCES), ("models", MODELS), ("engines", ENGINES)],
)
def test_list_names_all_there_is(call: Call, kind: str, names: dict[str, Any]) -> None:
    code, out, err = call("list", kind)
    assert (code, err) == (0, "")
    first = [line.split()[0] for line in out.splitlines() if line.strip() and not line.startswith((" ", "learns "))]
    wanted = [*names, *(["module:Class"] if kind == "models" else [])]
    assert (sorted(first) if kind == "algorithms" else first) == wanted
    assert max(map(len, out.splitlines())) <= 80
    everything = call("list").out
    assert out in everything
    assert f"{kind}\n" in everything


def test_list_says_what_is_private_sent_and_optional(call: Call) -> None:
    ditto = call("list", "algorithms").out.split("\nditto")[1].split("\nfedavg")[0]
    assert "private: a whole personal model" in ditto
    assert "sent: model, sample count" in ditto
    assert re.search(r"\b1\b.*personal_epochs.*\b1\b.*1\.0", ditto)
    assert "hidden = (128, 128)" in call("list", "models").out


def test_list_searches_in_what_is_learned_and_kept(call: Call) -> None:
    def found(*options: str) -> list[str]:
        lines = call("list", "algorithms", *options).out.splitlines()
        return [line.split()[0] for line in lines if line.strip() and not line.startswith((" ", "learns "))]

    out = call("list", "algorithms").out
    titles = [line.split()[1].rstrip(":") for line in out.splitlines() if line.startswith("learns ")]
    assert titles == list(LEARNS)
    assert {"duw-fedavg", "fedlaw", "pfedla"} <= set(found("--learns", "weights"))
    assert {"fedper", "fedrep", "fedpac"} <= set(found("--keeps", "head"))
    assert found("--learns", "groups") == ["cfl", "fedem", "ifca"]
    assert found("--learns", "masks", "--keeps", "entries") == ["fedcac", "fedselect"]
    assert sorted(name for key in LEARNS for name in found("--learns", key)) == list(algorithms.algorithms())
    for options, message in (
        (("--learns", "weight"), 'error: list: --learns: nothing called "weight"; did you mean "weights"?'),
        (("--learns", "groups", "--keeps", "head"), 'error: list: no algorithm learns "groups" and keeps "head"'),
    ):
        assert call("list", "algorithms", *options) == (2, "", message + "\n")
    assert re.search(r"--learns.*--keeps", call("list", "data", "--keeps", "head").err)


def test_list_of_something_unknown(call: Call) -> None:
    assert call("list", "algorithm") == (2, "", 'error: list: nothing called "algorithm"; did you mean "algorithms"?\n')


def test_init_writes_what_run_reads(call: Call, tmp_path: Path) -> None:
    assert call("init") == (0, "wrote config.toml; run it with: fedtailor run config.toml\n", "")
    path = tmp_path / "config.toml"
    assert parse(tomllib.loads(path.read_text())) == RunConfig()
    path.write_text("# mine\n")
    assert call("init") == (2, "", "error: config.toml: exists already; --force replaces it\n")
    assert path.read_text() == "# mine\n"
    assert call("init", "--force").code == 0
    code, out, err = call("run", "config.toml", "--set", "rounds=1", "--set", "algorithm.head_epochs=1")
    assert (code, err) == (0, "")
    assert "runs/digits-fedrep-seed0" in out
    assert (tmp_path / "runs/digits-fedrep-seed0/results.json").exists()


def test_run_tells_rounds_in_plain_lines_and_shows_the_result(call: Call, tmp_path: Path) -> None:
    code, out, err = call("run", "small.toml", "--set", "algorithm.name=ditto", "--set", "algorithm.lam=0.5")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("ditto  round 1/2  val accuracy 0.")
    assert any(line.startswith("ditto  round 2/2  val accuracy 0.") and line.endswith("  4 clients") for line in lines)
    assert "\x1b" not in out
    folder = RunFolder(tmp_path / "runs/digits-ditto-seed0")
    assert folder.results is not None
    assert f"{100 * folder.results['last']['test']['accuracy']['mean']:.2f}" in out
    assert "algorithm  ditto  lam=0.5" in lines
    assert folder.about["command"] == "fedtailor run small.toml --set algorithm.name=ditto --set algorithm.lam=0.5"
    assert call("run", "small.toml", "--set", "algorithm.name=ditto").code == 0
    assert (tmp_path / "runs/digits-ditto-seed0-2/results.json").exists()


def test_show_of_a_finished_run(call: Call, tmp_path: Path) -> None:
    runner.start(config("rounds=2", "algorithm.name=fedavg"), tmp_path / "mine")
    code, out, err = call("show", "mine")
    assert (code, err) == (0, "")
    assert re.search(r"\b4\b.*\b104\b", out)
    assert "model      mlp, 610 parameters\n" in out
    assert "engine     vmap " in out
    assert "hurt       unknown" in out
    assert "client-00" not in out
    assert "faults" not in out
    local = runner.start(config("rounds=2", "algorithm.name=local"), tmp_path / "local").results
    mine = RunFolder(tmp_path / "mine").results
    assert local is not None
    assert mine is not None
    pairs = list(zip(mine["last"]["clients"]["accuracy"], local["last"]["clients"]["accuracy"], strict=True))
    out = call("show", "mine", "--clients").out
    assert "unknown" not in out
    last = next(line for line in out.splitlines() if "last round" in line)
    assert f"{100 * sum(a < b for a, b in pairs) / 4:.0f} %" in last
    for client, value in zip(("client-00", "client-03"), (pairs[0][0], pairs[3][0]), strict=True):
        row = next(line for line in out.splitlines() if client in line)
        assert f"{100 * value:.2f}" in row


def test_show_of_an_unfinished_run(call: Call, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        runner.start(config("rounds=3"), tmp_path / "half", None, stop_after(2))
    with (tmp_path / "half/metrics.jsonl").open("a") as file:
        file.write('{"round": 3')  # killed while writing
    code, out, _ = call("show", "half")
    assert code == 0
    assert out.splitlines()[-1] == "status     2 of 3 rounds; continue with: fedtailor resume half"


def test_client_names_are_printed_as_they_are(call: Call, tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    for name in ("[red]ward", "b[1]"):
        (tmp_path / "sites" / f"{name}.csv").write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(20)))
    task = {"rounds": 1, "data": {"source": "folder", "path": "sites", "target": "y"}, "model": {"name": "linear"}}
    runner.start(config("algorithm.name=local", task=task), tmp_path / "run")
    out = call("show", "run", "--clients").out
    assert "[red]ward" in out
    assert "b[1]" in out


LONG = "hospital_of_a_long_name_in_the_north_of_the_country_"


def test_figures_of_many_columns_and_long_names_are_not_cut(call: Call, tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    for site in range(3):
        lines = [",".join([*(str((7 * i + k * k + site) % 11) for k in range(10)), str(i + site)]) for i in range(30)]
        header = ",".join([*(f"feature_number_{k}" for k in range(10)), "y"])
        (tmp_path / "sites" / f"{LONG}{site}.csv").write_text("\n".join([header, *lines]) + "\n")
    of_data = {"source": "folder", "path": "sites", "target": "y", "task": "regression"}
    task = {"rounds": 1, "data": of_data, "model": {"name": "linear"}, "algorithm": {"name": "learn2pfed"}}
    results = runner.start(config(task=task), tmp_path / "run").results
    assert results is not None
    shown, explained = call("show", "run", "--clients").out, call("explain", "run").out
    for value in results["last"]["clients"]["rmse"]:
        assert f" {value:.4g} " in shown
    parts = read_json(tmp_path / "run/shares.json")["clients"]
    for name in (f"feature_number_{k}" for k in range(10)):
        row = next(line for line in explained.splitlines() if f" {name} " in line)
        assert [cell.strip() for cell in row.split("│")[2:-1]] == [f"{client[name]:.2f}" for client in parts.values()]
    for out in (shown, explained):
        tables = [line for line in out.splitlines() if line[:1] in "┃│"]
        assert not any("…" in line for line in tables)
        assert max(map(len, tables)) <= 80


def test_table_of_too_many_columns_is_several(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.console, "width", 80)
    columns = ["round", *(f"[b]site {k}" for k in range(30))]
    output.print_table("weights", columns, [[str(r), *(f"{r}.{k:03d}" for k in range(30))] for r in (1, 2)])
    out = capsys.readouterr().out
    assert out.count("weights") == out.count("round") == 6  # five stand beside the first
    for k in range(30):
        assert f" [b]site {k} " in out
        assert f" 1.{k:03d} " in out


@dataclass(frozen=True)
class Broken(Algorithm):
    """Its clients fail from some round on, by an error or by a count that cannot be."""

    fails_from: int = 2
    how: str = "error"

    title: ClassVar[str] = "Broken"

    @on_client(sends=COUNT)
    def local(self, me: ClientContext) -> tuple[Tree, Tree]:
        bad = me.round >= self.fails_from
        if bad and self.how == "error":
            raise ValueError("my own mistake")
        return None, me.n * 0 - 1 if bad else me.n

    def client_init(self, me: ClientContext) -> Tree:
        return None

    def round(self, fed: Federation, server: Tree) -> Tree:
        fed.map(self.local)
        return server

    def personal(self, me: ClientContext, server: Tree) -> Params:
        return me.model.params


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "_registered", {})
    algorithms.register(Broken)


@pytest.mark.usefixtures("broken")
def test_show_of_a_run_with_faults(call: Call, tmp_path: Path) -> None:
    runner.start(config("algorithm.name=broken", "algorithm.how=count", "rounds=2"), tmp_path / "run")
    lines = call("show", "run").out.splitlines()
    assert "faults     4 replies rejected, 1 rounds abandoned:" in lines
    assert "           round 2, client-03, local: count -1 is not positive" in lines


@pytest.mark.usefixtures("broken")
def test_error_of_an_algorithm_names_it_and_how_to_go_on(call: Call) -> None:
    code, _, err = call("run", "small.toml", "--set", "algorithm.name=broken", "--out", "my run")
    assert code == 1
    first, second = err.splitlines()
    assert first.startswith(
        "error: every client failed; the first: Broken.local, client client-00, round 2: ValueError"
    )
    assert "my own mistake" in first
    assert second == "the last checkpoint is intact; continue with: fedtailor resume 'my run'"


def test_interrupt_says_how_to_go_on(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = runner.start(config("rounds=2"), tmp_path / "whole")

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rounds.RunState, "finish", interrupt)
        code, _, err = call("run", "small.toml", "--out", "it's mine")
    assert code == 130
    assert err.startswith("interrupted; continue with: fedtailor resume ")
    command = shlex.split(err.split("continue with: ")[1])
    assert command == ["fedtailor", "resume", "it's mine"]
    assert call(*command[1:]).code == 0
    assert records(RunFolder(tmp_path / "it's mine")) == records(whole)
    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "build_experiment", interrupt)
        assert call("run", "small.toml", "--out", "empty") == (130, "", "interrupted before the run began\n")
        assert call("resume", "it's mine").code == 0  # finished: nothing to interrupt


def test_interrupted_comparison_says_how_to_go_on(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    one_after_the_other(monkeypatch)
    setting = 'compare.algorithms=["local", "fedavg"]'
    arguments = ["compare", "small.toml", "--set", setting, "--data-root", "my data", "--out", "grid"]
    with monkeypatch.context() as patch:
        patch.setattr("fedtailor.studies.compare.run_grid", interrupt)
        assert call(*arguments) == (130, "", "interrupted before the run began\n")
    with monkeypatch.context() as patch:
        patch.setattr(grid, "_pause", interrupt_after_a_run)
        code, _, err = call(*arguments)
    assert code == 130
    again = shlex.split(err.split("continue with: ")[1])
    assert again == ["fedtailor", *arguments]
    assert "fedavg" in call(*again[1:]).out


def test_full_disk(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = runner.start(config("rounds=5", "algorithm.name=ditto"), tmp_path / "whole")
    path, original = tmp_path / "full", os.fsync

    def fsync(file: int) -> None:
        for part in (path / "checkpoint").glob("state-000003.*.part"):
            if part.stat().st_ino == os.fstat(file).st_ino:
                raise OSError(errno.ENOSPC, "No space left on device")
        original(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        arguments = ("--set", "rounds=5", "--set", "algorithm.name=ditto", "--out", path)
        code, _, err = call("run", "small.toml", *arguments)
    assert code == 1
    assert err == (
        f"error: {path}: no space left on the disk; the last checkpoint is intact. "
        f"Free some, then continue with: fedtailor resume {path}\n"
    )
    assert sorted(p.name for p in (path / "checkpoint").glob("state*")) == ["state-000002.safetensors"]
    loaded = RunFolder(path).load_checkpoint()
    assert loaded is not None
    assert loaded[0]["round"] == 2
    assert call("resume", path).code == 0
    assert records(RunFolder(path)) == records(whole)


def test_show_of_a_comparison(call: Call, tmp_path: Path) -> None:
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid/compare.json").write_text("{}")
    (tmp_path / "grid/table.md").write_text("| algorithm |\n|---|\n| Ditto |\n")
    assert call("show", "grid") == (0, "| algorithm |\n|---|\n| Ditto |\n", "")


def test_bar_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=80, force_terminal=True)
    with show_progress(console, "[x]ditto") as listener:
        listener(Progress(3, 4, "accuracy", 0.5, 7, 2, ("round 3: site[b] rejected",)))
    out = capsys.readouterr().out
    assert "round 3: site[b] rejected" in out
    assert "3/4" in out
    assert "[x]ditto" in out
    assert "val accuracy 0.5000" in out
    assert "7 clients" in out
    assert "2 rejected" in out
    with show_grid(console) as told:
        told("ditto-seed0", 1, 4)
        told("ditto-seed0", 2, 4)
    out = capsys.readouterr().out
    assert "ditto-seed0" in out
    assert "2/4" in out


def test_plain_lines_are_at_most_one_a_second_and_the_last(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([10.0, 10.0, 10.5, 11.2, 11.2, 11.3, 11.3])
    monkeypatch.setattr("fedtailor.experiments.progress.time.monotonic", lambda: next(now))
    with show_progress(Console(), "ditto") as listener:
        for round in range(1, 5):
            news = ("round 2: b rejected: not finite",) if round == 2 else ()
            listener(Progress(round, 4, "accuracy", float("nan") if round == 3 else 0.25, 7, round // 4, news))
    assert capsys.readouterr().out.splitlines() == [
        "ditto  round 1/4  val accuracy 0.2500  7 clients",
        "round 2: b rejected: not finite",
        "ditto  round 3/4  7 clients",
        "ditto  round 4/4  val accuracy 0.2500  7 clients  1 rejected",
    ]
    monkeypatch.undo()
    with show_grid(Console()) as told:
        for round in (1, 2, 2):
            told("ditto-seed0", round, 2)
    assert capsys.readouterr().out == "ditto-seed0  2/2 rounds\n"


def test_help_does_not_wait_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    code = "import sys, fedtailor.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert cli.app.info.name == "fedtailor"
