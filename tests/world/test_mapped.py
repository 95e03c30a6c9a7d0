"""Arrays that lie in files are neither copied into a run nor read into memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fedtailor as ft
from fedtailor.data import load
from fedtailor.data.configs import SavedConfig
from fedtailor.data.sources import saved_data
from fedtailor.errors import DataError
from fedtailor.experiments import runner

LARGE = """
import sys
from pathlib import Path
import numpy as np
import fedtailor as ft

folder = Path(sys.argv[1])
rows, wide = 49152, 65536  # 3 GB of bytes, in a file with holes
file = np.lib.format.open_memmap(folder / "x.npy", mode="w+", dtype=np.uint8, shape=(rows, wide))
file[::97, :8] = 200
del file
each = rows // 8
whole = ft.MappedArray(folder / "x.npy", scale=1 / 255)
y = (np.arange(rows) % 97 == 0).astype(np.int64)
parts = {f"site-{i}": slice(i * each, (i + 1) * each) for i in range(8)}
data = ft.federated({name: (whole[part], y[part]) for name, part in parts.items()}, name="large", val=0.01, test=0.1)
run = ft.run("fedavg", data, engine="loop", rounds=1, out=folder / "run", progress=False,
             settings={"model.name": "linear", "local.batch_size": 64, "local.steps": 2})
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
# of this program alone: ru_maxrss also counts what the process was before it
print(run.results["last"]["test"]["accuracy"]["mean"], int(status["VmHWM"].split()[0]) // 1024)
"""


def test_a_file_is_read_as_the_same_array_in_memory(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, size=(40, 6), dtype=np.uint8)
    np.save(tmp_path / "x.npy", x)
    save_file({"pixels": torch.from_numpy(x)}, tmp_path / "x.safetensors")
    y = rng.integers(0, 2, size=40)
    held = x.astype(np.float32) * np.float32(1 / 255)
    runs = {}
    for name, samples in {
        "memory": held,
        "npy": ft.MappedArray(tmp_path / "x.npy", scale=1 / 255),
        "safetensors": ft.MappedArray(tmp_path / "x.safetensors", "pixels", scale=1 / 255),
    }.items():
        data = ft.federated({"ada": (samples, y), "bo": (samples, y)}, name="mapped")
        runs[name] = ft.run(
            "fedrep",
            data,
            engine="loop",
            rounds=2,
            out=tmp_path / name,
            settings={"local.kernels": "off"},
            progress=False,
        )
    for name in ("npy", "safetensors"):
        assert runs[name].results["last"] == runs["memory"].results["last"], name
        assert sum(f.stat().st_size for f in (tmp_path / name / "data").iterdir()) < 8000
        assert runner.reload_experiment(runs[name].folder).data.train.y.equal(
            runner.reload_experiment(runs["memory"].folder).data.train.y
        )


def test_a_file_that_changed_is_noticed(tmp_path: Path) -> None:
    x = np.zeros((20, 3), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    data = ft.federated({"ada": (ft.MappedArray(tmp_path / "x.npy"), np.arange(20) % 2)}, name="mapped")
    run = ft.run("local", data, engine="loop", rounds=1, out=tmp_path / "run", progress=False)
    np.save(tmp_path / "x.npy", x + 1)
    with pytest.raises(DataError, match="no longer"):
        runner.reload_experiment(run.folder)
    (tmp_path / "x.npy").unlink()
    with pytest.raises(DataError, match="put the file back"):
        runner.reload_experiment(run.folder)
    np.save(tmp_path / "words.npy", np.array(["a"], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="array of numbers"):
        ft.MappedArray(tmp_path / "words.npy")


def test_parts_of_a_file_are_kept_with_a_run(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(60, dtype=np.float32).reshape(30, 2))
    whole = ft.MappedArray(tmp_path / "x.npy")
    clients = {"ada": (whole[:18], np.arange(18) % 2), "bob": (whole[18:], np.arange(12) % 2)}
    data = ft.federated(clients, name="mapped")
    saved_data.save(data, tmp_path / "saved")
    restored = load(SavedConfig(path=tmp_path / "saved"), seed=0)
    for client in (0, 1):
        assert restored.train.of(client)[0].equal(data.train.of(client)[0])


def test_three_gigabytes_in_600_megabytes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(tmp_path)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    accuracy, megabytes = map(float, done.stdout.split())
    assert accuracy > 0.5
    assert megabytes < 600
