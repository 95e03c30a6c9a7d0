"""Folders for the participants of a federation: certificates, FLARE's files, and a site's own file to fill in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor.errors import ConfigError, RunError, UserError
from fedtailor.experiments.store import read_json, write_atomically, write_json

ADMIN = "admin@fedtailor.local"
PROJECT = "fedtailor"
ABOUT = "federation.json"
KIT, SITE, RUNS, REVOKED = "kit", "site.toml", "runs", "revoked.json"
SITE_FILE, SERVER_FOLDER = "FEDTAILOR_SITE_FILE", "FEDTAILOR_SERVER_FOLDER"  # told to a participant's own processes

MEMORY = {"MALLOC_ARENA_MAX": "2"}  # FLARE's many threads would each leave gaps in memory of their own
NOTHING = "none"
ALLOWED = {  # of what an administrator may ask of a site: to take part in a job and to end it
    "submit_job": "any",
    "manage_job": "any",
    "view": "any",
    "clone_job": NOTHING,
    "download_job": NOTHING,
    "operate": NOTHING,
    "shell_commands": NOTHING,
    "byoc": NOTHING,
    "server-predeployed-flwr": NOTHING,
}
OURS = "fedtailor.deploy.flare.flare_adapter."
CLASSES = {
    "site": ["nvflare.collab.runtime.executor.CollabExecutor", OURS + "Participant"],
    "server": ["nvflare.collab.runtime.controller.CollabController", OURS + "Coordinator"],
}
LOGS = [
    "nvflare.app_common.logging.job_log_streamer.JobLogStreamer",
    "nvflare.app_common.logging.job_log_receiver.JobLogReceiver",
]

TEMPLATE = """# This site's data and policy. Nobody but this site reads this file.
folder = "private"  # private states, personal models and the audit log

[data]
path = "data.csv"  # one row per sample
target = "outcome"  # column to predict
classes = ["no", "yes"]  # all of its values; the same at every site
numeric = ["age"]  # numeric columns; the same at every site
[data.categories]  # categorical columns, with all values that occur at any site
# arm = ["a", "b"]

[policy]
algorithms = ["fedavg", "fedrep"]  # what may run here
models = ["linear", "mlp"]
sends = ["model", "body", "sample count"]  # what may leave; see fedtailor list algorithms
sums_of = 0  # with 3, replies leave only in secure sums over at least 3 sites
partners = []  # sites to sum with, by the names in their certificates; "north of A": those of one owner count once
# metrics = true  # whether to report accuracy and loss on our samples; default: only if sums_of is 0
code = []  # custom tasks, optimizers and metrics that a run may use
min_samples = 20  # nothing leaves with fewer training samples
max_rounds = 1000

[policy.budget]  # limits on what may be asked
evaluations_per_round = 6
decimals = 3  # metrics are rounded to this many
min_rows = 10  # rows a metric needs at least
# [policy.budget.privacy]  # noise on this site's replies, and a budget for all of them; refused when spent
# epsilon = 8.0
# clip = 1.0
# noise = 4.0
"""


def provision(folder: Path, host: str, port: int, sites: list[str]) -> list[str]:
    """Make the folder of a federation, or add sites to it; returns the names of the new participants."""
    about = folder / ABOUT
    old: dict[str, Any] | None = read_json(about) if about.exists() else None
    if old is not None and (old["host"], old["port"]) != (host, port):
        raise ConfigError(f"{folder}: is a federation of {old['host']}:{old['port']}; give the same --host and --port")
    for name in sites:
        if not name.replace("-", "").replace("_", "").isalnum() or name in ("server", "admin", host):
            raise ConfigError(f'--site "{name}": use letters, digits, "-" and "_"; not server or admin')
    everybody = sorted({*(old["sites"] if old else []), *sites})
    _refuse_revoked(folder, sites)
    newest = write_kits(folder, host, port, everybody)
    new = []
    for role, name, participant in [
        ("server", "server", host),
        *(("site", s, s) for s in everybody),
        ("admin", "admin", ADMIN),
    ]:
        kit = folder / name / KIT
        if kit.exists():
            continue
        shutil.copytree(newest / participant, kit)
        kit.parent.chmod(0o700)  # it holds a private key
        if role != "admin":
            restrict(kit, role)
        if role == "site" and not (folder / name / SITE).exists():
            others = json.dumps([site for site in everybody if site != name])
            text = TEMPLATE.replace("partners = []", f"partners = {others}")
            write_atomically(folder / name / SITE, text.encode())
        new.append(name)
    write_json(about, {"host": host, "port": port, "sites": everybody})
    write_json(folder / "admin" / ABOUT, {"host": host, "port": port, "sites": everybody})
    return new


def write_kits(folder: Path, host: str, port: int, sites: list[str]) -> Path:
    """FLARE's own folders of all participants, of which those that are there already keep their certificates."""
    authority = folder / "authority"
    authority.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(authority / "project.json", json.dumps(_project(host, port, sites), indent=1).encode())
    _run_provision(authority)
    return max((authority / PROJECT).glob("prod_*"))


