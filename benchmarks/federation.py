"""A real federation on 127.0.0.1: equality with the loop engine, trip times, faults, and refusals.

Every part prints one line and can be run alone; what was shown already is not run again (it is kept in --out).
Example: python benchmarks/federation.py fedrep site_killed
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w
import torch

from fedtailor.core import codec
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Tree, items, tree_map
from fedtailor.engines.inprocess import InProcess
from fedtailor.errors import RunError
from fedtailor.experiments import runner
from fedtailor.experiments.building import assemble, build_experiment
from fedtailor.experiments.config import RunConfig, parse, with_settings
from fedtailor.experiments.store import METRICS, RESULTS, RunFolder, read_json, read_tree
from fedtailor.flare import kits, nvidia, operate
from fedtailor.flare import local_trial as local
from fedtailor.flare.nvidia import Launcher
from fedtailor.flare.protocol import ENVELOPE
from fedtailor.flare.site import AUDIT, SERVER, SiteService, SiteState, read_site

ROOT = Path(__file__).parents[1]
TASK: dict[str, Any] = {
    "rounds": 12,
    "data": {"source": "heart-disease"},
    "model": {"hidden": [16]},
    "federation": {"engine": "loop", "silence": 4.0, "deadline": 120.0},
}
ECHO = "benchmarks.echo:Echo"
SIZES = {"1 KB": 256, "1 MB": 262_144}
LINEAR = ["model.name=linear", "model.dtype=float64"]
ALGORITHMS: dict[str, list[str]] = {
    "fedavg": [],
    "fedrep": [],
    "ditto": [],
    "fedselect": [],
    # for linear regression only, which heart disease is not
    "learn2pfed": [
        "data.source=polynomial",
        "data.clients=3",
        *LINEAR,
        "algorithm.outer=loo",
        "algorithm.gradient=exact",
    ],
    "learn2pfed-net": [],
    "duw-fedavg": ["algorithm.outer_iterations=3", "algorithm.horizon=3"],
    "fedeq": ["model.name=deq-mlp", "model.width=32", "model.hidden=16"],
}


def configured(algorithm: str, *settings: str) -> RunConfig:
    """The common task with an algorithm."""
    tables = {k: v for k, v in TASK.items() if not (k == "model" and any(s.startswith("model.name") for s in settings))}
    if any(s.startswith("data.source=") for s in settings):
        tables.pop("data")
    made: RunConfig = parse(with_settings(tables, [f"algorithm.name={algorithm}", *settings]))
    return made


def replayed(
    config: RunConfig, sites: int, lines: list[dict[str, Any]]
) -> tuple[Tree, dict[str, Tree], dict[str, Any]]:
    """The same run on the loop engine, in which clients miss the rounds that they missed in the federation."""
    data = build_experiment(config).data
    setting = assemble(config, data.only(range(sites)))
    torch.set_num_threads(config.federation.threads or 1)  # as a run, and a site, has it
    engine = InProcess(setting)
    engine.start()
    fed = Federation(engine, config.federation.limits)
    server = setting.algorithm.server_init(setting.model)
    for line in lines:
        if "abandoned" in line:
            continue
        lost = {fault["client"] for fault in line.get("faults", [])}
        cohort = [c for c in line["cohort"] if setting.data.clients[c] not in lost]
        server = fed.run_round(line["round"], cohort, server)
    rows = engine.get_states()
    states = {name: tree_map(lambda v, i=i: v[i : i + 1], rows) for i, name in enumerate(setting.data.clients)}
    models = {}
    for (client,), _, stack in engine.evaluate(range(sites), lines[-1]["round"], server, ["test"]):
        models[setting.data.clients[client]] = {k: v[0] for k, v in stack.items()}
    return server, states, models


def difference(folder: Path, run: str, config: RunConfig) -> float:
    """The largest difference of any tensor (server, private states, personal models) from the replayed run."""
    at_server = RunFolder(folder / "server" / kits.RUNS / run)
    saved = at_server.load_checkpoint()
    assert saved is not None
    roster = read_json(at_server.path / "federation.json")
    server, states, models = replayed(config, len(roster["clients"]), at_server.metrics())
    found = {"server": saved[1]["state"]["server"]}
    wanted: dict[str, Any] = {"server": server}
    for name, kept in zip(roster["clients"], saved[1]["state"]["clients"]["kept"].tolist(), strict=True):
        private = folder / name / "private" / roster["run"]
        found[f"state of {name}"] = SiteState(private / "states").read(kept)
        wanted[f"state of {name}"] = states[name]
        if (private / "personal" / "last.json").exists():
            found[f"model of {name}"] = read_tree(private / "personal", read_json(private / "personal" / "last.json"))
            wanted[f"model of {name}"] = models[name]
    ours, theirs = dict(items(found)), dict(items(wanted))
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max(float((ours[k].double() - theirs[k].double()).abs().max()) for k in ours if ours[k].numel())


class Bench:
    """A federation that is kept running for all parts, and what they have shown."""

    def __init__(self, out: Path, verbose: bool) -> None:
        self.out = out
        self.verbose = verbose
        self.source = "heart-disease"
        self.folder = out / f"federation-{self.source}"
        self.keeper: operate.ProcessSupervisor | None = None

    def say(self, text: str) -> None:
        if self.verbose:
            print(f"  {time.strftime('%H:%M:%S')} {text}", flush=True)

    def run(self, config: RunConfig, name: str, sites: int = 3, fresh: bool = True) -> RunFolder:
        """A run in the federation that is there."""
        if config.data.source != self.source:  # its clients have other names
            self.stop()
            self.source, self.folder = config.data.source, self.out / f"federation-{config.data.source}"
        path = self.folder / "server" / kits.RUNS / name
        if fresh:
            shutil.rmtree(path, ignore_errors=True)
        names = local.prepare_trial(self.folder, sites, config, None)
        if self.keeper is None:
            self.keeper = operate.ProcessSupervisor(local.trial_roles(self.folder, names))
        for site in names:
            if self.folder / site not in self.keeper.roles:
                self.keeper.add("site", self.folder / site)
        at_sites = config.model_copy(update={"data": parse({"data": {"source": "sites"}}).data})
        Launcher(self.folder / "admin", at_sites, name, names, self.say).run_to_end()
        return RunFolder(path)

    def stop(self) -> None:
        if self.keeper is not None:
            self.keeper.stop()
            self.keeper = None


def equal_to_loop(algorithm: str) -> Callable[[Bench], str]:
    """An algorithm over three sites against the loop engine."""

    def part(bench: Bench) -> str:
        """Three sites against the loop engine, twelve rounds."""
        settings = ALGORITHMS[algorithm]
        config = configured(algorithm, *settings)
        run = f"equal-{algorithm}"
        folder = bench.run(config, run)
        gap = difference(bench.folder, run, config)
        seconds = sorted(line["seconds"] for line in folder.metrics())
        assert gap <= 1e-6, gap
        return f"largest difference {gap:.1e}; a round {1000 * seconds[len(seconds) // 2]:.0f} ms"

    return part


def fourth_joins(bench: Bench) -> str:
    """Three hospitals begin; the fourth comes while they train, and the run goes on with four."""
    config = configured("fedrep", "rounds=300")
    run = "fourth-joins"
    shutil.rmtree(bench.folder / "server" / kits.RUNS / run, ignore_errors=True)
    result: list[RunFolder] = []
    path = bench.folder / "server" / kits.RUNS / run
    names = local.prepare_trial(bench.folder, 3, config, None)
    bench.run(configured("fedavg", "rounds=1"), "warm-up")  # the three are connected
    local.prepare_trial(bench.folder, 3, config, None)
    at_sites = config.model_copy(update={"data": parse({"data": {"source": "sites"}}).data})
    launcher = Launcher(bench.folder / "admin", at_sites, run, names, bench.say)

    def train() -> None:
        launcher.run_to_end()
        result.append(RunFolder(path))

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    _rounds(path, 5)
    (fourth,) = set(local.prepare_trial(bench.folder, 4, config, None)) - set(names)
    assert bench.keeper is not None
    bench.keeper.add("site", bench.folder / fourth)
    thread.join(300)
    assert result
    lines = result[0].metrics()
    joined = next(line["round"] for line in lines if len(line["cohort"]) == 4)
    gap = difference(bench.folder, run, config)
    assert gap <= 1e-6, gap
    return f"{fourth} joined in round {joined} of {len(lines)}; largest difference {gap:.1e}"


def trips(bench: Bench) -> str:
    """Median time of a map over three sites, by size of the message."""
    told = []
    for name, floats in SIZES.items():
        settings = ["rounds=3", "model.name=linear", f"algorithm.floats={floats}", "evaluation.every=3"]
        folder = bench.run(configured(ECHO, *settings), f"trips-{floats}")
        told.append(f"{name} {folder.metrics()[-1]['report']['median_ms']:.0f} ms")
    return "median trip, 3 sites: " + ", ".join(told)


def secure_sums(bench: Bench) -> str:
    """FedRep over four sites in secure sums only, against plain sums: the result, the seconds and the bytes."""
    plain = configured("fedrep")
    folders = [
        bench.run(configured("fedrep", *settings), run, sites=4)
        for run, settings in {"plain-sums": [], "secure-sums": ["privacy.secure_sum=true"]}.items()
    ]
    gap = difference(bench.folder, "secure-sums", plain)
    assert gap <= 1e-6, gap
    told = []
    for folder in folders:
        seconds = sorted(line["seconds"] for line in folder.metrics())
        assert folder.results is not None
        traffic = folder.results["traffic"]
        told.append(f"{1000 * seconds[len(seconds) // 2]:.0f} ms and {traffic['up'] / 12 / 4 / 1000:.1f} kB up")
    return f"largest difference {gap:.1e}; a round and client: {told[1]}, in the open {told[0]}"


def learn2pfed_epoch(bench: Bench) -> str:
    """An epoch of Learn2pFed with ten cells, unrolled over the network."""
    settings = ALGORITHMS["learn2pfed"]
    folder = bench.run(configured("learn2pfed", *settings, "algorithm.cells=10", "rounds=8"), "epoch")
    seconds = sorted(line["seconds"] for line in folder.metrics()[1:])
    return f"median epoch with L=10: {seconds[len(seconds) // 2]:.2f} s ({folder.metrics()[-1]['trips'] // 8} trips)"


def _rounds(path: Path, rounds: int, seconds: float = 120) -> None:
    """Wait until so many rounds are recorded."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (path / METRICS).exists() and len(RunFolder(path).metrics()) >= rounds:
            return
        time.sleep(0.02)
    raise TimeoutError(f"{path}: {rounds} rounds were not reached")


