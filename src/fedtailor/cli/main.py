"""The command line. Thin: it parses, calls, and tells; heavy modules are imported by the command that needs them."""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli import federation, first_steps, models, updating
from fedtailor.cli.checking import check, in_words
from fedtailor.cli.explaining import drift, explain
from fedtailor.cli.options import (
    AsJson,
    Config,
    DataRoot,
    Device,
    Out,
    Run,
    RunOrRuns,
    Settings,
    Trust,
    aligned,
    console,
    print_json,
    progress_aside,
)
from fedtailor.cli.resume_hints import command, joined, refuse_torchrun, resumable, say, trusted
from fedtailor.errors import ConfigError, RankLost, UserError
from fedtailor.version import __version__

app = typer.Typer(
    name="fedtailor",
    help="Personalized federated learning that learns what each client should share.",
    epilog="Start with: fedtailor demo, fedtailor fit SITES --target COLUMN, or fedtailor init and run config.toml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(federation.app)


@app.callback(invoke_without_command=True)
def top(show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Personalized federated learning that learns what each client should share."""
    if show_version:
        print(f"fedtailor {__version__}")
        raise typer.Exit


for elsewhere in (
    first_steps.demo,
    first_steps.init,
    first_steps.schema,
    first_steps.download,
    models.fit,
    models.predict,
    models.export,
    models.onboard,
    updating.update,
    check,
):
    app.command()(elsewhere)


@app.command()
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
    from fedtailor.experiments.progress import shown
    from fedtailor.experiments.store import new_path

    chosen = [] if device is None else [f"federation.device={device}"]
    tables = with_settings(read_toml(config), [*settings, *chosen])
    if "compare" in tables:
        raise ConfigError(
            f"{config}: describes a comparison; run it with {shlex.join(['fedtailor', 'compare', str(config)])}"
        )
    checked = parse(tables, RunConfig, str(config))
    name = f"{checked.data.source}-{checked.algorithm.name}-seed{checked.seed}".replace(":", ".")
    with joined(checked.federation.timeout) as ranks:
        path = Path(ranks.all_gather_object(str(out or new_path(Path("runs"), name)))[0])
        bar = shown(console, checked.algorithm.name) if ranks.rank == 0 else nullcontext()
        with progress_aside(as_json), resumable(command("resume", path), path, ranks), bar as listener:
            runner.start(checked, path, data_root, listener, ranks=ranks)
        if ranks.rank == 0:
            _print_run(path, as_json=as_json)


@app.command()
def resume(
    run: Run, data_root: DataRoot = None, trust: Trust = False, device: Device = None, as_json: AsJson = False
) -> None:
    """Resume an interrupted run.

    The result equals that of an uninterrupted run. A run started on one device can be resumed on another.
    """
    from fedtailor.experiments import runner
    from fedtailor.experiments.progress import shown
    from fedtailor.experiments.store import RunFolder

    trusted(run, trust)
    with joined(RunFolder.open(run).config.federation.timeout) as ranks:
        bar = shown(console, run.resolve().name) if ranks.rank == 0 else nullcontext()
        with progress_aside(as_json), resumable(command("resume", run), run, ranks), bar as listener:
            runner.resume(run, data_root, listener, ranks=ranks, device=device)
        if ranks.rank == 0:
            _print_run(run, as_json=as_json)


@app.command()
def compare(
    config: Config,
    settings: Settings = [],  # noqa: B006
    data_root: DataRoot = None,
    out: Out = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Use a new folder even if one with this name exists.")] = False,
    redo: Annotated[list[str], typer.Option("--redo", metavar="ROW", help="Run this row again; repeatable.")] = [],  # noqa: B006
    latex: Annotated[Path | None, typer.Option("--latex", help="Also write a LaTeX table that fits a column.")] = None,
    columns: Annotated[
        str, typer.Option("--columns", metavar="NAMES", help="Its columns: test, selected, std, worst, hurt, up, p ...")
    ] = "test,worst,p",
    figure: Annotated[Path | None, typer.Option("--figure", help="Also draw curves: .pdf, .png or .svg.")] = None,
    ranks: Annotated[Path | None, typer.Option("--ranks", help="Also draw ranks and critical difference.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train several algorithms on the same task and print one table.

    Every algorithm runs with every seed. If CONFIG has a [search] section, each is first tuned on validation
    data. After an interruption, run the same command to continue: finished runs are not repeated. The table is
    also written as Markdown, LaTeX, CSV and JSON, with significance tests.
    """
    from fedtailor.experiments.config import CompareConfig, parse, read_toml, with_settings
    from fedtailor.experiments.progress import grid_shown
    from fedtailor.experiments.store import new_path
    from fedtailor.report.outputs import Paper
    from fedtailor.studies import result_tables
    from fedtailor.studies.compare import rows, run_grid
    from fedtailor.studies.result_tables import files, record, terminal
    from fedtailor.studies.search import notes

    refuse_torchrun("compare")
    paper = Paper(latex, tuple(name.strip() for name in columns.split(",") if name.strip()), figure, ranks)
    paper.check()
    checked: CompareConfig = parse(with_settings(read_toml(config), settings), CompareConfig, str(config))
    name = checked.compare.name
    path = out or (new_path(Path("runs"), name) if fresh else Path("runs") / name)
    again = command("compare", config, set=settings, data_root=data_root, out=path, **paper.options)
    with progress_aside(as_json), resumable(again, path, begun_by=""), grid_shown(console) as progress:
        grid = run_grid(checked, path, data_root, progress, redo)
    table, search_notes = rows(grid), notes(path) if checked.search is not None else []
    search_notes += paper.write(grid, table, checked.compare.against)
    result_tables.write(path, files(table, search_notes))
    if as_json:
        print_json({"folder": path, "table": [record(row) for row in table], "notes": search_notes})
        return
    title = f"{checked.data.source}, {checked.model.name}, {checked.rounds} rounds, seeds {list(checked.compare.seeds)}"
    console.print(terminal(table, title))
    print("\n".join([*aligned("\n".join(search_notes).split("\n")), f"runs and table: {path}"]))


@app.command()
def reproduce(
    table: Annotated[str, typer.Argument(metavar="TABLE", help='Such as "learn2pfed/table1"; "list" lists them.')],
    scale: Annotated[
        str, typer.Option("--scale", metavar="SCALE", help="cpu: fits two cores; paper: as published.")
    ] = "cpu",
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", min=0, help="Runs per cell; 0: as in the table.")] = 0,
    rows: Annotated[str, typer.Option("--rows", metavar="NAMES", help="Only these rows, separated by commas.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the results as JSON; - prints only that.")
    ] = None,
    data_root: DataRoot = None,
    out: Out = None,
    configs: Annotated[
        Path | None, typer.Option("--configs", help="Folder of your own tables; default: the packaged ones.")
    ] = None,
) -> None:
    """Rerun a published table and print our figures next to the paper's.

    Ours are mean and spread over seeds, with the paper's in brackets. After an interruption, run the same
    command to continue: finished runs are not repeated.
    """
    from fedtailor.experiments.config import CONFIGS
    from fedtailor.experiments.progress import grid_shown
    from fedtailor.experiments.store import write_atomically
    from fedtailor.studies import reproduce as published
    from fedtailor.studies import result_tables
    from fedtailor.studies.search import notes

    folder, is_printed = configs or CONFIGS, str(json_file) == "-"
    if table == "list":
        names = published.available(folder)
        print_json(names) if is_printed else print("\n".join(names))
        return
    refuse_torchrun("reproduce")
    if scale not in ("cpu", "paper"):
        raise ConfigError(f'--scale: "{scale}" is neither cpu nor paper')
    wanted = published.load(folder, table)
    path = out or Path("runs") / f"{table.replace('/', '-')}-{scale}"
    names = published.rows_named(wanted, rows)
    of: published.Scale = "cpu" if scale == "cpu" else "paper"
    which = (wanted, path, of, seeds or wanted.seeds, names)
    options = {"scale": scale, "seeds": seeds, "rows": rows, "json": json_file, "data_root": data_root}
    again = command("reproduce", table, **options, configs=configs, out=path)
    with progress_aside(is_printed), resumable(again, path, begun_by=""), grid_shown(console) as progress:
        settings = published.searched(*which, data_root, progress)
        figures = published.run(wanted, published.grid(*which, settings), data_root, progress)
    text = published.markdown(wanted, figures, notes(path) if wanted.search is not None else [])
    result_tables.write(path, {"table.md": text})
    if is_printed:
        print_json([f.model_dump() for f in figures])
        return
    if json_file is not None:
        write_atomically(json_file, json.dumps([f.model_dump() for f in figures], indent=1).encode())
    print(f"{wanted.title}; ours (paper's), {seeds or wanted.seeds} seeds\n\n{text}\nruns and table: {path}")


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="algorithms, data, models or engines.")] = "all",
    learns: Annotated[str, typer.Option(help="Only algorithms that learn this, such as weights.")] = "",
    keeps: Annotated[str, typer.Option(help="Only algorithms whose clients keep this, such as head.")] = "",
    as_json: AsJson = False,
) -> None:
    """List algorithms, data sources, models and engines.

    Algorithms are grouped by what they learn, with what stays private, what is sent, and their options.
    """
    from fedtailor.cli.listing import listed, print_listing

    if as_json:
        lists = listed(what, learns, keeps)
        print_json({k: [{"name": n, "about": t, **d} for g in v.values() for n, t, d in g] for k, v in lists.items()})
    else:
        print_listing(console, what, learns, keeps)


