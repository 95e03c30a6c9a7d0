"""`onboard` and unseen clients on the command line."""

import re
from collections.abc import Callable
from pathlib import Path

import tomli_w

from fedtailor.experiments import runner
from fedtailor.experiments.store import read_json
from tests.cli.conftest import Call
from tests.small import DIGITS, config


def test_a_newcomer(call: Call, refused: Callable[..., str], tmp_path: Path) -> None:
    runner.start(config("rounds=1", "algorithm.name=fedavg"), tmp_path / "run")
    Path("more.toml").write_text(tomli_w.dumps({"data": DIGITS["data"] | {"clients": 6}}))
    code, out, err = call("onboard", "run", "--data", "more.toml", "--name", "client-05", "--epochs", "2")
    assert (code, err) == (0, "")
    told = read_json(tmp_path / "run/newcomers/client-05/newcomer.json")
    assert told["epochs"] == 2
    assert out.splitlines()[0] == "newcomer   client-05: 26 train, 4 val, 10 test samples"
    assert f"accuracy {100 * told['test']['accuracy']:.2f} %" in out
    assert out.splitlines()[-1] == "model      run/newcomers/client-05"
    assert "exists already" in refused("onboard", "run", "--data", "more.toml", "--name", "client-05")
    assert "run reads digits" in refused("onboard", "run", "--data", "west.csv", "--name", "west")
    assert "gone.toml: no such file" in refused("onboard", "run", "--data", "gone.toml", "--name", "west")
    assert "not a run folder" in refused("onboard", "elsewhere", "--data", "more.toml", "--name", "client-04")
    assert [p.name for p in (tmp_path / "run/newcomers").iterdir()] == ["client-05"]


def test_show_tells_of_unseen_clients(call: Call, tmp_path: Path) -> None:
    folder = runner.start(config("rounds=1", "evaluation.unseen=0.5"), tmp_path / "run")
    code, out, err = call("show", "run", "--clients")
    assert (code, err) == (0, "")
    unseen = (folder.results or {})["unseen"]
    row = next(line for line in out.splitlines() if "unseen clients" in line)
    assert f"{100 * unseen['test']['accuracy']['mean']:.2f}" in row
    assert f"gap        {100 * unseen['gap']['accuracy']:.2f}" in out
    assert re.search(r"\b2\b.*\b4\b", out)


def test_too_many_unseen(refused: Callable[..., str]) -> None:
    assert re.search(
        r"evaluation\.unseen.*0\.99.*\b4\b", refused("run", "small.toml", "--set", "evaluation.unseen=0.99")
    )
    assert "evaluation.unseen = 2" in refused("run", "small.toml", "--set", "evaluation.unseen=2")