def faulty(hurt: Callable[[Path, subprocess.Popen[bytes]], str], rounds: int = 150) -> Callable[[Bench], str]:
    """`fedtailor federation local` with something done to it in round 10; then it must finish as if they had missed."""

    def part(bench: Bench) -> str:
        bench.stop()
        out = bench.out / hurt.__name__
        shutil.rmtree(out, ignore_errors=True)
        bench.out.mkdir(parents=True, exist_ok=True)
        config = configured("fedrep", f"rounds={rounds}")
        file = bench.out / f"{hurt.__name__}.toml"
        file.write_text(tomli_w.dumps(config.plain()))
        command = [sys.executable, "-m", "fedtailor.cli.main", "federation", "local", "3", str(file)]
        command += ["--run", "hurt", "--out", str(out)]
        with (bench.out / f"{hurt.__name__}.txt").open("wb") as log:
            begun = time.monotonic()
            process = subprocess.Popen(command, stdout=log, stderr=log)
            path = out / "server" / kits.RUNS / "hurt"
            try:
                _rounds(path, 10)
                told = hurt(out, process)
                if process.poll() is not None:  # the one printed command
                    process = subprocess.Popen(command, stdout=log, stderr=log)
                process.wait(400)
            finally:
                process.kill()
                for participant in out.iterdir():
                    operate.stop_participant(participant)
        lines = RunFolder(path).metrics()
        missed = sorted({line["round"] for line in lines if line.get("faults")})
        gap = difference(out, "hurt", config)
        assert (path / RESULTS).exists()
        assert gap <= 1e-6, gap
        seconds = time.monotonic() - begun
        return f"{told}; missed {len(missed)} of {len(lines)} rounds; largest difference {gap:.1e}; {seconds:.0f} s"

    part.__doc__ = hurt.__doc__
    part.__doc__ = hurt.__doc__
    return part


