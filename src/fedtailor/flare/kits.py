"""Kits: the folders of a federation's participants, with certificates, FLARE's files and a site's own file to fill in.

Certificates end, are renewed and are revoked here. `cryptography` comes with FLARE, so it is imported where it is used.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedtailor.errors import ConfigError, RunError, UserError, nearest
from fedtailor.experiments.store import read_json, write_atomically, write_json
from fedtailor.version import __version__

ADMIN = "admin@fedtailor.local"
PROJECT = "fedtailor"
ABOUT = "federation.json"
KIT, SITE, RUNS, REVOKED = "kit", "site.toml", "runs", "revoked.json"
CERTIFICATES = ("client.crt", "server.crt")
SITE_FILE, SERVER_FOLDER = (
    "FEDTAILOR_SITE_FILE",
    "FEDTAILOR_SERVER_FOLDER",
)  # variables of a participant's environment

NOTHING = "none"
ALLOWED = {  # what an administrator may ask of a site: to take part in a job, and to end it
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
QUICKLY = {"client_register_interval": 1.0}  # seconds between two tries to reach the server; FLARE waits 2
OURS = "fedtailor.flare.nvidia."
FORMERLY = "fedtailor.deploy.flare.flare_adapter."  # in kits that fedtailor 0.2.0 made
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
# approve = "ask"  # a run waits until a person has said yes: fedtailor federation pending
# reasons = true  # whether a refusal tells the server which rule it breaks

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
    """Create the folder of a federation, or add sites to it; returns the names of the new participants."""
    about = folder / ABOUT
    old: dict[str, Any] | None = read_json(about) if about.exists() else None
    if old is not None and (old["host"], old["port"]) != (host, port):
        raise ConfigError(f"{folder}: is a federation of {old['host']}:{old['port']}; give the same --host and --port")
    for name in sites:
        check_site_name(name, host)
    if taken := set(read_revoked(folder)["names"]) & set(sites):  # the old certificate can still connect
        raise ConfigError(f'--site "{min(taken)}": its certificate was revoked; choose another name')
    everybody = sorted({*(old["sites"] if old else []), *sites})
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
            restrict_kit(kit, role)
        if role == "site" and not (folder / name / SITE).exists():
            others = json.dumps([site for site in everybody if site != name])
            text = TEMPLATE.replace("partners = []", f"partners = {others}")
            write_atomically(folder / name / SITE, text.encode())
        new.append(name)
    write_about(folder, {"host": host, "port": port, "sites": everybody})
    return new


def write_about(folder: Path, about: dict[str, Any]) -> None:
    """What the federation is, for the coordinator and for whoever submits."""
    for path in (folder / ABOUT, folder / "admin" / ABOUT):
        write_json(path, about)


def check_site_name(name: str, host: str = "") -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", name) or name in ("server", "admin", "authority", host):
        raise ConfigError(f'site "{name}": use letters, digits, "-" and "_"; not server, admin or authority')


def write_kits(folder: Path, host: str, port: int, sites: list[str]) -> Path:
    """Let FLARE write the kits of all participants; existing participants keep their certificates."""
    authority = folder / "authority"
    authority.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(authority / "project.json", json.dumps(_project(host, port, sites), indent=1).encode())
    # JSON is YAML; with --force it adds participants and keeps the authority
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", "project.json", "-w", ".", "--force"]
    done = subprocess.run(command, cwd=authority, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RunError(f"{authority}: nvflare provision failed: {(done.stdout + done.stderr).strip()[-400:]}")
    return max((authority / PROJECT).glob("prod_*"))


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


def restrict_kit(kit: Path, role: str) -> None:
    """Write FLARE's policy files: jobs bring no code and run our classes only; a site streams no logs."""
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    resources |= {"class_list_enforcement_mode": "enforce", "class_allow_list": CLASSES[role] + LOGS}
    if role == "site":
        resources["client"] = resources.get("client", {}) | QUICKLY
        resources["allow_log_streaming"] = False
        resources["components"] = [c for c in resources["components"] if c["id"] != "site_log_streamer"]
        permissions = dict.fromkeys(("project_admin", "lead"), ALLOWED) | {"org_admin": NOTHING, "member": NOTHING}
        write_plain_json(local / "authorization.json", {"format_version": "1.0", "permissions": permissions})
    write_plain_json(local / "resources.json", resources)
    log = json.loads((local / "log_config.json.default").read_text())
    log["loggers"]["nvflare.collab"] = {"level": "WARNING"}
    write_plain_json(local / "log_config.json", log)


def write_plain_json(path: Path, content: Any) -> None:
    """JSON without a checksum, as FLARE reads it."""
    write_atomically(path, json.dumps(content, indent=1).encode())


def require_flare() -> None:
    """Raise a `UserError` that says how to install NVIDIA FLARE, if it is missing."""
    try:
        import nvflare.collab  # noqa: F401
    except ImportError:
        raise UserError("a federation of sites needs NVIDIA FLARE: pip install 'fedtailor[flare]'") from None


def certificate_ends(folder: Path) -> dict[str, float]:
    """When the certificates of the participants whose folder is here expire, as seconds since 1970."""
    about = coordinator_about(folder)
    times = {name: certificate_end(folder / name / KIT) for name in ("server", *about["sites"], "admin")}
    return {name: end for name, end in times.items() if end is not None}


