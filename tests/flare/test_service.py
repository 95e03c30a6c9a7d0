"""Health looks at the service, not at a process: ports, certificates, copied folders."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedtailor.errors import RunError
from fedtailor.flare import operate, service
from tests.flare.sites import Authority

pytest.importorskip("psutil")


def kits(root: Path, port: int) -> tuple[Path, Path]:
    """The kits of a server and of a site of one federation."""
    authority = Authority()
    files = {"ssl_private_key": "client.key", "ssl_cert": "client.crt", "ssl_root_cert": "rootCA.pem"}
    target = {"service": {"target": f"localhost:{port}", "scheme": "http"}}
    server, site = authority.write_kit(root / "server/kit", "localhost"), authority.write_kit(root / "ada/kit", "ada")
    (server / "fed_server.json").write_text(json.dumps({"servers": [target | files | {"admin_server": "localhost"}]}))
    (site / "fed_client.json").write_text(
        json.dumps({"servers": [target | {"identity": "localhost"}], "client": files})
    )
    return root / "server/kit", root / "ada/kit"


@contextmanager
def serving(kit: Path, listener: socket.socket, answer: bytes = b"HTTP/1.1 404 Not Found\r\n\r\n") -> Iterator[None]:
    """Mutual TLS with the certificate of a kit; answers each request."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(kit / "startup/rootCA.pem")
    context.load_cert_chain(kit / "startup/client.crt", kit / "startup/client.key")
    is_over = threading.Event()

    def serve() -> None:
        listener.settimeout(0.05)
        while not is_over.is_set():
            try:
                plain, _ = listener.accept()
                with plain, context.wrap_socket(plain, server_side=True) as one:
                    one.recv(1000)
                    one.sendall(answer)
            except OSError:
                continue

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_a_server_of_this_federation_answers(tmp_path: Path, listener: socket.socket) -> None:
    server, site = kits(tmp_path, listener.getsockname()[1])
    with serving(server, listener):
        assert service.fault_of(service.read_address(server)) == ""
        assert service.fault_of(service.read_address(site)) == ""


def test_another_program_on_the_port_is_no_server(tmp_path: Path, listener: socket.socket) -> None:
    """Of another federation; a site of this one; one that answers something else; one that ends; nothing at all."""
    port = listener.getsockname()[1]
    server, site = kits(tmp_path, port)
    address = service.read_address(site)
    other, _ = kits(tmp_path / "other", port)
    with serving(other, listener):
        assert "not the server of this federation" in service.fault_of(address)
    with serving(site, listener):
        assert 'has the certificate of "ada", not of "localhost"' in service.fault_of(address)
    with serving(server, listener, b"SSH-2.0"):
        assert "b'SSH-2.0'" in service.fault_of(address)
    with serving(server, listener, b""):
        assert "does not admit this certificate" in service.fault_of(address)
    assert service.is_taken(address)
    listener.close()
    assert f"nothing answers on localhost:{port}" in service.fault_of(address)
    assert not service.is_taken(address)


def test_a_server_does_not_start_on_a_taken_port(tmp_path: Path, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    server, _ = kits(tmp_path, port)
    (server / "startup/sub_start.sh").touch()
    with pytest.raises(RunError, match=f"another program listens on localhost:{port}"):
        operate.start_participant("server", server.parent)
    assert not (server.parent / operate.PID).exists()


def test_a_copied_folder_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate, "start_command", lambda role, folder: operate.StartCommand(["sleep", "60"], {}))
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    pid = operate.start_participant("site", here)
    shutil.copytree(here, there)
    assert operate.find_process(here) == pid
    assert operate.find_process(there) is None
    assert not operate.stop_participant(there)
    here.rename(tmp_path / "moved")  # while it runs
    assert operate.find_process(tmp_path / "moved") == pid
    assert operate.stop_participant(tmp_path / "moved")


def test_a_process_without_a_connection_is_not_healthy(tmp_path: Path, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    server, site = kits(tmp_path, port)
    (site.parent / "site.toml").touch()
    connect = "one = socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
    program = f"import socket, sys; {connect}; print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with listener.accept()[0], serving(server, listener):
            assert operate.service_fault(site.parent, process.pid) == ""
            assert operate.service_fault(server.parent, process.pid) == ""
            process.communicate()
            assert "has no connection to" in operate.service_fault(site.parent, process.pid)
