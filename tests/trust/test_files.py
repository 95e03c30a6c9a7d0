"""Files from a stranger: nothing that they name runs, and nothing is made in the size that they ask for."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from safetensors import safe_open
from safetensors.torch import save

import fedtailor as ft
from fedtailor.errors import UserError
from fedtailor.experiments import runner, user_code
from fedtailor.experiments.store import RunFolder, read_json, write_json
from fedtailor.serving.export import export, read_safetensors
from fedtailor.serving.onboard import onboard
from fedtailor.studies.explain import explain
from fedtailor.tables.serve import personal
from tests.cli.conftest import Call, call  # noqa: F401
from tests.small import DIGITS, config

OWN = """
from pathlib import Path
from torch import nn
Path("{mark}").write_text("it ran")


class Net(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.out = nn.Linear(shape[1] * shape[2], outputs)

    def forward(self, x):
        return self.out(x.flatten(1))


def make(shape, outputs):
    return Net(shape, outputs)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of one round, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(user_code, "_remembered", set())
    runner.start(config("rounds=1", task=DIGITS | {"model": {"name": "linear"}}), Path("run"))
    return Path("run")


def renamed(run: Path, key: str, name: str, **about: Any) -> None:
    """What a stranger can do: any text in any file, with checksums that fit."""
    tables = RunFolder(run).config.plain()
    tables[key]["name"] = name
    text = tomli_w.dumps(tables).encode()
    (run / "config.toml").write_bytes(text)
    digest = hashlib.sha256(text).hexdigest()
    write_json(run / "run.json", read_json(run / "run.json") | {"config_sha256": digest} | about)


def everything(run: Path) -> dict[str, Callable[[], Any]]:
    return {
        "resume": lambda: runner.resume(run),
        "personal": lambda: personal(run, "client-00"),
        "load": lambda: ft.load(run).personal("client-00"),  # type: ignore[union-attr]
        "export": lambda: export(run, "client-00", "safetensors"),
        "explain": lambda: explain(run),
        "onboard": lambda: onboard(run, Path("late.toml"), "late"),
    }


@pytest.mark.parametrize("name", ["subprocess:run", "os:system", "builtins:eval", "stranger:Net", "stranger:make"])
def test_t1_a_run_folder_runs_nothing_that_it_names(run: Path, name: str) -> None:
    Path("stranger.py").write_text(OWN.format(mark="mark"))  # lies in the current folder
    Path("late.toml").write_text('[data]\nsource = "digits"\n')
    shape = ["touch mark", "touch mark"] if ":" in name else [64]
    for code in ({}, {"model.name": {"name": name, "folder": None, "files": None}}):
        for key in ("model", "algorithm"):
            renamed(run, key, name, shape=shape, code=code)
            for what, use in everything(run).items():
                with pytest.raises(UserError, match=f'{key}.name "?{name}"?'):
                    use()
                assert not Path("mark").exists(), what
            renamed(run, key, {"model": "linear", "algorithm": "fedavg"}[key])
    assert "stranger" not in sys.modules


def forged(run: Path, **about: Any) -> Path:
    """An exported model in which a stranger changed what it says of itself."""
    (file,) = export(run, "client-00", "safetensors", Path("model.safetensors"))
    with safe_open(file, "pt") as held:
        says = json.loads(held.metadata()["fedtailor"]) | about
        file.write_bytes(save({k: held.get_tensor(k) for k in held.keys()}, {"fedtailor": json.dumps(says)}))  # noqa: SIM118
    return file


def test_t1_an_exported_model_runs_nothing_that_it_names(run: Path) -> None:
    model = {"config": {"model": {"name": "subprocess:run"}}, "shape": ["touch", "mark"]}
    for about in (model, model | {"shape": [64]}, {"config": {"algorithm": {"name": "os:system"}}}):
        with pytest.raises(UserError):
            read_safetensors(forged(run, **about))
    assert not Path("mark").exists()


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"shape": [-1]}, "shape.0"),
        ({"shape": [2**24, 2**24]}, "too large"),
        ({"shape": 64}, "shape"),
        ({"shape": [64.0]}, "shape.0"),
        ({"outputs": 10**9}, "outputs"),
        ({"outputs": True}, "outputs"),
        ({"classes": ["a"]}, "classes"),
        ({"config": {"model": {"name": "mlp", "hidden": [10**12]}}}, "model.hidden = 1000000000000"),
        ({"config": {"model": {"name": "mlp", "hidden": [60000, 60000]}}}, "as the model says"),
        ({"config": 3}, "not a model that fedtailor export wrote"),
        ({"preparation": {"columns": 3}}, "not a model that fedtailor export wrote"),
    ],
)
def test_sizes_are_checked_before_anything_is_made(run: Path, about: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_safetensors(forged(run, **about))


def test_ones_own_run_goes_on_without_a_word_and_a_strangers_after_trust(run: Path, call: Call) -> None:  # noqa: F811
    Path("mine_to_trust.py").write_text(OWN.format(mark="mark"))
    of_mine = ("--set", "model.name=mine_to_trust:make", "--out", "mine-run")
    assert call("run", "small.toml", *of_mine, "--set", "model.hidden=[]")[0] == 2  # it has no such option
    Path("own.toml").write_text(
        'rounds = 1\n[data]\nsource = "digits"\nclients = 2\n[model]\nname = "mine_to_trust:make"\n'
        '[algorithm]\nname = "fedavg"\n'
    )
    code, _, err = call("run", "own.toml", "--out", "mine-run")
    assert (code, err) == (0, "")
    np.savez("x.npz", x=np.zeros((2, 1, 8, 8)))
    user_code._remembered.clear()  # as in another process
    assert call("predict", "mine-run", "--site", "client-00", "x.npz")[0] == 0

    Path("theirs.py").write_text(OWN.format(mark="ran"))
    renamed(Path("mine-run"), "model", "theirs:Net", code=None)
    code, _, err = call("predict", "mine-run", "--site", "client-00", "x.npz")
    assert code == 2
    assert str(Path("theirs.py").resolve()) in err
    assert not Path("ran").exists()
    code, _, err = call("predict", "mine-run", "--site", "client-00", "x.npz", "--trust")
    assert code == 0
    assert (
        f"{Path('theirs.py').resolve()}, sha256 {user_code.fingerprint('theirs:Net', Path('theirs.py').resolve())}"
        in err
    )
    user_code._remembered.clear()
    assert call("predict", "mine-run", "--site", "client-00", "x.npz")[0] == 0  # remembered, while it is the same file
    Path("theirs.py").write_text(OWN.format(mark="again"))
    assert call("predict", "mine-run", "--site", "client-00", "x.npz")[0] == 2
    renamed(Path("mine-run"), "model", "theirs:make", code=None)
    assert "is no nn.Module" in call("predict", "mine-run", "--site", "client-00", "x.npz", "--trust")[2]


def test_a_fit_names_only_folders_in_it(run: Path) -> None:
    from fedtailor.serving.onboard import source_run
    from fedtailor.tables.serve import run_of

    Path("fit").mkdir()
    for name in ("../run", "/etc", "", 3):
        write_json(Path("fit/fit.json"), {"newcomers": name, "sites": {"s": {"run": "run"}}, "kind": "last"})
        for use in (lambda: run_of(Path("fit"), "other"), lambda: source_run(Path("fit"))):
            with pytest.raises(UserError, match="which is no folder in it"):
                use()
