"""Downloads against a local server: a file appears only if it is whole and right."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from fedtailor.data import download
from fedtailor.data.download import REMOTES, RemoteFile, fetch
from fedtailor.errors import DataError

CONTENT = b"some data " * 1000


class Server(ThreadingHTTPServer):
    """Serves `files`; those in `cut` announce their whole length but end early."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.server.asked.append(name)
        if name not in self.server.files:
            self.send_error(404)
            return
        content = self.server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if name in self.server.cut else content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    md5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
    monkeypatch.setitem(REMOTES, "toy", (RemoteFile("https://example.org/toy.bin", "Toy/raw", f"md5:{md5}"),))


def left(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def failure(name: str, root: Path, server: Server) -> str:
    with pytest.raises(DataError) as caught:
        fetch(name, root, server.url)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_good_file_arrives_once(tmp_path: Path, server: Server) -> None:
    server.files["toy.bin"] = CONTENT
    seen: list[tuple[str, int, int | None]] = []
    paths = fetch("toy", tmp_path, server.url, progress=lambda *step: seen.append(step))
    assert paths == [tmp_path / "Toy/raw/toy.bin"]
    assert paths[0].read_bytes() == CONTENT
    assert left(tmp_path) == ["toy.bin"]
    assert seen[-1] == ("toy.bin", len(CONTENT), len(CONTENT))
    assert fetch("toy", tmp_path, server.url) == paths
    assert server.asked == ["toy.bin"]


def test_damaged_file_is_replaced(tmp_path: Path, server: Server) -> None:
    server.files["toy.bin"] = CONTENT
    path = tmp_path / "Toy/raw/toy.bin"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:100])
    fetch("toy", tmp_path, server.url)
    assert path.read_bytes() == CONTENT


def test_wrong_checksum_leaves_nothing(tmp_path: Path, server: Server) -> None:
    server.files["toy.bin"] = b"other"
    message = failure("toy", tmp_path, server)
    assert "toy.bin: wrong checksum" in message
    assert hashlib.md5(CONTENT, usedforsecurity=False).hexdigest() in message
    assert hashlib.md5(b"other", usedforsecurity=False).hexdigest() in message
    assert left(tmp_path) == []


def test_truncated_transfer_leaves_nothing(tmp_path: Path, server: Server) -> None:
    server.files["toy.bin"] = CONTENT
    server.cut.add("toy.bin")
    message = failure("toy", tmp_path, server)
    assert "toy.bin" in message
    assert "5000" in message
    assert left(tmp_path) == []


def test_absent_file_and_absent_server(tmp_path: Path, server: Server) -> None:
    assert "404" in failure("toy", tmp_path, server)
    with pytest.raises(DataError, match=r"toy.bin.*http://127.0.0.1:1/toy.bin"):
        fetch("toy", tmp_path, "http://127.0.0.1:1")
    with pytest.raises(DataError, match="not an http or https address"):
        fetch("toy", tmp_path, tmp_path.as_uri())
    assert left(tmp_path) == []


def test_unknown_names_get_a_hint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'"cifar".* "cifar10"'):
        fetch("cifar", tmp_path)
    with pytest.raises(DataError, match='nothing to download for "digits"'):
        fetch("digits", tmp_path)


def archive(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def serve_archive(server: Server, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    server.files["box.tar.gz"] = content
    sha256 = hashlib.sha256(content).hexdigest()
    remote = RemoteFile("https://example.org/box.tar.gz", "box", f"sha256:{sha256}", ("one.bin", "two.bin"))
    monkeypatch.setitem(REMOTES, "box", (remote,))


def test_archive_gives_only_the_known_files(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"box/one.bin": b"1", "../evil.bin": b"!", "/evil.bin": b"!", "box/readme": b"?", "box/two.bin": b"22"}
    serve_archive(server, monkeypatch, archive(members))
    root = tmp_path / "root"
    paths = fetch("box", root, server.url)
    assert [path.read_bytes() for path in paths] == [b"1", b"22"]
    assert left(tmp_path) == ["one.bin", "two.bin"]
    fetch("box", root, server.url)
    assert server.asked == ["box.tar.gz"]


def test_archive_without_a_file(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_archive(server, monkeypatch, archive({"box/one.bin": b"1"}))
    assert re.search(r"box\.tar\.gz.*box/two\.bin", failure("box", tmp_path, server))


def test_archive_that_is_none(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_archive(server, monkeypatch, CONTENT)
    assert "box.tar.gz: cannot be unpacked" in failure("box", tmp_path, server)
    assert left(tmp_path) == []


def test_every_data_set_with_files_can_be_fetched() -> None:
    assert set(REMOTES) == {"mnist", "fashion-mnist", "cifar10", "qmnist", "heart-disease", "toy"}
    for remotes in REMOTES.values():
        for remote in remotes:
            kind, digest = remote.checksum.split(":")
            assert len(digest) == {"md5": 32, "sha256": 64}[kind]
            assert int(digest, 16) > 0


@pytest.mark.data
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "qmnist", "heart-disease", "cifar10"])
def test_real_files_are_recognised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a right file was fetched again")

    monkeypatch.setattr(download, "_stream", refuse)
    assert all(path.is_file() for path in fetch(name))
