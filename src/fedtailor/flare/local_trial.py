"""A whole federation on this machine, to try it: server and sites are processes on 127.0.0.1, with certificates."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import tomli_w

from fedtailor import algorithms
from fedtailor.core.algorithm import reply_names
from fedtailor.data.configs import SitesConfig
from fedtailor.data.sources.site_data import write_prepared
from fedtailor.errors import ConfigError
from fedtailor.experiments.building import load
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.store import RESULTS, RunFolder, read_json, write_atomically
from fedtailor.flare.job_progress import JobProgress
from fedtailor.flare.kits import ABOUT, RUNS, SITE, provision
from fedtailor.flare.nvidia import QUICK_POLL, Launcher
from fedtailor.flare.operate import ProcessSupervisor
from fedtailor.flare.policy import EXACT, GRADIENTS

HOST = "localhost"


def prepare_trial(folder: Path, sites: int, config: RunConfig, data_root: Path | None) -> tuple[str, ...]:
    """Write the kits, and for each site the rows of one client and a policy that allows the run; returns the names."""
    data = load(config, data_root)
    if not 1 <= sites <= len(data.clients):
        raise ConfigError(f"{sites} sites: {config.data.source} has {len(data.clients)} clients")
    names = data.clients[:sites]
    known = read_json(folder / ABOUT) if (folder / ABOUT).exists() else None
    if known is None or set(names) - set(known["sites"]):
        provision(folder, HOST, known["port"] if known else _free_port(), list(names))
    algorithm = algorithms.make(config.algorithm.name, config.algorithm.options)
    policy = {
        "algorithms": [config.algorithm.name],
        "models": [config.model.name],
        "sends": [*reply_names(algorithm), GRADIENTS],
        "metrics": True,
        "min_samples": 1,
        "max_rounds": config.rounds,
        "sums_of": 2 if config.privacy.secure_sum else 0,
        "partners": list(names),
        "budget": {"min_rows": 1, "decimals": EXACT},  # the rows are the user's own, on one machine
    }
    for i, name in enumerate(names):
        write_prepared(folder / name / "rows.safetensors", data, i)
        tables = {"data": {"path": "rows.safetensors"}, "policy": policy}
        write_atomically(folder / name / SITE, tomli_w.dumps(tables).encode())
    return names


def run_trial(
    folder: Path,
    sites: int,
    config: RunConfig,
    name: str,
    say: Callable[[str], None],
    data_root: Path | None = None,
    progress: Callable[[JobProgress], None] = lambda now: None,
) -> RunFolder:
    """Create the federation and run it to the end; the same call continues an interrupted run."""
    path = folder / "server" / RUNS / name
    if not (path / RESULTS).exists():
        names = prepare_trial(folder, sites, config, data_root)
        keeper = ProcessSupervisor(trial_roles(folder, names))
        try:
            at_sites = config.model_copy(update={"data": SitesConfig()})
            check = (path / RESULTS).exists
            Launcher(folder / "admin", at_sites, name, names, say, progress, check=check, poll=QUICK_POLL).run_to_end()
        finally:
            keeper.stop()
    return RunFolder.open(path)


def trial_roles(folder: Path, names: tuple[str, ...]) -> dict[Path, str]:
    return {folder / "server": "server"} | {folder / name: "site" for name in names}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