def _site(out: Path) -> Path:
    return out / "hungarian"


def job_killed(out: Path, launcher: subprocess.Popen[bytes]) -> str:
    """SIGKILL of a site's job process."""
    import psutil

    pid = operate.find_process(_site(out))
    assert pid is not None
    found = [p for p in operate.process_tree(pid) if "worker_process" in " ".join(psutil.Process(p).cmdline())]
    os.kill(found[0], signal.SIGKILL)
    return "site's job killed"


def site_killed(out: Path, launcher: subprocess.Popen[bytes]) -> str:
    """SIGKILL of all processes of a site."""
    pid = operate.find_process(_site(out))
    assert pid is not None
    for each in operate.process_tree(pid):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    return "whole site killed"


def server_killed(out: Path, launcher: subprocess.Popen[bytes]) -> str:
    """SIGKILL of the server and its job."""
    pid = operate.find_process(out / "server")
    assert pid is not None
    for each in operate.process_tree(pid):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    return "server killed"


def launcher_killed(out: Path, launcher: subprocess.Popen[bytes]) -> str:
    """SIGKILL of the launcher; the same command is given again."""
    launcher.kill()
    launcher.wait()
    time.sleep(1)
    return "launcher killed, command given again"


def site_paused(out: Path, launcher: subprocess.Popen[bytes]) -> str:
    """A site that stands still for 20 s."""
    pid = operate.find_process(_site(out))
    assert pid is not None
    family = operate.process_tree(pid)
    for each in family:
        os.kill(each, signal.SIGSTOP)
    time.sleep(20)
    for each in family:
        os.kill(each, signal.SIGCONT)
    return "site paused for 20 s"


