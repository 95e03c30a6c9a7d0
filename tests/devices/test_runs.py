"""Runs on a device: chosen, recorded, resumed on the other one, and refused in one line where it is not there."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedtailor as ft
from fedtailor.core.trees import items
from fedtailor.engines import devices
from fedtailor.errors import ConfigError
from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import RunFolder
from tests.devices import sim
from tests.devices.federations import CPU
from tests.helpers import assert_equal
from tests.small import DIGITS, config, stop_after
from tests.world.test_dropout import TABLES as DROPOUT

F64 = ("rounds=2", "model.dtype=float64", "evaluation.unseen=0.25")


def saved(folder: RunFolder) -> dict[str, torch.Tensor]:
    """All tensors that a run has left."""
    checkpoint = folder.load_checkpoint()
    assert checkpoint is not None
    models = {c: folder.personal(c) for c in folder.about["clients"]}
    return dict(items({"state": checkpoint[1], "models": models}))


@pytest.mark.parametrize("algorithm", ["fedrep", "learn2pfed-net"])
@pytest.mark.parametrize(("first", "second"), [("sim", "cpu"), ("cpu", "sim"), ("sim:1", "sim")])
def test_a_run_begun_on_one_device_ends_on_another(algorithm: str, first: str, second: str, tmp_path: Path) -> None:
    task = config(*F64, f"algorithm.name={algorithm}", f"federation.device={first}")
    with pytest.raises(KeyboardInterrupt):
        runner.start(task, tmp_path / "run", None, stop_after(1))
    begun = RunFolder.open(tmp_path / "run")
    assert begun.about["device"] == str(devices.with_index(torch.device(first)))
    assert ("device_memory" in begun.metrics()[0]) == first.startswith("sim")
    done = runner.resume(tmp_path / "run", device=second)
    wanted = runner.start(config(*F64, f"algorithm.name={algorithm}"), tmp_path / "cpu")
    assert_equal(saved(done), saved(wanted))
    assert _traffic(done) == _traffic(wanted)


def test_models_that_draw_repeat_on_a_device(tmp_path: Path) -> None:
    def drawn(name: str, engine: str) -> dict[str, torch.Tensor]:
        federation = {"device": "sim", "engine": engine}
        return saved(runner.start(parse(DROPOUT | {"rounds": 2, "federation": federation}), tmp_path / name))

    wanted = drawn("first", "loop")
    for name, engine in (("again", "loop"), ("stacked", "vmap")):
        found = drawn(name, engine)
        assert all(torch.equal(found[path], v) for path, v in wanted.items()), name


def _traffic(folder: RunFolder) -> list[list[int]]:
    return [[line["up"], line["down"], line["trips"]] for line in folder.metrics()]


def test_auto_takes_an_accelerator_and_says_so() -> None:
    assert devices.find("auto") == (CPU, f"torch {torch.__version__} finds no accelerator")
    with sim.visible():
        assert devices.find("auto") == (torch.device("sim:0"), f"torch {torch.__version__} finds sim")
        assert devices.find("auto", rank=3)[0] == torch.device("sim:1")
        with sim.without_float64():
            assert devices.find("auto", dtype=torch.float64) == (CPU, "sim has no float64")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [("cuda", "has no cuda"), ("nonsense", "torch knows no such device"), ("sim:7", "there are only 2")],
)
def test_a_device_that_is_not_there(wanted: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        devices.find(wanted)


def test_the_command_line_refuses_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('rounds = 1\n[data]\nsource = "digits"\nclients = 4\nmax_samples = 20\n')
    command = [sys.executable, "-m", "fedtailor", "run", "c.toml", "--device", "cuda"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    assert done.returncode == 2
    assert done.stderr.startswith('error: federation.device = "cuda": ')
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_from_python(tmp_path: Path) -> None:
    run = ft.run("fedavg", DIGITS, device="sim:1", rounds=1, out=tmp_path / "run", progress=False)
    assert run.folder.about["device"] == "sim:1"
    assert run.folder.about["chunk"] == 4
    assert run.personal(run.clients[0]).model.device == CPU


def test_data_too_large_for_the_device_stay_on_the_host(tmp_path: Path) -> None:
    task = config(*F64)
    free = torch.get_device_module("sim").mem_get_info("sim:0")[0]
    assert devices.has_room(torch.device("sim:0"), free // 2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(devices, "_nbytes", lambda data: free)
        there = runner.start(parse(task.plain() | {"federation": {"device": "sim"}}), tmp_path / "sim")
    assert_equal(saved(there), saved(runner.start(task, tmp_path / "cpu")))


def test_a_device_without_float64_runs_float32(tmp_path: Path) -> None:
    with sim.without_float64():
        for algorithm in ("fedavg", "ditto"):
            runner.start(
                config("rounds=1", "federation.device=sim", f"algorithm.name={algorithm}"), tmp_path / algorithm
            )
        with pytest.raises(ConfigError, match=r'float64.*model\.dtype.*"float32"'):
            runner.start(config(*F64, "federation.device=sim"), tmp_path / "wide")
