"""Every mistake of a user: one clear line on stderr, exit code 2, nothing left behind."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from fedtailor.data.download import REMOTES
from fedtailor.experiments import runner
from fedtailor.experiments.store import write_json
from tests.cli.conftest import Call
from tests.small import config, files, stop_after

Refused = Callable[..., str]
GOOD = "age,sick\n" + "".join(f"{20 + i},{i % 2}\n" for i in range(12))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.clinets=3", 'small.toml: unknown key "data.clinets"; did you mean "clients"?'),
        ("loacl.lr=3", 'small.toml: unknown key "loacl"; did you mean "local"?'),
        ("algorithm.tune=3", 'algorithm.tune: FedRep has no option "tune"; known: body_epochs, head_epochs, name'),
        ("algorithm.name=fedpr", 'algorithm.name: no algorithm "fedpr"; did you mean "fedper"?'),
        ("rounds", '--set rounds: expected KEY=VALUE, such as "local.lr=0.1"'),
        ("data.alpha=0", "data.alpha = 0.0: must be above 0 (0.1 is strong skew, 100 almost none)"),
        ("data.clients=5000", "data.clients = 5000: "),
        ('model.head=["ouut"]', 'the model has no part "ouut" for its head; did you mean "out"?'),
        ("model={name='lenet5'}", "model.name: lenet5 does not fit samples of shape [1, 8, 8]"),
        ("data={source='mnist'}", 'train-images-idx3-ubyte.gz: not found; run "fedtailor download mnist" or set'),
        ("federation.max_norm=inf", "small.toml: federation.max_norm = inf: must be a finite number"),
        ("local.lr=inf", "small.toml: local.lr = inf: must be a finite number"),
        ("model.hidden=[0]", "model.hidden: 0 is not a whole number above 0"),
        ("model.hidden=16", "model.hidden = 16: must be a list such as [16]"),
        ("model.hidden=[16", "model.hidden = '[16': must be a list such as [16]"),
        ("federation.clients_per_round=5", "federation.clients_per_round = 5: there are only 4 clients"),
    ],
)
def test_wrong_configuration(refused: Refused, tmp_path: Path, setting: str, message: str) -> None:
    assert message in refused("run", "small.toml", "--set", setting, "--data-root", tmp_path / "data")
    assert files(tmp_path) == ["small.toml"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a.csv": "age,ill\n1,0\n2,1\n"}, 'a.csv: no target column "sick"; known: age, ill'),
        ({"a.csv": GOOD, "b.csv": GOOD.replace("25,", "old,")}, 'b.csv: column "age"'),
        ({"a.csv": GOOD, "b.csv": ""}, "b.csv"),
        ({}, "sites: no "),
    ],
    ids=["no target", "text in numbers", "empty file", "empty folder"],
)
def test_wrong_tables(refused: Refused, tmp_path: Path, content: dict[str, str], message: str) -> None:
    (tmp_path / "sites").mkdir()
    for name, text in content.items():
        (tmp_path / "sites" / name).write_text(text)
    (tmp_path / "own.toml").write_text('[data]\nsource = "folder"\npath = "sites"\ntarget = "sick"\n')
    assert message in refused("run", "own.toml")
    assert not (tmp_path / "runs").exists()


def test_truncated_gzip(refused: Refused, tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images = bytes([0, 0, 8, 3, *[0, 0, 0, 20], *[0, 0, 0, 28], *[0, 0, 0, 28]]) + bytes(range(196)) * 80
    labels = bytes([0, 0, 8, 1, *[0, 0, 0, 20]]) + bytes(i % 10 for i in range(20))
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (raw / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    broken = raw / "t10k-images-idx3-ubyte.gz"
    broken.write_bytes(broken.read_bytes()[:-20])
    (tmp_path / "mnist.toml").write_text('[data]\nsource = "mnist"\nclients = 2\n')
    message = refused("run", "mnist.toml", "--data-root", tmp_path)
    assert message == f"{broken}: truncated or corrupt gzip file; remove it and fetch it again"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_download_with_a_wrong_checksum(
    refused: Refused, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = tmp_path / "served"
    served.mkdir()
    first = REMOTES["mnist"][0]
    (served / first.file).write_bytes(b"not the file")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(served))) as server:
        remote = replace(first, url=f"http://127.0.0.1:{server.server_address[1]}/{first.file}")
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            monkeypatch.setitem(REMOTES, "mnist", (remote,))
            message = refused("download", "mnist", "--data-root", tmp_path / "data")
            assert f"{first.file}: wrong checksum, expected {first.checksum}, found md5:" in message
            assert files(tmp_path / "data") == []
            right = "md5:" + hashlib.md5(b"not the file", usedforsecurity=False).hexdigest()
            monkeypatch.setitem(REMOTES, "mnist", (replace(remote, checksum=right),))
            code, out, err = call("download", "mnist", "--data-root", tmp_path / "data")
            assert (code, out, err) == (0, f"{tmp_path / 'data' / first.folder / first.file}\n", "")
        finally:
            server.shutdown()
            thread.join()


def test_nothing_to_download(refused: Refused) -> None:
    assert refused("download", "mnits") == 'nothing to download for "mnits"; did you mean "mnist"?'


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """A run that was interrupted after two of three rounds."""
    path = tmp_path / "half"
    with pytest.raises(KeyboardInterrupt):
        runner.start(config("rounds=3"), path, None, stop_after(2))
    return path


def edit(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


def test_resuming_what_is_no_run(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("none", "empty", "small.toml"):
        assert refused("resume", name) == f"{name}: not a run folder (no config.toml); fedtailor run CONFIG makes one"
        assert "not a run folder" in refused("show", name)
    assert files(tmp_path) == ["small.toml"]


@pytest.mark.parametrize("command", ["resume", "explain"])
def test_a_folder_of_runs_is_no_run_but_names_them(refused: Refused, tmp_path: Path, command: str) -> None:
    for name in ("fedavg-seed0", "local-seed0"):
        (tmp_path / "my fit" / name).mkdir(parents=True)
        (tmp_path / "my fit" / name / "run.json").write_text("{}")
    runs = "or name one of its runs (fedavg-seed0, local-seed0), such as 'my fit/fedavg-seed0'"
    message = "my fit: a folder of runs, not a single run; continue with the same command and --out 'my fit'; "
    assert refused(command, "my fit") == message + runs
    write_json(tmp_path / "my fit" / "fit.json", {"settings": {}})
    message = "my fit: a fit, not a single run; continue with the same fedtailor fit and --out 'my fit'; " + runs
    if command == "explain":  # which is for fits too, once they are finished
        message = "my fit: not finished yet; continue with the same fedtailor fit and --out"
    assert refused(command, "my fit") == message


def test_hints_quote_paths(refused: Refused, call: Call, half: Path, tmp_path: Path) -> None:
    half.rename(tmp_path / "my run")
    assert refused("run", "small.toml", "--out", "my run").endswith("continue it with: fedtailor resume 'my run'")
    assert call("show", "my run").out.endswith("continue with: fedtailor resume 'my run'\n")
    assert call("init", "my config.toml").out.endswith("run it with: fedtailor run 'my config.toml'\n")
    (tmp_path / "my grid").mkdir()
    (tmp_path / "my grid" / "compare.json").write_text("{}")
    assert re.search(r"CONFIG.*--out.*'my grid'", refused("show", "my grid"))


def test_resuming_a_damaged_run(refused: Refused, half: Path) -> None:
    state = next((half / "checkpoint").glob("state-*.safetensors"))
    whole = state.read_bytes()
    state.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert refused("resume", half) == f"{state}: changed since it was written (checksum differs)"
    state.unlink()
    assert refused("resume", half) == f"{state}: cannot be read: No such file or directory"
    state.write_bytes(whole)
    manifest = half / "checkpoint" / "manifest.json"
    good = manifest.read_bytes()
    edit(manifest, b'"round": 1', b'"round": 2')
    assert refused("resume", half) == f"{manifest}: changed since it was written (checksum differs)"
    manifest.write_bytes(good[:100])
    assert refused("resume", half) == f"{manifest}: damaged; it is not the JSON that was written"
    manifest.write_bytes(good)
    metrics = half / "metrics.jsonl"
    lines = metrics.read_bytes()
    metrics.write_bytes(lines[:50])
    assert refused("resume", half) == f"{metrics}: shorter than at the checkpoint; it was changed since it was written"
    metrics.write_bytes(lines)
    edit(half / "config.toml", b"rounds = 3", b"rounds = 4")
    changed = "changed since the run was started; start a new run with it instead"
    assert refused("resume", half) == f"{half / 'config.toml'}: {changed}"


def test_run_folder_is_not_overwritten(refused: Refused, half: Path) -> None:
    message = refused("run", "small.toml", "--out", half)
    assert message == f"{half}: holds a run already; continue it with: fedtailor resume {half}"


def test_paths_that_cannot_be_written(refused: Refused, tmp_path: Path) -> None:
    assert refused("init", "no/such/config.toml") == "no/such/config.toml: No such file or directory"
    assert "Not a directory" in refused("run", "small.toml", "--out", "small.toml/run")


def test_comparison_given_to_run(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text("[compare]\nseeds = [1]\n")
    message = refused("run", "grid.toml")
    assert message == "grid.toml: describes a comparison; run it with fedtailor compare grid.toml"


def test_unfinished_comparison_is_not_shown(refused: Refused, call: Call, tmp_path: Path) -> None:
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / "compare.json").write_text("{}")
    assert refused("show", "grid") == (
        "grid: an unfinished comparison; continue with: fedtailor compare CONFIG --out grid"
    )


def test_message_of_several_lines_is_put_on_one(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("raise ImportError('first line\\nsecond line')\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = refused("run", "small.toml", "--set", "model={name='broken_module:Net'}")
    assert message == 'model.name: cannot import "broken_module:Net": first line second line'