def unlisted_algorithm(bench: Bench) -> str:
    """A configuration whose algorithm is not in the sites' policy."""
    config = configured("ditto", "rounds=2")
    path = bench.folder / "server" / kits.RUNS / "unlisted"
    shutil.rmtree(path, ignore_errors=True)
    bench.run(configured("fedavg", "rounds=1"), "warm-up")  # sites allow fedavg now
    names = tuple(read_json(bench.folder / kits.ABOUT)["sites"])
    at_sites = config.model_copy(update={"data": parse({"data": {"source": "sites"}}).data})
    try:
        Launcher(bench.folder / "admin", at_sites, "unlisted", names, bench.say).run_to_end()
    except RunError as error:
        return f"refused: {str(error)[:160]}"
    raise AssertionError("it ran")


def shipped_code(bench: Bench) -> str:
    """A job that brings its own code."""
    from nvflare.collab import CollabRecipe

    bench.run(configured("fedavg", "rounds=1"), "warm-up")
    folder = bench.out / "shipping"
    shutil.rmtree(folder, ignore_errors=True)
    recipe = CollabRecipe(job_name="shipping", server=nvidia.Coordinator("x", "{}"), client=nvidia.Participant())
    recipe.export(str(folder))
    with nvidia.admin_session(bench.folder / "admin" / kits.KIT, kits.ADMIN) as office:
        job = office.submit(folder / "shipping")
        for _ in range(60):
            if (status := office.status(job)) not in nvidia.RUNNING:
                break
            time.sleep(1)
        detail = [str(text) for text in office._session.get_job_meta(job)["job_deploy_detail"] if "OK" not in str(text)]
    assert status != nvidia.FINISHED, status
    assert any("BYOC" in text for text in detail), detail
    return f"refused: {status}; {detail[0][:120]}"


