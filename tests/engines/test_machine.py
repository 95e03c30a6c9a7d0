"""Cores and memory of a container, and systems that lack what Linux has."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fedtailor import engines
from fedtailor.engines import disk, machine
from fedtailor.engines.pool.pool import Pool
from fedtailor.errors import ConfigError
from tests.engines.test_choice import large

GB = 2**30


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 16 cores and 64 GB, whose control groups are the files of a folder."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GB // 4096}.__getitem__)
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_no_control_groups(container: Path) -> None:
    assert (machine.cores(), machine.memory()) == (16, 64 * GB)


def test_version_2_in_a_container(container: Path) -> None:
    (container / "membership").write_text("0::/\n")
    write(container / "cgroup", cpu__max="350000 100000", memory__max=str(2 * GB))
    assert (machine.cores(), machine.memory()) == (3, 2 * GB)


def test_version_2_on_the_host_counts_the_groups_around(container: Path) -> None:
    (container / "membership").write_text("0::/batch.slice/job-7.scope\n")
    write(container / "cgroup/batch.slice", cpu__max="400000 100000", memory__max=str(8 * GB))
    write(container / "cgroup/batch.slice/job-7.scope", cpu__max="max 100000", memory__max="max")
    assert (machine.cores(), machine.memory()) == (4, 8 * GB)


def test_version_1(container: Path) -> None:
    (container / "membership").write_text("7:memory:/docker/1f\n4:cpu,cpuacct:/docker/1f\n1:name=systemd:/x\n")
    cgroup = container / "cgroup"
    write(cgroup / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(cgroup / "memory", memory__limit_in_bytes="9223372036854771712")
    assert (machine.cores(), machine.memory()) == (16, 64 * GB)
    write(cgroup / "cpu/docker/1f", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    write(cgroup / "memory/docker/1f", memory__limit_in_bytes=str(GB))
    assert (machine.cores(), machine.memory()) == (1, GB)


def test_a_system_without_fork_has_the_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = large("cnn", (1, 28, 28))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError) as refused:
        Pool(experiment, 2)
    assert str(refused.value).startswith("federation.engine: pool needs fork")
    assert engines.choose(experiment, workers=2) == engines.Choice(
        "loop", "this system has no fork for worker processes"
    )


def test_a_system_without_posix_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    with (tmp_path / "states").open("w+b") as file:
        disk._allocate(file.fileno(), 5000)
        assert os.fstat(file.fileno()).st_size == 5000
