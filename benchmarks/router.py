"""Network namespaces on this machine, and a router between them that is late or loses packets. Needs root.

It holds a tun device of each namespace and passes packets on, so that no kernel module for broken networks is needed.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
HOST = "fedtailor-server"  # the first one; known in the namespaces only


def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        return "network namespaces need iproute2 and /dev/net/tun"
    try:
        run("ip", "netns", "add", namespace("try"))
        run("ip", "netns", "delete", namespace("try"))
    except OSError as error:
        return str(error)
    return ""


def namespace(name: str) -> str:
    return f"ft{os.getpid()}-{name}"


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class Router:
    """Passes packets between namespaces; `delay`, `loss` and `deaf` (whose packets are dropped) may change any time."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.delay, self.loss, self.deaf = 0.0, 0.0, set[str]()
        self._made: list[str] = []
        self._fds: dict[int, int] = {}  # last byte of the address -> tun
        self._draw = random.Random(0)
        self._over = False

    def open(self) -> None:
        """A namespace, a tun device and an address for each, and the names of all of them."""
        hosts = "127.0.0.1 localhost\n" + f"10.77.0.1 {HOST}\n"
        for i, name in enumerate(self.names, 1):
            space = namespace(name)
            run("ip", "netns", "add", space)
            self._made.append(space)
            self._fds[i] = _tun_in(space)
            run("ip", "-n", space, "link", "set", "lo", "up")
            run("ip", "-n", space, "address", "add", f"10.77.0.{i}/24", "dev", "tun0")
            run("ip", "-n", space, "link", "set", "tun0", "up")
            Path("/etc/netns", space).mkdir(parents=True)
            Path("/etc/netns", space, "hosts").write_text(hosts)
        self._thread = threading.Thread(target=self._pass, daemon=True)
        self._thread.start()

    def _pass(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []
        number, by_fd = 0, {fd: i for i, fd in self._fds.items()}
        while not self._over:
            soon = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.2
            for fd in select.select(list(by_fd), [], [], min(soon, 0.2))[0]:
                packet = os.read(fd, 65536)
                sender = self.names[by_fd[fd] - 1]
                if len(packet) < 20 or packet[0] >> 4 != 4 or sender in self.deaf or self._draw.random() < self.loss:
                    continue
                number += 1
                heapq.heappush(waiting, (time.monotonic() + self.delay, number, packet[19], packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(waiting)
                if to in self._fds:
                    with suppress(OSError):  # the link of the receiver is down
                        os.write(self._fds[to], packet)

    def link(self, name: str, state: str) -> None:
        """Take the link of a namespace up or down."""
        run("ip", "-n", namespace(name), "link", "set", "tun0", state)

    def close(self) -> None:
        self._over = True
        if hasattr(self, "_thread"):
            self._thread.join()
        for fd in self._fds.values():
            os.close(fd)
        for space in self._made:
            run("ip", "netns", "delete", space)
            for file in Path("/etc/netns", space).glob("*"):
                file.unlink()
            Path("/etc/netns", space).rmdir()


def _tun_in(space: str) -> int:
    """A tun device in another namespace, held by this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{space}", os.O_RDONLY)
    try:
        if libc.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
        fd = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI))
        return fd
    finally:
        libc.setns(here, CLONE_NEWNET)
        os.close(here)
        os.close(there)
