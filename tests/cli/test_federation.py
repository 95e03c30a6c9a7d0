"""What an operator of a federation may do wrong, told in one line; and what the folder of a federation holds."""

from __future__ import annotations

import importlib.util
import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fedtailor.experiments.store import write_json
from fedtailor.flare import kits, operate
from fedtailor.flare.kits import TEMPLATE
from fedtailor.flare.site import read_site
from tests.cli.conftest import Call

Refused = Callable[..., str]
needs_flare = pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs NVIDIA FLARE")


def test_without_flare_it_says_how_to_install_it(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvflare", None)
    monkeypatch.setitem(sys.modules, "nvflare.collab", None)
    assert refused("federation", "local", "3", "small.toml").endswith("pip install 'fedtailor[flare]'")


@needs_flare
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("start", "sever", "there"), '"sever" is neither server nor site'),
        (("start", "server", "nowhere"), "nowhere: not the folder of a participant"),
        (("stop", "nowhere"), "nowhere: is not running; to stop a run, give its name and --admin FOLDER"),
        (("local", "3", "small.toml", "--run", "../x"), '--run "../x": use letters, digits'),
        (("local", "9", "small.toml"), "9 sites: digits has 4 clients"),
        (("local", "2", "small.toml", "--set", "algorithm.name=fedrp"), 'algorithm.name: no algorithm "fedrp"'),
        (("init", "there", "--site", "server"), 'site "server": use letters'),
        (("personal", "nowhere"), "nowhere/site.toml: no such file; fedtailor federation init writes one"),
        (("fit",), "federation fit: name the tables of a trial on this machine, or give --admin FOLDER"),
        (("fit", "sites", "--admin", "there"), "federation fit: name the tables of a trial on this machine"),
        (("fit", "--admin", "there", "--run", "../x"), '--run "../x": use letters, digits'),
        (("results", "nowhere"), "nowhere/site.toml: no such file; fedtailor federation init writes one"),
    ],
)
def test_what_is_wrong_is_told(arguments: tuple[str, ...], why: str, refused: Refused) -> None:
    assert refused("federation", *arguments).startswith(why)


def test_personal_tells_where_a_sites_models_are(call: Call, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "north").mkdir()
    (tmp_path / "north" / kits.SITE).write_text(TEMPLATE)
    assert refused("federation", "personal", "north").endswith("no personal model yet; it is written when a run ends")
    write_json(tmp_path / "north/private/run-1/personal/last.json", {"round": 5, "file": "last.safetensors"})
    code, out, _ = call("federation", "personal", "north")
    assert code == 0
    assert out == f"run-1, last round 5: {tmp_path}/north/private/run-1/personal/last.safetensors\n"


def test_results_of_a_site_without_a_fit(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "north").mkdir()
    (tmp_path / "north" / kits.SITE).write_text(TEMPLATE)
    assert "north/private" in refused("federation", "results", "north")


def test_the_policy_of_a_fit_is_printed(call: Call) -> None:
    code, out, _ = call("federation", "fit", "--policy")
    assert code == 0
    assert tomllib.loads(out)["policy"]["algorithms"] == ["tablefit"]


def test_the_template_of_a_site_can_be_read(tmp_path: Path) -> None:
    (tmp_path / kits.SITE).write_text(TEMPLATE)
    site = read_site(tmp_path / kits.SITE)
    assert site.data.path == tmp_path / "data.csv"
    assert site.folder == tmp_path / "private"


@needs_flare
def test_init_makes_folders_and_adds_to_them(call: Call, refused: Refused, tmp_path: Path) -> None:
    made = call("federation", "init", "fed", "--site", "north", "--site", "south", "--port", "18123")
    assert made.code == 0, made.err
    *folders, keys = made.out.splitlines()
    assert [line.split(":")[0] for line in folders] == ["server", "north", "south", "admin"]
    assert "private keys" in keys
    authority = (tmp_path / "fed/server/kit/startup/rootCA.pem").read_bytes()
    more = call("federation", "init", "fed", "--site", "west", "--port", "18123")
    assert [line.split(":")[0] for line in more.out.splitlines()[:-1]] == ["west"]
    for name in ("north", "west"):
        kit = tmp_path / "fed" / name / "kit"
        assert (kit / "startup/rootCA.pem").read_bytes() == authority
        rights = json.loads((kit / "local/authorization.json").read_text())["permissions"]
        assert {rights[role]["byoc"] for role in ("project_admin", "lead")} == {"none"}
        assert {rights[role]["shell_commands"] for role in ("project_admin", "lead")} == {"none"}
        resources = json.loads((kit / "local/resources.json").read_text())
        assert resources["allow_log_streaming"] is False
        assert resources["class_list_enforcement_mode"] == "enforce"
        assert kits.OURS + "Participant" in resources["class_allow_list"]
    assert "give the same --host and --port" in refused("federation", "init", "fed", "--site", "x", "--port", "18124")


def test_processes_are_found_again_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psutil")
    monkeypatch.setattr(operate, "start_command", lambda role, folder: operate.StartCommand(["sleep", "60"], {}))
    pid = operate.start_participant("site", tmp_path)
    assert operate.start_participant("site", tmp_path) == pid == operate.find_process(tmp_path)
    assert operate.process_tree(pid) == [pid]
    assert operate.stop_participant(tmp_path)
    assert operate.find_process(tmp_path) is None
    assert not operate.stop_participant(tmp_path)
