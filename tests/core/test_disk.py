"""Tensors on disk, and private states that lie there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fedtailor.core.trees import Tree
from fedtailor.engines.disk import Disk
from fedtailor.engines.states import States
from fedtailor.errors import RunError
from tests.helpers import assert_equal

CLIENTS = range(40)
MB = 2**20


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def worked(states: States) -> list[Tree]:
    """Two rounds of three clients each, the second undone for one of them."""
    seen = []
    states.create(CLIENTS, {"w": torch.arange(40.0)[:, None].expand(40, 300), "n": torch.zeros(40, dtype=torch.int64)})
    for round, clients in enumerate(((0, 7, 39), (7, 8, 9))):
        states.begin()
        old = states.read(clients)
        states.write(clients, {"w": old["w"] * 2 + round, "n": old["n"] + 1}, old)
        if round:
            states.undo([8])
        seen.append(states.read(tuple(CLIENTS)))
    return seen


def test_states_on_disk_are_states_in_memory(tmp_path: Path) -> None:
    in_memory, on_disk = States(CLIENTS), States(CLIENTS, Disk(tmp_path, budget=1000))
    for found, wanted in zip(worked(on_disk), worked(in_memory), strict=True):
        assert_equal(found, wanted, 0)
    assert on_disk.all_rows(CLIENTS) is None  # they would all come into memory
    on_disk.create(CLIENTS, in_memory.rows)
    assert_equal(on_disk.read(CLIENTS), in_memory.rows, 0)
    assert list(tmp_path.iterdir()) == []  # the files have no names


def test_states_within_the_budget_stay_in_memory(tmp_path: Path) -> None:
    states = States(CLIENTS, Disk(tmp_path, budget=MB))
    worked(states)
    assert states.all_rows(CLIENTS) is not None


def test_a_tensor_without_values_needs_no_room(tmp_path: Path) -> None:
    made = Disk(tmp_path, MB).zeros((5, 0, 2), torch.float64)
    assert (made.shape, made.dtype) == ((5, 0, 2), torch.float64)


def test_the_budget_is_kept(tmp_path: Path) -> None:
    disk = Disk(tmp_path, budget=8 * MB)
    states = States(range(64), disk)
    before = resident()
    for client in range(64):  # 4 MB each
        states.create([client], {"w": torch.full((1, MB), float(client))})
        states.begin()
    copy = disk.copy(states.rows)
    assert resident() - before < 8 * MB + 4 * 4 * MB + 130 * MB  # the budget, copies of a row, a slice both ways
    for client in (0, 31, 63):
        assert float(states.read([client])["w"].mean()) == client
        assert float(copy["w"][client].mean()) == client


def test_no_room_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"1048576\.0.*GB"):
        Disk(tmp_path, budget=MB).zeros((2**50,), torch.uint8)
