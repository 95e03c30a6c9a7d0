"""Whether the server of a federation answers: a TLS handshake with both certificates, and a round trip."""

from __future__ import annotations

import json
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor.errors import RunError

SECONDS = 5.0  # for each step


@dataclass(frozen=True)
class ServiceAddress:
    """Where the server is, and with which of a participant's files to reach it."""

    host: str
    port: int
    scheme: str
    certificate: Path
    key: Path
    authority: Path
    identity: str  # the name in the server's certificate

    @property
    def target(self) -> str:
        return f"{self.host}:{self.port}"


def read_address(kit: Path) -> ServiceAddress:
    """From the kit of a server, a site or an administrator."""
    startup = kit / "startup"
    for name in ("fed_server.json", "fed_client.json", "fed_admin.json"):
        if (startup / name).exists():
            try:
                return _address(startup, name, json.loads((startup / name).read_text(encoding="utf-8")))
            except (OSError, ValueError, KeyError, TypeError, IndexError):
                raise RunError(f"{startup / name}: damaged; ask the coordinator for the kit again") from None
    raise RunError(f"{startup}: has no fed_server.json or fed_client.json; ask the coordinator for the kit again")


def _address(startup: Path, name: str, about: dict[str, Any]) -> ServiceAddress:
    if name == "fed_admin.json":
        admin = about["admin"]
        files, identity = ("client.crt", "client.key", "rootCA.pem"), admin["server_identity"]
        host, port, scheme = admin["host"], admin["port"], admin["scheme"]
    else:
        service = about["servers"][0]["service"]
        host, _, port = service["target"].rpartition(":")
        own = about["servers"][0] if name == "fed_server.json" else about["client"]
        files = (own["ssl_cert"], own["ssl_private_key"], own["ssl_root_cert"])
        identity = about["servers"][0].get("identity") or about["servers"][0].get("admin_server") or host
        scheme = service["scheme"]
    if name == "fed_server.json" and not _is_known(str(host)):
        host = "127.0.0.1"  # the server asks itself: its public name may mean nothing where it runs
    certificate, key, authority = (startup / file for file in files)
    return ServiceAddress(str(host), int(port), str(scheme), certificate, key, authority, str(identity))


def _is_known(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def fault_of(address: ServiceAddress) -> str:
    """Why the server cannot be used from here, or nothing."""
    try:
        with socket.create_connection((address.host, address.port), SECONDS) as plain:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False  # FLARE's certificates name the server in their subject
            context.load_verify_locations(address.authority)
            context.load_cert_chain(address.certificate, address.key)
            with context.wrap_socket(plain, server_hostname=address.host) as secure:
                return _fault_of_reply(address, secure)
    except ssl.SSLError as error:
        return f"{address.target} is not the server of this federation: {error.reason or error}"
    except TimeoutError:
        return f"{address.target} does not answer within {SECONDS:.0f} s"
    except ConnectionResetError:
        return f"{address.target} ends the connection: it is not the server of this federation, or does not admit us"
    except OSError as error:
        return f"nothing answers on {address.target} ({error.strerror or error})"


def _fault_of_reply(address: ServiceAddress, secure: ssl.SSLSocket) -> str:
    about: Any = secure.getpeercert()
    names = [value for part in about["subject"] for key, value in part if key == "commonName"]
    if address.identity not in names:
        return f'{address.target} has the certificate of "{", ".join(names)}", not of "{address.identity}"'
    if address.scheme != "http":
        return ""  # no round trip that ends without a session
    secure.sendall(f"GET /health HTTP/1.1\r\nHost: {address.target}\r\nConnection: close\r\n\r\n".encode())
    if not (answer := secure.recv(64)):
        return f"{address.target} does not admit this certificate"
    if not answer.startswith(b"HTTP/1."):
        return f"{address.target} answers {answer[:16]!r}, not as a server of a federation"
    return ""


def is_taken(address: ServiceAddress) -> bool:
    """Whether some program listens on the server's port already."""
    try:
        with socket.create_connection((address.host, address.port), SECONDS):
            return True
    except OSError:
        return False


def is_connected(pid: int, port: int) -> bool | None:
    """Whether a process, or one that it started, has a connection to this port; None if that cannot be seen."""
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return any(
            c.status == psutil.CONN_ESTABLISHED and c.raddr and c.raddr.port == port
            for one in family
            for c in one.net_connections("tcp")
        )
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return None