def renew_certificate(folder: Path, name: str) -> Path:
    """A new key and certificate of a participant, from the same authority; returns the kit to send."""
    about = coordinator_about(folder)
    subject = _subject(about, name)
    if name in read_revoked(folder)["names"]:
        raise RunError(f'{folder}: the certificate of "{name}" was revoked; choose another name')
    known = _state(folder)
    if subject in known and not _has_key(known[subject]):
        raise RunError(
            f"{name}: its key is at the site; let it run fedtailor federation request again, then approve it"
        )
    known.pop(subject, None)
    write_atomically(_state_file(folder), json.dumps(known).encode())
    newest = write_kits(folder, about["host"], about["port"], about["sites"])
    kit = folder / name / KIT
    shutil.rmtree(kit / "startup", ignore_errors=True)
    if kit.exists():
        shutil.copytree(newest / subject / "startup", kit / "startup")
    else:  # it was sent to its owner
        shutil.copytree(newest / subject, kit)
        if name != "admin":
            restrict_kit(kit, "server" if name == "server" else "site")
    kit.parent.chmod(0o700)
    return kit


def revoke_certificate(folder: Path, name: str) -> Path:
    """Revoke a site's certificate for the server and all partners in secure sums; returns the list to distribute."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    from fedtailor.aggregation.identity import fingerprint, sign, statement_of

    about = coordinator_about(folder)
    subject = _subject(about, name)
    if name in ("server", "admin"):
        raise RunError(f"{folder}: {name} cannot be revoked; make a new federation")
    old = read_revoked(folder)
    state = _state(folder)
    certificate = x509.load_pem_x509_certificate(state[subject]["cert"].encode())
    content = {
        "names": sorted({*old["names"], name}),
        "certificates": sorted({*old["certificates"], fingerprint(certificate)}),
        "issued": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    key = serialization.load_pem_private_key(state["root_pri_key"].encode(), None)
    signature = sign(key, statement_of(content))
    left = [site for site in about["sites"] if site != name]
    for path in (folder / "authority", folder / "admin", folder / "server", *(folder / site / KIT for site in left)):
        if path.is_dir():
            write_atomically(path / REVOKED, json.dumps(content | {"signature": signature.hex()}, indent=1).encode())
    write_about(folder, dict(about) | {"sites": left})
    return folder / "authority" / REVOKED


def _has_key(known: dict[str, str]) -> bool:
    """Whether the private key of a participant was made here."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    key: Any = serialization.load_pem_private_key(known["pri_key"].encode(), None)
    return bool(x509.load_pem_x509_certificate(known["cert"].encode()).public_key() == key.public_key())


def public_key_of(folder: Path, name: str) -> Any:
    """In the latest certificate of a participant."""
    from cryptography import x509

    return x509.load_pem_x509_certificate(_state(folder)[name]["cert"].encode()).public_key()


def store_certificate(folder: Path, name: str, public: Any) -> None:
    """Let the authority sign a site's public key; the certificate is kept where FLARE's provisioning looks for it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from nvflare.lighter import utils

    known = _state(folder)
    root = x509.load_pem_x509_certificate(known["root_cert"].encode())
    key = serialization.load_pem_private_key(known["root_pri_key"].encode(), None)
    issuer = str(root.subject.get_attributes_for_oid(x509.oid.NameOID.COMMON_NAME)[0].value)
    certificate = utils.generate_cert(utils.Identity(name, PROJECT), utils.Identity(issuer), key, public)
    none, _ = utils.generate_keys()  # provisioning wants a private key, and the site's is at the site
    pem = utils.serialize_pri_key(none).decode()
    known[name] = {"cert": utils.serialize_cert(certificate).decode(), "pri_key": pem}
    write_atomically(_state_file(folder), json.dumps(known).encode())


def read_revoked(folder: Path) -> dict[str, list[str]]:
    """Names and certificates that were revoked."""
    from fedtailor.aggregation.identity import read_revocations

    authority = _state(folder)["root_cert"].encode() if _state_file(folder).exists() else b""
    return read_revocations(folder / "authority" / REVOKED, authority)


def _state_file(folder: Path) -> Path:
    """FLARE's file with the authority's key and all certificates."""
    return folder / "authority" / PROJECT / "state" / "cert.json"


def _state(folder: Path) -> dict[str, Any]:
    from cryptography import x509

    path = _state_file(folder)
    try:
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        x509.load_pem_x509_certificate(known["root_cert"].encode())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, x509.InvalidVersion):
        raise RunError(f"{path}: damaged; restore the authority's folder from a copy") from None
    return known


def coordinator_about(folder: Path) -> dict[str, Any]:
    if not (folder / ABOUT).exists() or not (folder / "authority").is_dir():
        raise RunError(f"{folder}: not the coordinator's folder; it has no authority")
    return dict(read_json(folder / ABOUT))


def _subject(about: dict[str, Any], name: str) -> str:
    if name not in ("server", "admin", *about["sites"]):
        raise RunError(f'no participant "{name}"; {nearest(name, ["server", "admin", *about["sites"]])}')
    return {"server": str(about["host"]), "admin": ADMIN}.get(name, name)


def read_condition(folder: Path, kit: Path) -> dict[str, Any]:
    """Versions, clock, free disk and certificate of a participant: for its operator and, of a site, for the server."""
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    about = {"version": __version__, "torch": version("torch"), "now": time.time(), "free": free}
    return about | {"certificate_ends": certificate_end(kit)}


def certificate_end(kit: Path) -> float | None:
    """When the certificate in a kit expires, as seconds since 1970; None without one."""
    for name in CERTIFICATES:
        if (file := kit / "startup" / name).is_file():
            from fedtailor.aggregation.identity import read_certificate

            return read_certificate(file)[0].not_valid_after_utc.timestamp()
    return None
