"""A federation over broken networks: python benchmarks/networks.py [NAMES] [--out FOLDER]

Server and sites run in network namespaces of their own (ip netns; needs root and /dev/net/tun). What connects them is a
router in this process, which holds a tun device of each namespace and passes packets on: late, not at all, or some of
them. So it needs no netem, which not every kernel has. Parts:

- latency: every packet takes 50 ms, a trip 100 ms;
- loss: one packet in 20 is lost;
- down: in round 3 the link of the first site is down for 30 s;
- half-open: in round 3 nothing of the first site arrives for 30 s, while it goes on to receive;
- down-all, half-open-all: the same where a round needs all three sites, so that the run waits for it to come back;
- many: ten sites, 500 rounds; memory, threads and files of all processes after every fifth of the rounds;
- many-direct: the same with both ends in one process, without FLARE: what of it is fedtailor's own.

Each of the first six is a run over three sites; told is the largest difference from the loop engine in which the same
sites miss the same rounds. What was shown is kept in --out and not run again; the page is docs/results/networks.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.federation import difference
from benchmarks.router import HOST, Router, namespace
from fedtailor.data.configs import SitesConfig
from fedtailor.experiments.config import RunConfig, parse, with_settings
from fedtailor.experiments.runner import Progress
from fedtailor.experiments.store import METRICS, RESULTS, write_atomically
from fedtailor.flare import local_trial
from fedtailor.flare.kits import RUNS, SITE
from fedtailor.flare.operate import process_tree
from fedtailor.flare.server import coordinate
from fedtailor.flare.site import SERVER, SiteService, read_site

TASK: dict[str, Any] = {
    "rounds": 8,
    "data": {"source": "digits", "clients": 3, "max_samples": 60},
    "model": {"name": "mlp", "hidden": [8]},
    "algorithm": {"name": "fedrep"},
    "federation": {"engine": "loop", "silence": 5.0, "deadline": 300.0},
}


@contextmanager
def federation(folder: Path, config: RunConfig, sites: int) -> Iterator[tuple[Router, tuple[str, ...], list[int]]]:
    """Server and sites, each in its namespace; yields the router, the names and the processes."""
    local_trial.HOST = HOST
    names = local_trial.prepare_trial(folder, sites, config, None)
    router = Router(("server", *names))
    started: list[subprocess.Popen[bytes]] = []
    try:
        router.open()
        for role, name in [("server", "server"), *(("site", name) for name in names)]:
            command = ["federation", "start", role, str(folder / name)]
            started.append(_in(name, *command))
        yield router, names, [process.pid for process in started]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
        router.close()


def _in(name: str, *command: str) -> subprocess.Popen[bytes]:
    enter = ["ip", "netns", "exec", namespace(name)] if name else []
    return subprocess.Popen([*enter, sys.executable, "-m", "fedtailor.cli.main", *command], stdout=subprocess.DEVNULL)


def submitted(folder: Path, config: RunConfig, name: str, at_round: int = 0, action: Callable[[], None] = print) -> str:
    """Submit a run from the server's namespace; once a round was recorded, act. Returns how long it took."""
    import tomli_w

    file = folder / f"{name}.toml"
    file.write_text(tomli_w.dumps(config.model_copy(update={"data": SitesConfig()}).plain()))
    begun = time.monotonic()
    job = _in("server", "federation", "submit", str(file), "--admin", str(folder / "admin"), "--run", name)
    lines = folder / "server" / "runs" / name / METRICS
    has_acted = at_round == 0
    while job.poll() is None:
        if not has_acted and lines.exists() and lines.read_bytes().count(b"\n") >= at_round:
            has_acted = True
            action()
        time.sleep(0.2)
    if job.returncode or not (lines.parent / RESULTS).exists():
        raise RuntimeError(f"{name}: did not finish; logs are in {folder}")
    return f"{time.monotonic() - begun:.0f} s"


def for_seconds(seconds: float, begin: Callable[[], None], end: Callable[[], None]) -> None:
    begin()
    time.sleep(seconds)
    end()


def broken(folder: Path, part: str, config: RunConfig) -> dict[str, Any]:
    """One run over three sites on one of the networks."""
    with federation(folder, config, 3) as (router, names, _):
        first = names[0]
        if part == "latency":
            router.delay = 0.05
            took = submitted(folder, config, part)
        elif part == "loss":
            router.loss = 0.05
            took = submitted(folder, config, part)
        elif part.startswith("down"):
            down = lambda: for_seconds(30, lambda: router.link(first, "down"), lambda: router.link(first, "up"))  # noqa: E731
            took = submitted(folder, config, part, 3, down)
        else:
            deaf = lambda: for_seconds(30, lambda: router.deaf.add(first), router.deaf.clear)  # noqa: E731
            took = submitted(folder, config, part, 3, deaf)
    lines = [json.loads(line) for line in (folder / "server/runs" / part / METRICS).read_text().splitlines()]
    missed = sum(bool(line.get("faults")) for line in lines)
    return {"difference": difference(folder, part, config), "rounds missed": missed, "took": took}