def older_version(bench: Bench) -> str:
    """A site with another version of the package."""
    bench.stop()
    bench.source, bench.folder = "heart-disease", bench.out / "federation-heart-disease"
    old = bench.out / "old-package"
    shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(ROOT / "src" / "fedtailor", old / "fedtailor")
    text = (old / "fedtailor" / "__init__.py").read_text()
    version = text.split('__version__ = "')[1].split('"')[0]
    (old / "fedtailor" / "__init__.py").write_text(text.replace(version, "0.0.9"))
    config = configured("fedavg", "rounds=2")
    names = local.prepare_trial(bench.folder, 3, config, None)
    folder = bench.folder / names[0]
    operate.stop_participant(folder)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{old}{os.pathsep}{before}"
    try:
        operate.start_participant("site", folder)
    finally:
        os.environ["PYTHONPATH"] = before
    run = bench.run(config, "older-version")
    bench.stop()
    audit = [json.loads(line) for line in (folder / "private" / AUDIT).read_text().splitlines()]
    refused = [line["refused"] for line in audit if "refused" in line][-1]
    assert "0.0.9" in refused
    assert names[0] not in run.about["clients"]
    return f"refused: {refused}; {len(run.about['clients'])} others trained"


def foreign_certificate(bench: Bench) -> str:
    """A site whose certificate was signed by somebody else."""
    config = configured("fedavg", "rounds=1")
    bench.run(config, "warm-up")
    about = read_json(bench.folder / kits.ABOUT)
    rogue = bench.out / "rogue"
    shutil.rmtree(rogue, ignore_errors=True)
    kits.provision(rogue, about["host"], about["port"], ["rogue"])
    shutil.copy(bench.folder / about["sites"][0] / kits.SITE, rogue / "rogue" / kits.SITE)
    shutil.copy(bench.folder / about["sites"][0] / "rows.safetensors", rogue / "rogue" / "rows.safetensors")
    operate.start_participant("site", rogue / "rogue")
    try:
        time.sleep(15)
        with nvidia.admin_session(bench.folder / "admin" / kits.KIT, kits.ADMIN) as office:
            there = office.sites()
    finally:
        operate.stop_participant(rogue / "rogue")
    log = (rogue / "rogue" / operate.LOG).read_text()
    assert "rogue" not in there, there
    reason = next(
        (line for line in log.splitlines() if "CERTIFICATE_VERIFY" in line or "handshake" in line.lower()), ""
    )
    return f"never connected in 15 s, the others did: {', '.join(there)}; {reason.strip()[-100:]}"


def strange_requests(bench: Bench) -> str:
    """What a server may not ask: directly at a site's own end, with the site's own files."""
    config = configured("fedrep", "rounds=2")
    name = local.prepare_trial(bench.folder, 3, config, None)[0]
    service = SiteService(read_site(bench.folder / name / kits.SITE), name)
    told = []
    number = 0

    def ask(header: dict[str, Any], tree: Tree = None, caller: str = SERVER) -> str:
        nonlocal number
        number += 1
        request = ENVELOPE.pack(b"0" * 16, number) + codec.encode(header, tree)
        return str(codec.decode_header(service.answer(caller, request)).get("refused"))

    from fedtailor.flare.protocol import config_for, data_schema, promise

    plain = config.model_copy(update={"data": parse({"data": {"source": "sites"}}).data})
    hello = {"op": "hello", "version": runner.version("fedtailor"), "run": "strange", "algorithm": "fedrep"}
    ask(hello | {"model": "mlp", "rounds": 2, "seed": 0})
    assert service._data is not None
    setting = assemble(plain, service._data)
    start = {"op": "start", "config": config_for(plain, 0), "client": 0, "schema": data_schema(service._data)}
    ask(start | {"promise": promise(setting), "first": 0})
    ask({"op": "begin", "round": 1, "kept": 0, "needed": []})
    call = {"round": 1, "call": 0, "placed": [], "taped": False}
    told.append(ask(call | {"function": "client_init"}, ()))
    told.append(ask({"op": "evaluate", "round": 1, "splits": ["val"], "keep": "", "models": True}, setting.model.body))
    told.append(ask({"op": "get_states"}))
    told.append(ask({"op": "finish"}, caller="hungarian"))
    assert all(text != "None" for text in told), told
    return "refused: " + "; ".join(told)


