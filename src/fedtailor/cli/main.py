"""The command line. Thin: it parses, calls, and tells; heavy modules are imported by the command that needs them."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedtailor import __version__
from fedtailor.cli import federation
from fedtailor.errors import ClientError, ConfigError, UserError

app = typer.Typer(
    name="fedtailor",
    help="Personalized federated learning that learns what each client should share.",
    epilog="Start with: fedtailor init, then fedtailor run config.toml",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(federation.app)
console = Console()

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; fedtailor init writes one.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
RunOrRuns = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a comparison.")]
Settings = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as local.lr=0.1; repeatable.")
]
DataRoot = Annotated[
    Path | None, typer.Option("--data-root", help="Folder of the data sets; else FEDTAILOR_DATA or the user's cache.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to write to; else a new one under runs/.")]


@app.callback(invoke_without_command=True)
def top(show_version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """Personalized federated learning that learns what each client should share."""
    if show_version:
        print(f"fedtailor {__version__}")
        raise typer.Exit


@app.command()
def run(config: Config, settings: Settings = [], data_root: DataRoot = None, out: Out = None) -> None:  # noqa: B006
    """Train one algorithm and keep every client's personal model.

    Example: fedtailor run config.toml --set algorithm.name=ditto --set rounds=50
    """
    from fedtailor.runs import runner
    from fedtailor.runs.config import RunConfig, parse, read_toml, with_settings
    from fedtailor.runs.progress import shown
    from fedtailor.runs.store import new_path

    tables = with_settings(read_toml(config), settings)
    if "compare" in tables:
        raise ConfigError(f"{config}: describes a comparison; run it with fedtailor compare {config}")
    checked = parse(tables, RunConfig, str(config))
    name = f"{checked.data.source}-{checked.algorithm.name}-seed{checked.seed}".replace(":", ".")
    path = out or new_path(Path("runs"), name)
    with _resumable(["resume", str(path)], path), shown(console, checked.algorithm.name) as listener:
        folder = runner.start(checked, path, data_root, listener)
    _tell(folder.path)


@app.command()
def resume(run: Run, data_root: DataRoot = None) -> None:
    """Go on with a run that was interrupted.

    The result is that of a run never disturbed.
    """
    from fedtailor.runs import runner
    from fedtailor.runs.progress import shown

    with _resumable(["resume", str(run)], run), shown(console, run.resolve().name) as listener:
        folder = runner.resume(run, data_root, listener)
    _tell(folder.path)


@app.command()
def compare(
    config: Config,
    settings: Settings = [],  # noqa: B006
    data_root: DataRoot = None,
    out: Out = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Use a new folder even if one of this name exists.")] = False,
) -> None:
    """Train several algorithms on the same task; print one table.

    Every algorithm runs with every seed. With a section [search] in CONFIG their settings are first
    searched on validation data. The same command goes on where it was interrupted: finished runs
    are not repeated. The table is also written as Markdown, LaTeX, CSV and JSON.
    """
    from fedtailor.runs.compare import rows, run_grid
    from fedtailor.runs.config import CompareConfig, parse, read_toml, with_settings
    from fedtailor.runs.progress import grid_shown
    from fedtailor.runs.search import notes
    from fedtailor.runs.store import new_path, write_atomically
    from fedtailor.runs.tables import files, terminal

    checked: CompareConfig = parse(with_settings(read_toml(config), settings), CompareConfig, str(config))
    name = checked.compare.name
    path = out or (new_path(Path("runs"), name) if fresh else Path("runs") / name)
    again = ["compare", str(config), "--out", str(path), *(part for s in settings for part in ("--set", s))]
    again += [] if data_root is None else ["--data-root", str(data_root)]
    with _resumable(again, path), grid_shown(console) as told:
        grid = run_grid(checked, path, data_root, told)
    table, found = rows(grid), notes(path) if checked.search is not None else []
    for file, text in files(table, found).items():
        write_atomically(path / file, text.encode())
    title = f"{checked.data.source}, {checked.model.name}, {checked.rounds} rounds, seeds {list(checked.compare.seeds)}"
    console.print(terminal(table, title))
    print("\n".join([*found, f"runs and table: {path}"]))


@app.command()
def reproduce(
    table: Annotated[str, typer.Argument(metavar="TABLE", help='Such as "learn2pfed/table1"; "list" lists them.')],
    scale: Annotated[str, typer.Option("--scale", help="cpu: fits two cores; paper: as published.")] = "cpu",
    seeds: Annotated[int, typer.Option("--seeds", min=0, help="Runs per cell; 0 is the table's own number.")] = 0,
    rows: Annotated[str, typer.Option("--rows", help="Only these rows, separated by commas.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
    data_root: DataRoot = None,
    out: Out = None,
    configs: Annotated[Path, typer.Option("--configs", help="Folder of the published tables.")] = Path("configs"),
) -> None:
    """Run a published table again, beside the paper's figures.

    Ours are mean and spread over seeds, the paper's stand in brackets. The same command goes on where
    it was interrupted: finished runs are not repeated.
    """
    from fedtailor.runs import reproduce as published
    from fedtailor.runs.progress import grid_shown
    from fedtailor.runs.search import notes
    from fedtailor.runs.store import write_atomically

    if table == "list":
        print("\n".join(published.available(configs)))
        return
    if scale not in ("cpu", "paper"):
        raise ConfigError(f'--scale: "{scale}" is neither cpu nor paper')
    wanted = published.load(configs, table)
    path = out or Path("runs") / f"{table.replace('/', '-')}-{scale}"
    names = published.rows_named(wanted, rows)
    of: published.Scale = "cpu" if scale == "cpu" else "paper"
    which = (wanted, path, of, seeds or wanted.seeds, names)
    again = ["reproduce", table, "--scale", scale, "--seeds", str(seeds), "--rows", rows, "--out", str(path)]
    with _resumable(again, path), grid_shown(console) as told:
        found = published.searched(*which, data_root, told)
        figures = published.run(wanted, published.grid(*which, found), data_root, told)
    text = published.markdown(wanted, figures, notes(path) if wanted.search is not None else [])
    write_atomically(path / "table.md", text.encode())
    if json_file is not None:
        write_atomically(json_file, json.dumps([f.model_dump() for f in figures], indent=1).encode())
    print(f"{wanted.title}; ours (paper's), {seeds or wanted.seeds} seeds\n\n{text}\nruns and table: {path}")


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="algorithms, data, models or engines.")] = "all",
) -> None:
    """List algorithms, data sources, models and engines.

    Algorithms are listed with what stays private, what is sent, and their options.
    """
    from fedtailor.cli.listing import print_listing

    print_listing(console, what)


@app.command()
def show(
    run: Run, clients: Annotated[bool, typer.Option("--clients", help="Also print every client's figures.")] = False
) -> None:
    """Print what a run did: task, results, traffic, rejected replies."""
    _tell(run, clients)


@app.command()
def explain(run: Run, data_root: DataRoot = None) -> None:
    """Tell to what degree each client's parameters are shared.

    0 is the client's own, 1 the common one; printed by feature or layer, saved for every parameter. For
    an algorithm that learns the weights of the average: the weight of each client in each round.
    """
    from fedtailor.cli.listing import print_shares, print_weights

    if not print_weights(console, run):
        print_shares(console, run, data_root)


@app.command()
def report(
    run: RunOrRuns,
    out: Annotated[Path | None, typer.Option("--out", help="File to write; else report.html in the folder.")] = None,
    data_root: DataRoot = None,
) -> None:
    """Write one HTML page on a run or a comparison.

    Curves, clients, what is shared and what was sent. The page asks nothing of the network.
    """
    from fedtailor.report.write import write

    print(f"wrote {write(run, out, data_root)}")


@app.command()
def watch(
    run: RunOrRuns,
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 0,
    data_root: DataRoot = None,
) -> None:
    """Serve the page of a run while it goes on.

    To this machine only; the page renews itself. Ctrl-C ends it, and leaves the run alone.
    """
    from fedtailor.report.serve import server

    with server(run, port, data_root) as made:
        print(f"watching {run} at {made.address} (Ctrl-C ends)", flush=True)
        with suppress(KeyboardInterrupt):
            made.serve_forever()


@app.command()
def onboard(
    run: Run,
    data: Annotated[Path, typer.Option("--data", help="The newcomer's file; or a TOML file with a [data] table.")],
    name: Annotated[str, typer.Option("--name", help="What to call it.")],
    epochs: Annotated[int, typer.Option("--epochs", min=0, help="Epochs in which it trains what is its own.")] = 3,
    data_root: DataRoot = None,
) -> None:
    """Give a newcomer a personal model from a finished run.

    The others are not touched. The model is saved in the run's folder, under newcomers/NAME.
    """
    from fedtailor.cli.listing import print_newcomer
    from fedtailor.runs.onboard import onboard as join

    print_newcomer(name, join(run, data, name, epochs, data_root))


@app.command()
def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write.")] = Path("config.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented configuration with every key at its default."""
    from fedtailor.runs.config import template

    if path.exists() and not force:
        raise ConfigError(f"{path}: exists already; --force replaces it")
    path.write_text(template(), encoding="utf-8")
    print(f"wrote {path}; run it with: fedtailor run {path}")


