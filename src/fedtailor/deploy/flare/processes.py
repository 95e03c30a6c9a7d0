"""Participants as processes of this machine: started, found again after the launcher died, restarted, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from fedtailor.deploy.flare.provisioning import how_to_start
from fedtailor.experiments.store import write_atomically

PID, LOG = "process.json", "log.txt"


def start(role: str, folder: Path) -> int:
    """Start a participant in the background, unless it runs; returns its process id. It logs to its own folder."""
    if (pid := running(folder)) is not None:
        return pid
    how = how_to_start(role, folder)
    rotate(folder / LOG)
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            how.command,
            env=how.environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    write_atomically(folder / PID, json.dumps({"pid": process.pid, "started": _started(process.pid)}).encode())
    threading.Thread(target=process.wait, daemon=True).start()  # so that it does not stay as a zombie
    return process.pid


def running(folder: Path) -> int | None:
    """The process of a participant, if it is alive; a number that was given to another process since is not it."""
    try:
        known = json.loads((folder / PID).read_text())
        return int(known["pid"]) if _started(known["pid"]) == known["started"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def wait(folder: Path) -> None:
    """Return when the participant has ended; its log is kept small meanwhile."""
    while running(folder) is not None:
        rotate(folder / LOG)
        time.sleep(0.5)


def rotate(log: Path, most: int = 10 * 2**20, keep: int = 3) -> None:
    """A log that has grown large becomes log.1, that log.2, and so on; who writes to it by appending goes on."""
    if not log.exists() or log.stat().st_size < most:
        return
    for number in range(keep - 1, 0, -1):
        if (old := log.with_name(f"{log.name}.{number}")).exists():
            os.replace(old, log.with_name(f"{log.name}.{number + 1}"))
    first = log.with_name(f"{log.name}.1")
    first.write_bytes(log.read_bytes())
    os.truncate(log, 0)


def stop(folder: Path, seconds: float = 5.0) -> bool:
    """End a participant and the jobs it started; whether there was one."""
    pid = running(folder)
    if pid is None:
        return False
    family = {p: _started(p) for p in tree(pid)}
    until = time.monotonic() + seconds
    for how in (signal.SIGTERM, signal.SIGKILL):
        alive = [p for p, since in family.items() if _started(p) == since is not None]
        for each in alive:
            with suppress(ProcessLookupError):
                os.kill(each, how)
        while time.monotonic() < until and any(_started(p) == family[p] for p in alive):
            time.sleep(0.05)
    return True


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    import psutil

    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _started(pid: int) -> float | None:
    """When a process began, by which it is told from a later one of the same number; None if it is gone."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


class ProcessSupervisor:
    """Keeps participants running: who dies is started again. For a federation on one machine."""

    def __init__(self, participants: dict[str, tuple[str, Path]]) -> None:
        self.participants = participants  # name -> role, folder
        self._over = threading.Event()
        for role, folder in participants.values():
            start(role, folder)
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def add(self, name: str, role: str, folder: Path) -> None:
        """One more."""
        start(role, folder)
        self.participants = self.participants | {name: (role, folder)}

    def _keep(self) -> None:
        while not self._over.wait(1.0):
            for role, folder in self.participants.values():
                start(role, folder)

    def stop(self) -> None:
        """End them all."""
        self._over.set()
        self._thread.join()
        enders = [threading.Thread(target=stop, args=(folder,)) for _, folder in self.participants.values()]
        for thread in enders:
            thread.start()
        for thread in enders:
            thread.join()