def capture(bench: Bench) -> str:
    """All packets of a FedRep run on this machine's loopback, searched for the head's bytes."""
    config = configured("fedrep", "rounds=4")
    bench.run(configured("fedavg", "rounds=1"), "warm-up")
    packets: list[bytes] = []
    over = threading.Event()
    port = read_json(bench.folder / kits.ABOUT)["port"]
    sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sniffer.bind(("lo", 0))
    sniffer.settimeout(0.2)

    def listen() -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                packets.append(sniffer.recv(65536))

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        bench.run(config, "capture")
    finally:
        over.set()
        thread.join()
    traffic = b"".join(p for p in packets if port.to_bytes(2, "big") in p[34:38])
    roster = read_json(bench.folder / "server" / kits.RUNS / "capture" / "federation.json")
    heads = 0
    for name in roster["clients"]:
        vault = SiteState(bench.folder / name / "private" / roster["run"] / "states")
        for kept in vault.rounds():
            for _, leaf in items(vault.read(kept)["state"]):
                heads += 1
                assert leaf.numpy().tobytes()[:16] not in traffic
    return f"{len(traffic) / 1e6:.1f} MB captured; none of {heads} tensors of heads in it"


PARTS: dict[str, Callable[[Bench], str]] = {
    **{name: equal_to_loop(name) for name in ALGORITHMS},
    "trips": trips,
    "learn2pfed_epoch": learn2pfed_epoch,
    "unlisted_algorithm": unlisted_algorithm,
    "strange_requests": strange_requests,
    "shipped_code": shipped_code,
    "foreign_certificate": foreign_certificate,
    "capture": capture,
    "fourth_joins": fourth_joins,
    "secure_sums": secure_sums,
    "older_version": older_version,
    **{hurt.__name__: faulty(hurt) for hurt in (job_killed, site_killed, server_killed, launcher_killed)},
    "site_paused": faulty(site_paused, 400),
}


def main() -> None:
    """Run the parts that are asked for and not shown yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"Which; all if none: {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=Path("runs/federation-benchmark"))
    parser.add_argument("--again", action="store_true", help="Also what was shown already.")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--table", action="store_true", help="Run nothing; what was shown, as a table.")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    bench = Bench(arguments.out.resolve(), arguments.verbose)
    shown_file = bench.out / "shown.json"
    shown: dict[str, str] = json.loads(shown_file.read_text()) if shown_file.exists() else {}
    if arguments.table:
        print("| part | what was seen |\n|---|---|")
        for name, part in PARTS.items():
            if name in shown:
                what = (part.__doc__ or "").partition("\n")[0]
                print(f"| `{name}`: {what} | {shown[name]} |")
        return
    failed = False
    try:
        for name in arguments.parts or PARTS:
            if name not in shown or arguments.again:
                try:
                    shown[name] = PARTS[name](bench)
                except (AssertionError, RunError, TimeoutError, OSError) as error:
                    failed = True
                    print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
                    continue
                bench.out.mkdir(parents=True, exist_ok=True)
                shown_file.write_text(json.dumps(shown, indent=1))
            print(f"{name}: {shown[name]}", flush=True)
    finally:
        bench.stop()
    sys.exit(failed)


if __name__ == "__main__":
    main()
