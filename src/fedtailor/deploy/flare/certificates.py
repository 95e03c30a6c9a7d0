"""Certificates of a federation, for its coordinator: when they end, new ones, and a signed list of those that do not
count any more."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fedtailor.aggregation.identity import fingerprint, read_revocations, sign, statement_of
from fedtailor.deploy.flare.condition import certificate_end
from fedtailor.deploy.flare.provisioning import ABOUT, ADMIN, KIT, PROJECT, REVOKED, restrict, write_kits
from fedtailor.errors import RunError, nearest
from fedtailor.experiments.store import read_json, write_atomically, write_json


def ends(folder: Path) -> dict[str, float]:
    """When the certificate of each participant ends, of those whose folder is here."""
    about = _about(folder)
    times = {name: certificate_end(folder / name / KIT) for name in ("server", *about["sites"], "admin")}
    return {name: end for name, end in times.items() if end is not None}


def renew(folder: Path, name: str) -> Path:
    """A new key and certificate of a participant, by the same authority; returns the folder to hand over."""
    about = _about(folder)
    subject = _subject(about, name)
    if name in revoked(folder)["names"]:
        raise RunError(f'{folder}: the certificate of "{name}" was revoked; take another name for it')
    known = _state(folder)
    known.pop(subject, None)
    write_atomically(_state_file(folder), json.dumps(known).encode())
    newest = write_kits(folder, about["host"], about["port"], about["sites"])
    kit = folder / name / KIT
    shutil.rmtree(kit / "startup", ignore_errors=True)
    if kit.exists():
        shutil.copytree(newest / subject / "startup", kit / "startup")
    else:  # it was handed over
        shutil.copytree(newest / subject, kit)
        if name != "admin":
            restrict(kit, "server" if name == "server" else "site")
    kit.parent.chmod(0o700)
    return kit


def revoke(folder: Path, name: str) -> Path:
    """A site that takes part no more: neither the server nor a partner in a secure sum believes its certificate."""
    about = _about(folder)
    subject = _subject(about, name)
    if name in ("server", "admin"):
        raise RunError(f"{folder}: {name} cannot be revoked; make a new federation")
    old = revoked(folder)
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
    for path in (folder / "authority", folder / "server", *(folder / site / KIT for site in left)):
        if path.is_dir():
            write_atomically(path / REVOKED, json.dumps(content | {"signature": signature.hex()}, indent=1).encode())
    for where in (folder / ABOUT, folder / "admin" / ABOUT):
        write_json(where, dict(about) | {"sites": left})
    return folder / "authority" / REVOKED


def revoked(folder: Path) -> dict[str, list[str]]:
    """Names and certificates that do not count any more."""
    authority = _state(folder)["root_cert"].encode() if _state_file(folder).exists() else b""
    return read_revocations(folder / "authority" / REVOKED, authority)


def _state_file(folder: Path) -> Path:
    """Where FLARE keeps the authority's key and all certificates."""
    return folder / "authority" / PROJECT / "state" / "cert.json"


def _state(folder: Path) -> dict[str, Any]:
    path = _state_file(folder)
    try:
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        x509.load_pem_x509_certificate(known["root_cert"].encode())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, x509.InvalidVersion):
        raise RunError(f"{path}: damaged; restore the authority's folder from a copy") from None
    return known


def _about(folder: Path) -> dict[str, Any]:
    if not (folder / ABOUT).exists() or not (folder / "authority").is_dir():
        raise RunError(f"{folder}: not the coordinator's folder, which has the authority")
    return dict(read_json(folder / ABOUT))


def _subject(about: dict[str, Any], name: str) -> str:
    if name not in ("server", "admin", *about["sites"]):
        raise RunError(f'no participant "{name}"; {nearest(name, ["server", "admin", *about["sites"]])}')
    return {"server": str(about["host"]), "admin": ADMIN}.get(name, name)