@app.command()
def show(
    run: Run,
    clients: Annotated[bool, typer.Option("--clients", help="Also print metrics of every client.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a run, a comparison or a fit.

    Task, results, traffic, rejected replies.
    """
    _print_run(run, clients, as_json)


for meaning in (explain, drift):
    app.command()(meaning)


@app.command()
def report(
    run: RunOrRuns,
    out: Annotated[Path | None, typer.Option("--out", help="Output file; default: report.html in the folder.")] = None,
    data_root: DataRoot = None,
) -> None:
    """Write an HTML report of a run or a comparison.

    Learning curves, clients, what is shared and what was sent. A self-contained page that works offline.
    """
    from fedtailor.report.write import write

    print(f"wrote {write(run, out, data_root)}")


@app.command()
def watch(
    run: RunOrRuns,
    port: Annotated[int, typer.Option("--port", metavar="N", help="Port; 0: any free one.")] = 0,
    data_root: DataRoot = None,
) -> None:
    """Serve a live report while a run is in progress.

    Reachable from this machine only; the page refreshes itself. Ctrl-C stops the server, not the run.
    """
    from fedtailor.report.serve import server

    with server(run, port, data_root) as page_server:
        print(f"watching {run} at {page_server.address} (Ctrl-C to stop)", flush=True)
        with suppress(KeyboardInterrupt):
            page_server.serve_forever()


def _print_run(run: Path, clients: bool = False, as_json: bool = False) -> None:
    from fedtailor.cli.listing import print_run
    from fedtailor.cli.records import run_record

    if as_json:
        print_json(run_record(run))
    else:
        print_run(console, run, clients)


def main() -> None:
    """Entry point: what the user can put right is one line and exit code 2."""
    # threads that wait must not spin: on busy cores that makes two threads many times slower than one
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app(prog_name="fedtailor")
    except UserError as error:
        message = " ".join(str(error).splitlines())
        say(f"error: {in_words(message) if sys.argv[1:2] == ['fit'] else message}")
        sys.exit(2)
    except RankLost as lost:
        say(f"error: a rank was lost before the run began or after its end ({lost})")
        sys.exit(1)
    except OSError as error:
        if error.filename is None:
            raise
        say(f"error: {error.filename}: {error.strerror}")
        sys.exit(2)


if __name__ == "__main__":
    main()