def _refuse_revoked(folder: Path, sites: list[str]) -> None:
    """A name whose certificate was revoked does not come back: the old one still opens a connection."""
    from fedtailor.deploy.flare.certificates import revoked

    revoked_sites = set(revoked(folder)["names"]) & set(sites)
    if revoked_sites:
        raise ConfigError(f'--site "{min(revoked_sites)}": its certificate was revoked; take another name for it')


def _project(host: str, port: int, sites: list[str]) -> dict[str, Any]:
    builders = "nvflare.lighter.impl."
    return {
        "api_version": 3,
        "name": PROJECT,
        "description": "a federation of fedtailor",
        "participants": [
            {"name": host, "type": "server", "org": PROJECT, "fed_learn_port": port},
            *({"name": name, "type": "client", "org": PROJECT} for name in sites),
            {"name": ADMIN, "type": "admin", "org": PROJECT, "role": "project_admin"},
        ],
        "builders": [
            {"path": builders + "workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
            {"path": builders + "static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
            {"path": builders + "cert.CertBuilder", "args": {"root_valid_days": 3650}},
            {"path": builders + "signature.SignatureBuilder"},
        ],
    }


def _run_provision(authority: Path) -> None:
    """JSON is YAML. With --force it adds to what is there, and keeps the authority that signed before."""
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.json", "-w", ".", "--force"]
    done = subprocess.run(command, cwd=authority, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RunError(f"{authority}: nvflare provision failed: {(done.stdout + done.stderr).strip()[-400:]}")


def restrict(kit: Path, role: str) -> None:
    """FLARE's own policy files: no code in jobs, our classes only, nothing streamed, nothing in shared folders."""
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    resources |= {"class_list_enforcement_mode": "enforce", "class_allow_list": CLASSES[role] + LOGS}
    if role == "site":
        resources["allow_log_streaming"] = False
        resources["components"] = [c for c in resources["components"] if c["id"] != "site_log_streamer"]
        permissions = dict.fromkeys(("project_admin", "lead"), ALLOWED) | {"org_admin": NOTHING, "member": NOTHING}
        _write(local / "authorization.json", {"format_version": "1.0", "permissions": permissions})
    _write(local / "resources.json", resources)
    log = json.loads((local / "log_config.json.default").read_text())
    log["loggers"]["nvflare.collab"] = {"level": "WARNING"}
    _write(local / "log_config.json", log)


def _write(path: Path, content: Any) -> None:
    write_atomically(path, json.dumps(content, indent=1).encode())


def _keep_jobs_in(kit: Path, store: Path) -> None:
    """FLARE's own choice is the system's temporary folder, which all users share."""
    file = kit / "local" / "resources.json"
    resources = json.loads(file.read_text())
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(store / "snapshots")
    (jobs,) = (c for c in resources["components"] if c["id"] == "job_manager")
    jobs["args"]["uri_root"] = str(store / "jobs")
    _write(file, resources)


@dataclass(frozen=True)
class Started:
    """How a participant is run."""

    command: list[str]
    environment: dict[str, str]


def how_to_start(role: str, folder: Path) -> Started:
    """The command of the server or of a site, with its own paths in the environment."""
    from fedtailor.deploy.flare.site import read_site

    script = (folder / KIT / "startup" / "sub_start.sh").resolve()
    if not script.exists():
        raise ConfigError(f"{folder}: not the folder of a participant; fedtailor federation init makes them")
    if any(c.isspace() for c in str(script)):  # FLARE cuts the commands of its jobs at spaces
        if role == "server":  # which undoes links
            raise ConfigError(f'"{folder.resolve()}": a server cannot run in a path with spaces; move the folder')
        script = _without_spaces(folder) / KIT / "startup" / script.name
    if role == "site":
        read_site(folder / SITE)  # what is wrong in it is said now
        paths = {SITE_FILE: str((folder / SITE).resolve())}
    else:
        _keep_jobs_in(folder / KIT, (folder / "store").resolve())
        paths = {SERVER_FOLDER: str((folder / RUNS).resolve())}
    search_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return Started(["bash", str(script), "--once"], MEMORY | os.environ | paths | {"PATH": search_path})


def _without_spaces(folder: Path) -> Path:
    """A link to a folder."""
    link = Path(tempfile.mkdtemp(prefix="fedtailor-")) / "participant"
    if any(c.isspace() for c in str(link)):
        raise ConfigError(f'"{link.parent}": FLARE needs a temporary folder without spaces; set TMPDIR to one')
    link.symlink_to(folder.resolve(), target_is_directory=True)
    return link


def needs_flare() -> None:
    """Say how to install it, if it is not there."""
    try:
        import nvflare.collab  # noqa: F401
    except ImportError:
        raise UserError("a federation of sites needs NVIDIA FLARE: pip install 'fedtailor[flare]'") from None
