"""Join a federation with a key that never leaves its site: a request, the coordinator's approval, the certificate."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from fedtailor.errors import RunError
from fedtailor.experiments.store import read_json, write_atomically, write_json
from fedtailor.flare import kits
from fedtailor.flare.kits import KIT, PROJECT, SITE

KEY, REQUEST = "client.key", "request.json"
CERTIFICATE, AUTHORITY = "client.crt", "rootCA.pem"
BITS, LEAST_BITS = 3072, 2048
APPROVED = "approved"  # folder of the coordinator's answers
LARGEST = 2**20  # bytes of a request or an approval
INSTALLED = re.compile(r"(startup|local)/[A-Za-z0-9_.-]{1,80}|readme\.txt")  # files of a kit that an approval has


def request_membership(folder: Path, name: str) -> tuple[Path, str]:
    """Make the site's key and a request for its certificate; returns the file to send, and the key's fingerprint."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.x509.oid import NameOID

    kits.check_site_name(name)
    startup = folder / KIT / "startup"
    startup.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    if (startup / KEY).exists():  # asked for again, or to renew the certificate
        key: Any = serialization.load_pem_private_key((startup / KEY).read_bytes(), None)
    else:
        key = rsa.generate_private_key(65537, BITS)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        with os.fdopen(os.open(startup / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pem)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signed = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    text = signed.public_bytes(serialization.Encoding.PEM).decode()
    write_json(folder / REQUEST, {"site": name, "request": text})
    return folder / REQUEST, fingerprint_of(key.public_key())


def fingerprint_of(public: Any) -> str:
    """sha256 of a public key, which two people can compare on the telephone."""
    from cryptography.hazmat.primitives import serialization

    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(public.public_bytes(serialization.Encoding.DER, spki)).hexdigest()


def read_request(path: Path) -> tuple[str, Any]:
    """The name and the public key in a request; a `RunError` unless its sender has the private key."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.x509.oid import NameOID

    about = _read_small(path)
    try:
        signed = x509.load_pem_x509_csr(str(about["request"]).encode())
        (common,) = signed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        public, name = signed.public_key(), str(common.value)
        if not signed.is_signature_valid or name != about["site"]:
            raise ValueError
    except (KeyError, ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion):
        raise RunError(f"{path}: not a request of fedtailor federation request") from None
    if not isinstance(public, rsa.RSAPublicKey) or public.key_size < LEAST_BITS:
        raise RunError(f"{path}: its key must be RSA of {LEAST_BITS} bits or more")
    kits.check_site_name(name)
    return name, public


def approve(folder: Path, request: Path, fingerprint: str) -> tuple[str, Path]:
    """Sign the certificate of a site, and write what it installs; returns its name and that file.

    `fingerprint` is what the site's operator has read out: whoever can change a file on its way can change the key.
    """
    name, public = read_request(request)
    found = fingerprint_of(public)
    if found != "".join(fingerprint.lower().split()):
        raise RunError(f"{request}: the fingerprint of its key is {found}, not the one given; ask the site for it")
    about = kits.coordinator_about(folder)
    if name in about["sites"] and fingerprint_of(kits.public_key_of(folder, name)) != found:
        raise RunError(f'{folder}: has a site "{name}" with another key; revoke it first, or choose another name')
    if name in kits.read_revoked(folder)["names"]:  # the old certificate can still connect
        raise RunError(f'{folder}: the certificate of "{name}" was revoked; choose another name')
    sites = sorted({*about["sites"], name})
    kits.store_certificate(folder, name, public)
    newest = kits.write_kits(folder, about["host"], about["port"], sites) / name
    (newest / "startup" / KEY).unlink()  # of no certificate: FLARE's builder wants some key
    kits.restrict_kit(newest, "site")
    files = {
        str(file.relative_to(newest)): file.read_text(encoding="utf-8")
        for file in sorted(newest.rglob("*"))
        if file.is_file() and INSTALLED.fullmatch(str(file.relative_to(newest)))
    }
    others = [site for site in sites if site != name]
    kits.write_about(folder, about | {"sites": sites})
    answer = folder / APPROVED / f"{name}.json"
    answer.parent.mkdir(exist_ok=True)
    write_json(answer, {"site": name, "partners": others, "files": files})
    return name, answer


def join(folder: Path, approval: Path, authority: str) -> str:
    """Install what the coordinator has approved beside the site's own key; returns the site's name.

    `authority` is the fingerprint of the authority's certificate, which the coordinator has read out.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    from fedtailor.aggregation.identity import fingerprint, read_certificate

    startup = folder / KIT / "startup"
    if not (startup / KEY).exists():
        raise RunError(f"{folder}: has no key; begin with fedtailor federation request")
    about = _read_small(approval)
    try:
        name, files = str(about["site"]), dict(about["files"])
        if not all(isinstance(text, str) and INSTALLED.fullmatch(path) for path, text in files.items()):
            raise ValueError
        root = x509.load_pem_x509_certificate(files[f"startup/{AUTHORITY}"].encode())
        own = x509.load_pem_x509_certificate(files[f"startup/{CERTIFICATE}"].encode())
        partners = json.dumps([str(site) for site in about["partners"]])
    except (KeyError, ValueError, TypeError, x509.InvalidVersion):
        raise RunError(f"{approval}: not an approval of fedtailor federation approve") from None
    if (found := fingerprint(root)) != "".join(authority.lower().split()):
        raise RunError(f"{approval}: the fingerprint of its authority is {found}, not the one given")
    key: Any = serialization.load_pem_private_key((startup / KEY).read_bytes(), None)
    if own.public_key() != key.public_key() or f"startup/{KEY}" in files:
        raise RunError(f"{approval}: is for another key than {startup / KEY}; send {folder / REQUEST} again")
    for path, text in files.items():
        target = folder / KIT / path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text.encode())
        if target.suffix == ".sh":
            target.chmod(0o700)
    (folder / KIT / "transfer").mkdir(exist_ok=True)
    read_certificate(startup / CERTIFICATE)  # which the authority must have signed
    if not (folder / SITE).exists():
        write_atomically(folder / SITE, kits.TEMPLATE.replace("partners = []", f"partners = {partners}").encode())
    return name


def authority_fingerprint(folder: Path) -> str:
    """Of the coordinator's authority, for sites to compare."""
    from cryptography import x509

    from fedtailor.aggregation.identity import fingerprint

    state = folder / "authority" / PROJECT / "state" / "cert.json"
    return fingerprint(x509.load_pem_x509_certificate(json.loads(state.read_text())["root_cert"].encode()))


def _read_small(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RunError(f"{path}: no such file")
    if path.stat().st_size > LARGEST:
        raise RunError(f"{path}: larger than any request or approval")
    return dict(read_json(path))