@app.command()
def download(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data source such as mnist; see fedtailor list data.")],
    data_root: DataRoot = None,
) -> None:
    """Download a public data set and check it.

    Files come from their official address and appear only when their checksum is right.
    """
    from fedtailor.cli.listing import download_with_progress

    download_with_progress(console, name, data_root)


def _tell(run: Path, clients: bool = False) -> None:
    from fedtailor.cli.listing import print_run

    print_run(console, run, clients)


@contextmanager
def _resumable(command: list[str], path: Path) -> Iterator[None]:
    """However a run is stopped, say how to go on."""
    hint = f"go on with: {shlex.join(['fedtailor', *command])}"
    try:
        yield
    except KeyboardInterrupt:
        begun = command[0] == "compare" or (path / "config.toml").exists()
        print(f"interrupted; {hint}" if begun else "interrupted before the run began", file=sys.stderr)
        raise typer.Exit(130) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        print(
            f"error: {path}: no space left on the disk; the last checkpoint is intact. Free some, then {hint}",
            file=sys.stderr,
        )
        raise typer.Exit(1) from None
    except ClientError as error:
        print(f"error: {error}\nthe last checkpoint is intact; {hint}", file=sys.stderr)
        raise typer.Exit(1) from None


def main() -> None:
    """Entry point: what the user can put right is one line and exit code 2."""
    # threads that wait must not spin: on busy cores that makes two threads many times slower than one
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app(prog_name="fedtailor")
    except UserError as error:
        print("error:", " ".join(str(error).splitlines()), file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
