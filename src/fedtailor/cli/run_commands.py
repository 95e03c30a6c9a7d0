"""Commands that train one algorithm: run and resume."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtailor.cli.interruptions import accept_trust, command_words, process_group, resumable
from fedtailor.cli.options import AsJson, Config, DataRoot, Device, Out, Run, Settings, Trust
from fedtailor.cli.output import console, print_json, print_table, progress_to_stderr, unit
from fedtailor.errors import ConfigError, RunError

if TYPE_CHECKING:
    from fedtailor.core.process_group import ProcessGroup


def run(
    config: Config,
    settings: Settings = [],  # noqa: B006
    data_root: DataRoot = None,
    out: Out = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Train one algorithm and keep every client's personal model.

    Example: fedtailor run config.toml --set algorithm.name=ditto
    """
    from fedtailor.experiments import runner
    from fedtailor.experiments.config import RunConfig, parse, read_toml, with_settings
    from fedtailor.experiments.progress import show_progress
    from fedtailor.experiments.store import new_path

    chosen = [] if device is None else [f"federation.device={device}"]
    tables = with_settings(read_toml(config), [*settings, *chosen])
    if "compare" in tables:
        raise ConfigError(
            f"{config}: describes a comparison; run it with {shlex.join(['fedtailor', 'compare', str(config)])}"
        )
    checked = parse(tables, RunConfig, str(config))
    name = f"{checked.data.source}-{checked.algorithm.name}-seed{checked.seed}".replace(":", ".")
    with process_group(checked.federation.timeout) as ranks:
        path = Path(ranks.all_gather_object(str(out or new_path(Path("runs"), name)))[0])
        bar = show_progress(console, checked.algorithm.name) if ranks.rank == 0 else nullcontext()
        with progress_to_stderr(as_json), resumable(command_words("resume", path), path, ranks), bar as listener:
            runner.start(checked, path, data_root, listener, ranks=ranks)
        _print_result(path, ranks, as_json)


def resume(
    run: Run, data_root: DataRoot = None, trust: Trust = False, device: Device = None, as_json: AsJson = False
) -> None:
    """Resume an interrupted run.

    The result equals that of an uninterrupted run. A run started on one device can be resumed on another.
    """
    from fedtailor.experiments import runner
    from fedtailor.experiments.progress import show_progress
    from fedtailor.experiments.store import RunFolder

    accept_trust(run, trust)
    with process_group(RunFolder.open(run).config.federation.timeout) as ranks:
        bar = show_progress(console, run.resolve().name) if ranks.rank == 0 else nullcontext()
        with progress_to_stderr(as_json), resumable(command_words("resume", run), run, ranks), bar as listener:
            runner.resume(run, data_root, listener, ranks=ranks, device=device)
        _print_result(run, ranks, as_json)


def _print_result(path: Path, ranks: ProcessGroup, as_json: bool) -> None:
    if ranks.rank == 0:
        print_json(run_record(path)) if as_json else print_run(path)


def run_record(path: Path) -> dict[str, Any]:
    """The figures of a run, as far as it has come."""
    from fedtailor.experiments.store import RunFolder

    folder = RunFolder.open(path)
    about, results = folder.about, folder.results
    task = {k: about[k] for k in ("data", "task", "clients", "train_samples", "notes", "parameters", "engine")}
    return {
        "folder": path,
        "what": "run",
        "finished": results is not None,
        "rounds": len(folder.metrics()),
        **task,
        "config": folder.config.plain(),
        "results": results,
    }


def print_run(path: Path, clients: bool = False) -> None:
    """Print a run in a few lines: task, results, traffic, rejected replies; with `clients` every client's metrics."""
    from fedtailor.experiments.store import RunFolder
    from fedtailor.studies import result_tables
    from fedtailor.studies.compare import local_reference
    from fedtailor.studies.result_tables import RUN_COLUMNS, number, private_words, run_rows, size

    folder = RunFolder.open(path)
    config, about, results = folder.config, folder.about, folder.results
    sizes = about["train_samples"]
    print(f"run        {path}")
    print(f"task       {about['data']}: {about['task']}, {len(sizes)} clients, {sum(sizes)} training samples")
    for note in about["notes"]:
        print(f"           {note}")
    options = ", ".join(f"{k}={v}" for k, v in config.algorithm.options.items())
    print(f"algorithm  {config.algorithm.name}  {options}".rstrip())
    ranks = f" on {about['ranks']} ranks" if about.get("ranks", 1) > 1 else ""
    print(f"model      {config.model.name}, {about['parameters']} parameters")
    print(f"engine     {about['engine']}{ranks}{_reason(about.get('engine_why'))}")
    print(f"device     {about.get('device', 'cpu')}{_reason(about.get('device_why'))}")
    if results is None:
        again = shlex.join(["fedtailor", "resume", str(path)])
        print(f"status     {len(folder.metrics())} of {config.rounds} rounds; continue with: {again}")
        return
    local = local_reference(folder)
    print_table(f"test {results['metric']}{unit(results['metric'])}", RUN_COLUMNS, run_rows(results, local))
    if others := result_tables.other_run_rows(results):
        print_table("other metrics", result_tables.OTHER_COLUMNS, others)
    if "unseen" in results:
        gap = number(results["metric"], results["unseen"]["gap"][results["metric"]])
        print(f"gap        {gap}: mean of the clients that trained minus that of the unseen ones, last round")
    if local is None and config.algorithm.name != "local":
        print("hurt       unknown: no Local run on the same task in this folder")
    traffic = results["traffic"]
    print(f"traffic    {size(traffic['up'])} up, {size(traffic['down'])} down, {traffic['trips']} trips")
    print(f"time       {results['seconds']} s")
    if "privacy" in results:
        print(f"privacy    {private_words(results['privacy'])}")
    if results["faults"] or results["abandoned"]:
        print(f"faults     {results['faults']} replies rejected, {results['abandoned']} rounds abandoned:")
        for line in folder.metrics():
            for fault in line.get("faults", []):
                print(f"           round {fault['round']}, {fault['client']}, {fault['function']}: {fault['reason']}")
    if clients:
        _print_clients(about, results)


def _print_clients(about: dict[str, Any], results: dict[str, Any]) -> None:
    from fedtailor.studies.result_tables import number

    figures: dict[str, list[float]] = results["last"]["clients"]
    if any(len(each) != len(about["clients"]) for each in figures.values()):
        raise RunError("results.json: a figure for each client of the last round is needed", code="run.damaged")
    rows = [
        [client, str(samples), *(number(m, each[i]) for m, each in figures.items())]
        for i, (client, samples) in enumerate(zip(about["clients"], about["train_samples"], strict=True))
    ]
    print_table("clients, last round", ("client", "training samples", *(f"test {m}" for m in figures)), rows)


def _reason(why: str | None) -> str:
    """In brackets, of what was not chosen by a person."""
    return "" if why in (None, "chosen") else f" ({why})"
