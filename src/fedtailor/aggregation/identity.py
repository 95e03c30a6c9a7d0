"""Who a site is: its certificate signs what it says in a secure sum, and it knows whose signatures to believe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import NameOID

from fedtailor.errors import RunError

CERTIFICATE, KEY, AUTHORITY = "client.crt", "client.key", "rootCA.pem"  # as FLARE names them in a kit
REVOKED = "revoked.json"  # beside them: certificates that do not count any more, signed by the authority


@dataclass(frozen=True)
class Identity:
    """A site with its key, the authority of its federation, and its own list of partners."""

    name: str
    certificate: bytes  # DER
    key: Any
    authority: x509.Certificate
    partners: Mapping[str, str]  # name -> sha256 of its certificate, or "" for any that the authority signed
    revoked: frozenset[str] = frozenset()  # sha256 of certificates

    def sign(self, statement: bytes) -> bytes:
        """A signature that everybody with the authority's certificate can check."""
        return sign(self.key, statement)

    def name_in(self, certificate: bytes) -> str:
        """Whose certificate it is; a ValueError if this site does not take it for a partner's."""
        try:
            read = x509.load_der_x509_certificate(certificate)
            (common,) = read.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            name = str(common.value)
            read.verify_directly_issued_by(self.authority)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion):
            raise ValueError("a partner without a certificate of this federation") from None
        if not read.not_valid_before_utc <= datetime.now(UTC) <= read.not_valid_after_utc:
            raise ValueError(f'the certificate of "{name}" is not valid today')
        if fingerprint(read) in self.revoked:
            raise ValueError(f'the certificate of "{name}" was revoked')
        if self.partners and name != self.name:
            if name not in self.partners:
                raise ValueError(f'"{name}" is not among the partners of this site')
            if (pinned := self.partners[name]) and hashlib.sha256(certificate).hexdigest() != pinned:
                raise ValueError(f'"{name}" has another certificate than the partner of this site')
        return name

    def check(self, certificate: bytes, signature: bytes, statement: bytes, what: str) -> str:
        """Who signed a statement; a ValueError if nobody of this federation did."""
        name, public = self.name_in(certificate), x509.load_der_x509_certificate(certificate).public_key()
        try:
            verify(public, signature, statement)
        except InvalidSignature:
            raise ValueError(f'{what} of "{name}" is not signed by it') from None
        return name


def read_identity(startup: Path, partners: Sequence[str]) -> Identity | None:
    """The identity in a kit's startup folder; None if there is no kit."""
    if not all((startup / file).is_file() for file in (CERTIFICATE, KEY, AUTHORITY)):
        return None
    certificate, authority = read_certificate(startup / CERTIFICATE)
    known = authority.public_bytes(serialization.Encoding.PEM)
    (common,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return Identity(
        name=str(common.value),
        certificate=certificate.public_bytes(serialization.Encoding.DER),
        key=_read_key(startup / KEY, certificate),
        authority=authority,
        partners=dict(_owner_and_name(partner) for partner in partners),
        revoked=frozenset(read_revocations(startup.parent / REVOKED, known)["certificates"]),
    )


def read_certificate(path: Path) -> tuple[x509.Certificate, x509.Certificate]:
    """A participant's certificate and, beside it, that of the authority, which must have signed both."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        authority = x509.load_pem_x509_certificate((path.parent / AUTHORITY).read_bytes())
        authority.verify_directly_issued_by(authority)
        certificate.verify_directly_issued_by(authority)
    except (OSError, ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion):
        what = f"damaged, or not signed by the authority in {AUTHORITY}"
        raise RunError(f"{path}: {what}; ask the coordinator for the kit") from None
    return certificate, authority


def _read_key(path: Path, certificate: x509.Certificate) -> Any:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
        if key.public_key() != certificate.public_key():
            raise ValueError
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
        raise RunError(f"{path}: damaged, or not the key of the certificate; ask the coordinator for the kit") from None
    return key


def sign(key: Any, statement: bytes) -> bytes:
    """A signature by an elliptic or an RSA key."""
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(statement, ec.ECDSA(hashes.SHA256()))
    signature: bytes = key.sign(statement, padding.PKCS1v15(), hashes.SHA256())
    return signature


def verify(public: Any, signature: bytes, statement: bytes) -> None:
    """Check a signature; raises `InvalidSignature`."""
    if isinstance(public, ec.EllipticCurvePublicKey):
        public.verify(signature, statement, ec.ECDSA(hashes.SHA256()))
    elif isinstance(public, rsa.RSAPublicKey):
        public.verify(signature, statement, padding.PKCS1v15(), hashes.SHA256())
    else:
        raise InvalidSignature


def fingerprint(certificate: x509.Certificate) -> str:
    """sha256 of a certificate's DER bytes."""
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()


def statement_of(content: dict[str, Any]) -> bytes:
    """The words of a list of revoked certificates that the authority signs."""
    return json.dumps({"revoked": content}, sort_keys=True).encode()


def read_revocations(path: Path, authority: bytes) -> dict[str, list[str]]:
    """Names and certificates of a signed list; one that the authority did not sign is an error, not an empty list."""
    if not path.exists():
        return {"names": [], "certificates": []}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        signature = bytes.fromhex(content.pop("signature"))
        verify(x509.load_pem_x509_certificate(authority).public_key(), signature, statement_of(content))
        return {kind: [str(entry) for entry in content[kind]] for kind in ("names", "certificates")}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, InvalidSignature):
        raise RunError(f"{path}: not a list that the authority signed; ask the coordinator for it") from None


def _owner_and_name(partner: str) -> tuple[str, str]:
    name, _, pinned = partner.partition(" sha256:")
    return name.partition(" of ")[0].strip(), pinned.strip().lower()


def owners(partners: Sequence[str]) -> dict[str, str]:
    """Who runs the partners that are listed as "name of owner"."""
    named = [partner.partition(" sha256:")[0].partition(" of ") for partner in partners]
    return {name.strip(): owner.strip() for name, _, owner in named if owner.strip()}
