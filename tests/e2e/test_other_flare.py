"""A FLARE that is there already: a deployment of `nvflare poc` on 127.0.0.1 runs our job, by FLARE's tools."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import tomli_w

from fedtailor import data as sources
from fedtailor.core.algorithm import reply_names
from fedtailor.data.sources.site_data import write_prepared
from fedtailor.experiments.store import RESULTS
from fedtailor.flare.kits import CLASSES
from fedtailor.flare.participation import SITES, missing, read_sites
from tests.flare.sites import on_loop, tensors
from tests.helpers import assert_equal
from tests.small import config

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs NVIDIA FLARE")
NAMES = ("client-00", "client-01")  # as the simulation has them: random numbers depend on names


def allow_classes(local: Path, role: str) -> None:
    """As on docs/how-to/existing-flare.md."""
    resources = json.loads((local / "resources.json.default").read_text())
    resources["class_allow_list"] += CLASSES[role]
    (local / "resources.json").write_text(json.dumps(resources))


def test_a_poc_deployment_runs_the_job(tmp_path: Path) -> None:
    from fedtailor.algorithms.fedrep import FedRep

    task = config("algorithm.name=fedrep", "data.clients=2", "rounds=2", "federation.engine=loop")
    rows = sources.load(task.data, seed=task.seed)
    workspace = tmp_path / "poc"
    tools = os.environ | {"NVFLARE_POC_WORKSPACE": str(workspace), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def call(*words: str, timeout: float = 900) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, env=tools, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    call("nvflare.cli", "poc", "prepare", "-c", *NAMES)
    (kits,) = workspace.glob("*/prod_00")
    allow_classes(kits / "server" / "local", "server")
    policy = {"algorithms": ["fedrep"], "sends": reply_names(FedRep), "min_samples": 1, "metrics": True}
    policy |= {"budget": {"min_rows": 1, "decimals": 15}}
    for i, name in enumerate(NAMES):
        local = kits / name / "local"
        allow_classes(local, "site")
        write_prepared(local / "rows.safetensors", rows, i)
        tables = {"folder": "../fedtailor", "kit": "..", "data": {"path": "rows.safetensors"}, "policy": policy}
        (local / "site.toml").write_text(tomli_w.dumps(tables))
    (tmp_path / "task.toml").write_text(tomli_w.dumps(task.plain()))
    named = ("--site", NAMES[0], "--site", NAMES[1])
    call("fedtailor.cli.main", "federation", "job", "task.toml", "--out", "jobs", "--run", "one", *named)
    assert json.loads((tmp_path / "jobs/one/meta.json").read_text())["min_clients"] == 1
    assert not list((tmp_path / "jobs").rglob("*.py"))  # it brings no code
    with (tmp_path / "start.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "nvflare.cli", "poc", "start", "--timeout", "300"],
            cwd=tmp_path,
            env=tools,
            stdout=log,
            stderr=log,
            timeout=600,
            check=False,
        )
    try:
        admin = kits / "admin@nvidia.com"  # of three administrators, the project's
        call("nvflare.cli", "job", "submit", "-j", "jobs/one", "--startup-kit", str(admin))
        (server,) = (folder for folder in kits.iterdir() if (folder / "startup/fed_server.json").exists())
        run = server / "runs/one"
        until = time.monotonic() + 400
        while not (run / RESULTS).exists():
            assert time.monotonic() < until, (tmp_path / "start.log").read_text()[-3000:]
            time.sleep(1.0)
        assert missing(read_sites(run / SITES)) == []
        for name in NAMES:  # where `tensors` looks for what a site keeps
            (tmp_path / "kept" / name).mkdir(parents=True)
            (tmp_path / "kept" / name / "private").symlink_to(kits / name / "fedtailor")
        assert_equal(tensors(run, tmp_path / "kept"), on_loop(task), 1e-6)
    finally:
        stop = [sys.executable, "-m", "nvflare.cli", "poc", "stop", "--no-wait"]
        subprocess.run(
            stop, cwd=tmp_path, env=tools, capture_output=True, timeout=120, check=False
        )  # refused by a job's end
        for process in psutil.process_iter(["cmdline"]):  # it may need longer than the test has
            if any(str(workspace) in word for word in process.info["cmdline"] or []):
                process.kill()