def many(folder: Path, config: RunConfig, sites: int, rounds: int) -> dict[str, Any]:
    """Memory in MB and number of files after a fifth of the rounds and at the end."""
    import psutil

    config = config.model_copy(update={"rounds": rounds})
    found: dict[str, Any] = {}
    with federation(folder, config, sites) as (_, _, processes):

        def measure() -> dict[str, float]:
            """Of all processes; resident memory counts shared pages several times."""
            alive = [psutil.Process(p) for root in processes for p in process_tree(root) if psutil.pid_exists(p)]
            sizes = []
            for path in folder.rglob("*"):
                with suppress(FileNotFoundError):  # a checkpoint that was replaced meanwhile
                    sizes += [path.stat().st_size] if path.is_file() else []
            return {
                "MB": sum(p.memory_info().rss for p in alive) / 2**20,
                "threads": sum(p.num_threads() for p in alive),
                "open files": sum(p.num_fds() for p in alive),
                "files": len(sizes),
                "MB on disk": sum(sizes) / 2**20,
            }

        threading.Thread(target=_measured, args=(folder, rounds, found, measure), daemon=True).start()
        found["took"] = submitted(folder, config, "many")
    return found


def _measured(folder: Path, rounds: int, found: dict[str, Any], measure: Callable[[], dict[str, float]]) -> None:
    """After every fifth of the rounds, the last time shortly before the end."""
    lines, done = folder / "server/runs/many" / METRICS, 0
    for part in range(1, 6):
        while done < min(part * rounds // 5, rounds - 2):
            time.sleep(0.5)
            done = lines.read_bytes().count(b"\n") if lines.exists() else 0
        found[f"after {done}"] = measure()
        print(f"after {done} rounds: {found[f'after {done}']}", flush=True)


class _Direct:
    """A link without a network: sites of this process."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.sites = names
        self._services = {name: SiteService(read_site(folder / name / SITE), name) for name in names}
        self._lock = threading.Lock()  # models draw their first values from torch's one generator

    def limit(self, most: int) -> None:
        """Nothing is received."""

    def send(self, site: str, request: bytes, seconds: float) -> bytes:
        with self._lock:
            return self._services[site].answer(SERVER, request)


def many_direct(folder: Path, config: RunConfig, sites: int, rounds: int) -> dict[str, Any]:
    """As `many`, of this process."""
    import psutil

    config = config.model_copy(update={"rounds": rounds})
    names, found, begun = local_trial.prepare_trial(folder, sites, config, None), dict[str, Any](), time.monotonic()

    def watch(progress: Progress) -> None:
        if progress.round % (rounds // 5) == 0:
            gc.collect()
            paths = [path for path in folder.rglob("*") if path.is_file()]
            process = psutil.Process()
            found[f"after {progress.round}"] = {
                "MB": process.memory_info().rss / 2**20,
                "threads": process.num_threads(),
                "open files": process.num_fds(),
                "files": len(paths),
                "MB on disk": sum(path.stat().st_size for path in paths) / 2**20,
            }

    at_sites = config.model_copy(update={"data": SitesConfig()})
    coordinate(_Direct(folder, names), at_sites, "many", folder / "server" / RUNS, watch)
    return found | {"took": f"{time.monotonic() - begun:.0f} s"}


WORDS = {
    "latency": "every packet takes 50 ms",
    "loss": "one packet in 20 is lost",
    "down": "a site's link is down for 30 s",
    "half-open": "nothing from a site arrives for 30 s, but it still receives",
    "down-all": "a site's link is down for 30 s, and every round needs all sites",
    "half-open-all": "nothing from a site arrives for 30 s, and every round needs all sites",
    "many": "server and sites as processes",
    "many-direct": "both ends in one process, without FLARE",
}


def page(found: dict[str, Any], made: str) -> str:
    """Two tables, of what was run."""
    lines = [made, ""]
    lines += ["| network | largest difference from loop | rounds missed by the site | took |", "|---|---|---|---|"]
    for part in found:
        if "difference" in found[part]:
            of = found[part]
            lines.append(f"| {WORDS[part]} | {of['difference']:g} | {of['rounds missed']} of 8 | {of['took']} |")
    keys = ("MB", "threads", "open files", "files", "MB on disk")
    if not any(part.startswith("many") for part in found):
        return "\n".join(lines) + "\n"
    lines += ["", f"| ten sites | rounds | {' | '.join(keys)} | took |", f"|---|---|{'---|' * len(keys)}---|"]
    for part in found:
        for when in (key for key in found[part] if key.startswith("after ")):
            of = " | ".join(f"{found[part][when][key]:.0f}" for key in keys)
            lines.append(f"| {WORDS[part]} | {when.removeprefix('after ')} | {of} | {found[part]['took']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=list(WORDS))
    parser.add_argument("--page", type=Path, default=Path("docs/results/networks.md"))
    parser.add_argument("--out", type=Path, default=Path("build/networks"))
    parser.add_argument("--rounds", type=int, default=500, help="of the part many")
    parser.add_argument("--sites", type=int, default=10, help="of the part many")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # namespaces are removed in any case
    kept = given.out / "networks.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    config: RunConfig = parse(TASK)
    for part in given.parts:
        if part not in found:
            folder = (given.out / part).resolve()
            is_many = part.startswith("many")
            settings = [f"data.clients={given.sites}", "federation.silence=30"] if is_many else []
            settings += ["federation.min_replies=3"] if part.endswith("-all") else []
            made: RunConfig = parse(with_settings(config.plain(), settings))
            if is_many:
                measure = many_direct if part == "many-direct" else many
                found[part] = measure(folder, made, given.sites, given.rounds) | {"rounds": given.rounds}
            else:
                found[part] = broken(folder, part, made)
            write_atomically(kept, json.dumps(found, indent=1).encode())
        print(part, found[part], flush=True)
    intro = given.page.with_suffix(".intro.md")
    told = records.note("networks", "python -m benchmarks.networks", [0])
    write_atomically(given.page, ((intro.read_text() + "\n" if intro.exists() else "") + page(found, told)).encode())


if __name__ == "__main__":
    main()
