"""What operators do with a federation, over FLARE's processes on 127.0.0.1: join, pause, submit, revoke, health."""

from __future__ import annotations

import importlib.util
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomli_w

from fedtailor.cli.federation_progress import INCOMPLETE
from fedtailor.flare import joining, kits, operate
from fedtailor.flare.participation import SITES, read_sites, spans
from fedtailor.flare.revocations import revoked_in
from fedtailor.flare.site import set_participation

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs NVIDIA FLARE")
NAMES = ("north", "south", "west")


def write_site(folder: Path) -> None:
    draw = random.Random(folder.name)
    lines = ["age,outcome"]
    for _ in range(60):
        age = draw.gauss(55, 10)
        lines.append(f"{age:.1f},{'well' if age + draw.gauss(0, 5) < 55 else 'ill'}")
    (folder / "data.csv").write_text("\n".join(lines) + "\n")
    data = {"path": "data.csv", "target": "outcome", "classes": ["ill", "well"], "numeric": ["age"]}
    policy = {"algorithms": ["fedavg"], "models": ["linear"], "sends": ["model", "sample count"]}
    (folder / kits.SITE).write_text(tomli_w.dumps({"data": data, "policy": policy}))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A server and three sites that run, whose keys were made at the sites."""
    root = tmp_path_factory.mktemp("hospitals")
    hospitals = root / "hospitals"
    kits.provision(hospitals, "localhost", 18571, [])
    for name in NAMES:
        file, fingerprint = joining.request_membership(root / name, name)
        _, answer = joining.approve(hospitals, file, fingerprint)
        joining.join(root / name, answer, joining.authority_fingerprint(hospitals))
        write_site(root / name)
    (root / "task.toml").write_text(
        tomli_w.dumps({"rounds": 2, "data": {"source": "sites"}, "model": {"name": "linear"}})
    )
    everybody = {hospitals / "server": "server"} | {root / name: "site" for name in NAMES}
    try:
        for folder, role in everybody.items():
            operate.start_participant(role, folder)
        yield root
    finally:
        for folder in everybody:
            operate.stop_participant(folder, seconds=1.0)


def until(done: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.5)


def states(federation: Path, run: str, site: str) -> list[tuple[int, int, str]]:
    record = read_sites(federation / "hospitals/server/runs" / run / SITES)[site]
    return [(first, last, its.state) for first, last, its in spans(record)]


def test_operations(federation: Path) -> None:
    def call(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "fedtailor.cli.main", *arguments]
        done = subprocess.run(command, cwd=federation, capture_output=True, text=True, timeout=900)
        return done.returncode, done.stdout, done.stderr

    hospitals, folders = federation / "hospitals", [federation / name for name in NAMES]
    everybody = (hospitals / "server", *folders)
    until(lambda: not any(operate.problems(operate.read_status(folder)) for folder in everybody))
    submit = ("federation", "submit", "task.toml", "--set", "algorithm.name=fedavg", "--admin", "hospitals/admin")

    set_participation(federation / "west/private", "paused")
    code, out, err = call(*submit, "--run", "first")
    assert code == 2, out + err
    assert "begins with all 3 sites (north, south, west)" in out
    assert "west is paused (west refuses: this site is paused by its operator); --least 2 begins without" in err
    assert states(federation, "first", "west") == [(1, 1, "paused")]

    code, out, err = call(*submit, "--run", "first", "--least", "2")
    assert code == INCOMPLETE, out + err
    assert "north: took part in all 2 rounds\n" in out
    assert re.search(r"^west: paused since round 1 ", out, re.MULTILINE)
    assert states(federation, "first", "west") == [(1, 2, "paused")]
    _, told, _ = call("federation", "status", "--admin", "hospitals/admin")
    assert "  west: paused since round 1 " in told

    set_participation(federation / "west/private", "active")
    code, out, err = call("federation", "revoke", "hospitals", "west")
    assert (code, "the server admits it no more" in out) == (0, True), out + err
    until(lambda: "site west: revoked, away" in call("federation", "status", "--admin", "hospitals/admin")[1])
    code, out, err = call(*submit, "--run", "second")
    assert code == 0, out + err
    assert revoked_in(federation / "south/kit", federation / "south/kit")["names"] == ["west"]
    assert (hospitals / "server" / kits.REVOKED).exists()
    _, told, _ = call("federation", "status", "--admin", "hospitals/admin")
    assert "site west: revoked, away" in told
    assert "site south: connected" in told

    operate.stop_participant(hospitals / "server", seconds=1.0)
    assert operate.problems(operate.read_status(federation / "north"))  # it runs, and serves nobody
    assert call("federation", "health", "north")[0] == 1
