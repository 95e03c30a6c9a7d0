"""Namespaces with a router between them that is late, loses packets or nearly all of them: what TCP makes of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.router import HOST, Router, namespace, why_not

SERVER = """
import socket
with socket.create_server(("0.0.0.0", 7777)) as server:
    print("listening", flush=True)
    while True:
        with server.accept()[0] as one:
            while part := one.recv(65536):
                one.sendall(part)
"""
CLIENT = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7777), timeout=60) as one:
    begun = time.monotonic()
    one.sendall(b"x")
    assert one.recv(1) == b"x"
    print(time.monotonic() - begun, flush=True)
    sent = bytes(range(256)) * 80
    one.sendall(sent)
    back = b""
    while len(back) < len(sent):
        back += one.recv(65536)
    assert back == sent
    print("all", flush=True)
"""


@pytest.fixture
def router() -> Iterator[Router]:
    if why := why_not():
        pytest.skip(why)
    made = Router(("server", "site"))
    try:
        made.open()
        yield made
    finally:
        made.close()


def started(name: str, program: str, *words: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", namespace(name), sys.executable, "-S", "-c", program, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_packets_are_late_lost_and_cut_off(router: Router) -> None:
    with started("server", SERVER) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
            _tried(router)
        finally:
            server.kill()


def _tried(router: Router) -> None:
    router.delay, router.loss = 0.05, 0.05
    client = started("site", CLIENT, HOST)
    told = client.communicate(timeout=120)[0].split()
    assert client.returncode == 0
    assert float(told[0]) >= 0.1  # there and back
    assert told[1] == "all"
    router.delay = router.loss = 0.0
    router.deaf.add("site")  # nothing of it arrives: a connection does not come about
    client = started("site", CLIENT, HOST)
    with pytest.raises(subprocess.TimeoutExpired):
        client.communicate(timeout=2)
    router.deaf.clear()  # and does later, for TCP tries again
    assert client.communicate(timeout=60)[0].split()[1] == "all"
    router.link("site", "down")
    router.link("site", "up")
    client = started("site", CLIENT, HOST)
    assert client.communicate(timeout=60)[0].split()[1] == "all"
