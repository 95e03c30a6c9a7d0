"""Files of a run: whole or not at all, changes noticed, nothing kept that does not count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fedtailor.core.trees import Tree, items
from fedtailor.errors import RunError
from fedtailor.experiments import store
from fedtailor.experiments.store import (
    KnownTensors,
    RunFolder,
    new_path,
    read_json,
    read_tree,
    write_atomically,
    write_json,
    write_tree,
)
from tests.small import config, files

TREE: Tree = {"a": torch.arange(6.0).reshape(2, 3), "b": (torch.tensor(3), {}), "none": None}


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    path = tmp_path / "x" / "file"
    write_atomically(path, b"old")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert files(tmp_path) == ["x/file"]


def test_json_comes_back_as_it_was(tmp_path: Path) -> None:
    path, value = tmp_path / "x.json", {"a": [1, 2.5, None, "é"], "b": {"c": float("inf")}, "1": True}
    write_json(path, value)
    assert read_json(path) == value


def test_changed_or_broken_json_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"round": 3})
    path.write_text(path.read_text().replace('"round": 3', '"round": 4'))
    with pytest.raises(RunError, match=r"x.json: changed"):
        read_json(path)
    for text in ("{", "[]", "{}", "3"):
        path.write_text(text)
        with pytest.raises(RunError, match=r"x.json: damaged"):
            read_json(path)
    path.write_bytes(b"\xff")
    with pytest.raises(RunError, match=r"x.json: damaged"):
        read_json(path)
    with pytest.raises(RunError, match=r"y.json: no such file"):
        read_json(tmp_path / "y.json")


def test_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    entry = json.loads(json.dumps(write_tree(tmp_path / "t.safetensors", TREE)))
    found = read_tree(tmp_path, entry)
    assert found["none"] is None
    assert found["b"][1] == {}
    torch.testing.assert_close(dict(items(found)), dict(items(TREE)), rtol=0, atol=0)


def test_changed_or_missing_tensors_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    entry = write_tree(path, TREE)
    flip_a_bit(path)
    with pytest.raises(RunError, match=r"t.safetensors: changed"):
        read_tree(tmp_path, entry)
    path.unlink()
    with pytest.raises(RunError, match=r"t.safetensors: .*No such file"):
        read_tree(tmp_path, entry)


def test_a_manifest_cannot_point_outside(tmp_path: Path) -> None:
    entry = write_tree(tmp_path / "t.safetensors", TREE)
    (tmp_path / "in").mkdir()
    with pytest.raises(RunError, match=r"in/t.safetensors: cannot be read"):
        read_tree(tmp_path / "in", entry | {"file": "../t.safetensors"})


def test_checkpoint_keeps_only_what_counts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.load_checkpoint() is None
    state, best = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    folder.save_checkpoint({"round": 1}, {"state": (1, state), "best": (1, best)})
    first = (tmp_path / "checkpoint/best-000001.safetensors").stat()
    folder.save_checkpoint({"round": 2}, {"state": (2, {"w": torch.full((3,), 2.0)}), "best": (1, best)})
    assert files(tmp_path / "checkpoint") == [
        "best-000001.safetensors",
        "manifest.json",
        "state-000002.safetensors",
    ]
    assert (tmp_path / "checkpoint/best-000001.safetensors").stat().st_ino == first.st_ino  # not written again
    loaded = folder.load_checkpoint()
    assert loaded is not None
    status, trees = loaded
    assert status["round"] == 2
    assert trees["state"]["w"].tolist() == [2, 2, 2]
    assert trees["best"]["w"].tolist() == [1, 1, 1]


def test_files_that_a_killed_process_left_do_not_count(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save_checkpoint({"round": 2}, {"state": (2, TREE)})
    fingerprint = folder.fingerprint()
    write_tree(tmp_path / "checkpoint/state-000001.safetensors", TREE)  # killed before the clean-up
    (tmp_path / "checkpoint/state-000003.safetensors.part").write_bytes(b"half")  # killed while writing
    folder.load_checkpoint()
    assert len(files(tmp_path / "checkpoint")) == 4  # who only reads removes nothing: another may be writing
    folder.drop_stale()
    assert files(tmp_path / "checkpoint") == ["manifest.json", "state-000002.safetensors"]
    assert folder.fingerprint() == fingerprint


def test_checkpoint_that_was_tampered_with(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save_checkpoint({"round": 2}, {"state": (2, TREE)})
    flip_a_bit(tmp_path / "checkpoint/state-000002.safetensors")
    with pytest.raises(RunError, match="checksum differs"):
        folder.load_checkpoint()


def test_lock_refuses_a_second_opening(tmp_path: Path) -> None:
    with RunFolder(tmp_path).locked():
        with pytest.raises(RunError, match="another process"), RunFolder(tmp_path).locked():
            pass
        code = (  # the lock holds between processes, too; torch is not needed to see that
            "import fcntl, sys\n"
            "try: fcntl.flock(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
            "except OSError: sys.exit(7)\n"
        )
        assert subprocess.run([sys.executable, "-c", code, str(tmp_path / ".lock")], check=False).returncode == 7
    with RunFolder(tmp_path).locked():
        assert (tmp_path / ".lock").exists()


def test_folder_is_created_once_and_opened_only_if_it_is_a_run(tmp_path: Path) -> None:
    path, made = tmp_path / "run", config("algorithm.name=ditto")
    folder = RunFolder.create(path, made, {"engine": "loop"})
    assert (folder.config, folder.about["engine"], folder.results) == (made, "loop", None)
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("seed = 0", "seed = 1"))
    with pytest.raises(RunError, match=r"config\.toml: changed"):
        _ = folder.config
    (path / "config.toml").write_text(text)
    with pytest.raises(RunError, match="fedtailor resume"):
        RunFolder.create(path, made, {})
    assert RunFolder.open(path).config == made
    with pytest.raises(RunError, match="not a run folder"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(
        RunError, match=r"a folder of runs, not a single run; .* one of its runs \(run\), such as .*/run$"
    ):
        RunFolder.open(tmp_path)


def test_metrics_are_appended_and_cut(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.cut_metrics(0)
    assert folder.metrics() == []
    length = folder.append_metrics({"round": 1})
    end = folder.append_metrics({"round": 2})
    assert folder.metrics() == [{"round": 1}, {"round": 2}]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "va')  # killed while writing
    assert folder.metrics() == [{"round": 1}, {"round": 2}]
    folder.cut_metrics(end)
    folder.cut_metrics(length)
    assert folder.metrics() == [{"round": 1}]
    with pytest.raises(RunError, match=r"metrics.jsonl: shorter"):
        folder.cut_metrics(end)


def test_personal_models_by_client(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    names = ("north/west", "north_west", "ü" * 100)  # names that make the same file name, or too long a one
    write_json(tmp_path / "run.json", {"clients": list(names)})
    with folder.personal_models("last") as keep:
        for i in (2, 0, 1):  # as they come
            keep(names[i], {"w": torch.tensor(float(i))})
    assert list(read_json(tmp_path / "personal/last/index.json")) == list(names)
    assert [folder.personal(name, "last")["w"].item() for name in names] == [0, 1, 2]
    with pytest.raises(RunError, match=r'"northwest".*"north'):
        folder.personal("northwest", "last")
    with pytest.raises(RunError, match=r"index.json: no such file"):
        folder.personal(names[0])


def test_small_models_of_many_clients_share_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MANY", 3)
    monkeypatch.setattr(store, "TOGETHER", 6 * 8)  # of three models
    folder, names = RunFolder(tmp_path), [f"c{i}" for i in range(8)]
    write_json(tmp_path / "run.json", {"clients": names})
    models = {name: {"w": torch.tensor([float(i), -1.0], dtype=torch.float64)} for i, name in enumerate(names)}
    models["c7"] = {"w": torch.zeros(5)}  # of another form
    with folder.personal_models("last") as keep:
        for name in names:
            keep(name, models[name])
    assert len(list((tmp_path / "personal/last").glob("*.safetensors"))) == 4  # 3, 3, 1 and the other one
    for name in names:
        assert torch.equal(folder.personal(name, "last")["w"], models[name]["w"])
    index = read_json(tmp_path / "personal/last/index.json")
    for row in (3, -1):
        write_json(tmp_path / "personal/last/index.json", index | {"c0": index["c0"] | {"row": row}})
        with pytest.raises(RunError, match=r"names model -?\d of 3"):
            folder.personal("c0", "last")


def test_fingerprint_sees_one_bit_and_one_name(tmp_path: Path) -> None:
    folder, w = RunFolder(tmp_path), torch.linspace(0, 1, 5)
    write_json(tmp_path / "run.json", {"clients": ["ada"]})
    seen = []
    for changed in (w, w.clone(), torch.nextafter(w, w + 1), w[None], w.double()):
        with folder.personal_models("last") as keep:
            keep("ada", {"w": changed})
        seen.append(folder.fingerprint())
    assert seen[0] == seen[1]
    assert len(set(seen)) == 4
    with folder.personal_models("last") as keep:
        keep("ada", {"v": w})
    assert folder.fingerprint() not in seen
    path = next((tmp_path / "personal").rglob("*.safetensors"))
    path.write_bytes(safetensors.torch.save({"w": w}))
    with pytest.raises(RunError, match="checksum"):
        folder.fingerprint()


def test_fingerprint_is_that_of_the_models_whichever_file_holds_a_shared_tensor(tmp_path: Path) -> None:
    common, own = torch.linspace(0, 1, 5), {"ada": torch.zeros(2), "bo": torch.ones(2)}
    seen = set()
    for name, order in {"one": ("ada", "bo"), "other": ("bo", "ada")}.items():
        folder = RunFolder(tmp_path / name)
        write_json(folder.path / "run.json", {"clients": ["ada", "bo"]})
        with folder.personal_models("last") as keep:
            for client in order:
                keep(client, {"common": common, "own": own[client]})
        seen.add(folder.fingerprint())
    assert len(seen) == 1


def test_new_path_is_free(tmp_path: Path) -> None:
    assert new_path(tmp_path, "run") == tmp_path / "run"
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").touch()
    assert new_path(tmp_path, "run") == tmp_path / "run-3"


def personal_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in (path / "personal").rglob("*.safetensors"))


def test_tensors_that_models_have_in_common_are_stored_once(tmp_path: Path) -> None:
    common = {"w": torch.arange(5000.0), "b": torch.zeros(3, dtype=torch.int64)}
    sizes = {}
    for clients in (2, 6):
        names = [f"c{i}" for i in range(clients)]
        folder = RunFolder.create(tmp_path / str(clients), config(), {"clients": names})
        known = KnownTensors()
        for kind in ("last", "selected"):
            with folder.personal_models(kind, known) as keep:
                for i, name in enumerate(names):
                    keep(name, common | {"own": torch.full((4,), float(i)), "kind": torch.tensor(kind == "last")})
        for kind in ("last", "selected"):
            for i, name in enumerate(names):
                found = folder.personal(name, kind)
                assert list(found) == ["w", "b", "own", "kind"]
                assert torch.equal(found["w"], common["w"])
                assert found["own"].tolist() == [float(i)] * 4
                assert bool(found["kind"]) == (kind == "last")
        sizes[clients] = personal_bytes(folder.path)
    assert sizes[2] < 1.2 * common["w"].nbytes  # before: 4 times
    assert sizes[6] - sizes[2] < 0.1 * common["w"].nbytes
    first = next((tmp_path / "2/personal/last").glob("00000*.safetensors"))
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    with pytest.raises(RunError, match="checksum differs"):
        RunFolder(tmp_path / "2").personal("c1", "selected")


def test_an_index_leads_to_no_other_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", config(), {"clients": ["a"]})
    with folder.personal_models("last") as keep:
        keep("a", {"w": torch.ones(2)})
    index = tmp_path / "run/personal/last/index.json"
    entry = read_json(index)["a"]
    for other in ("..", "../../elsewhere", "/etc", ""):
        parts = [{"folder": other, "file": entry["file"], "sha256": entry["sha256"], "names": ["w"]}]
        write_json(index, {"a": dict(entry) | {"file": "", "sha256": "", "parts": parts}})
        with pytest.raises(RunError, match="no folder in it"):
            folder.personal("a", "last")
