"""Two devices of a kind: ranks and workers keep to their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedtailor.algorithms import make
from tests.devices import sim
from tests.devices.federations import federation, play, results
from tests.engines.test_torchrun import ROOT, torchrun
from tests.helpers import assert_equal


def test_units_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="sim:0") + torch.ones(2, device="sim:1")


def test_the_second_unit_leaves_the_first_alone() -> None:
    fed = federation(make("ditto", {}), "classification")
    wanted = results(fed, play(fed))
    before = sim.allocations(0)
    fed = federation(make("ditto", {}), "classification", "sim:1", "vmap2")
    assert_equal(results(fed, play(fed)), wanted)
    assert sim.allocations(0) == before


def test_ranks_take_the_device_of_their_number(tmp_path: Path) -> None:
    done = torchrun(2, "tests.devices.rank", str(tmp_path), **sim.for_processes(tmp_path / "packages"))
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert told["device"] == f"sim:{rank}"
        assert told["allocations"][rank] > 0 == told["allocations"][1 - rank]
        assert told["apart"] <= 1e-10


def test_the_package_is_found_by_torch_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import torch; print(torch.accelerator.current_accelerator(check_available=True))"]
    environment = sim.for_processes(tmp_path)
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "sim"
