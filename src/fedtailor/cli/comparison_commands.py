"""Commands that compare algorithms: compare, reproduce and demo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.interruptions import command_words, refuse_torchrun, resumable
from fedtailor.cli.options import AsJson, Config, DataRoot, Out, Settings
from fedtailor.cli.output import align_tables, console, print_json, progress_to_stderr
from fedtailor.errors import ConfigError


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
    from fedtailor.experiments.progress import show_grid
    from fedtailor.experiments.store import new_path
    from fedtailor.report.paper import Paper
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
    again = command_words("compare", config, set=settings, data_root=data_root, out=path, **paper.options)
    with progress_to_stderr(as_json), resumable(again, path, begun_by=""), show_grid(console) as progress:
        grid = run_grid(checked, path, data_root, progress, redo)
    table, search_notes = rows(grid), notes(path) if checked.search is not None else []
    search_notes += paper.write(grid, table, checked.compare.against)
    result_tables.write(path, files(table, search_notes))
    if as_json:
        print_json({"folder": path, "table": [record(row) for row in table], "notes": search_notes})
        return
    title = f"{checked.data.source}, {checked.model.name}, {checked.rounds} rounds, seeds {list(checked.compare.seeds)}"
    console.print(terminal(table, title))
    print("\n".join([*align_tables("\n".join(search_notes).split("\n")), f"runs and table: {path}"]))


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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the settings of every row and run nothing.")
    ] = False,
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
    from fedtailor.experiments.progress import show_grid
    from fedtailor.experiments.store import write_atomically
    from fedtailor.studies import reproduce as published
    from fedtailor.studies import result_tables
    from fedtailor.studies.reproduce import row_settings, settings_text
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
    if dry_run:
        entries = row_settings(wanted, of, names)
        texts = [f"{wanted.title}; scale {scale}, {seeds or wanted.seeds} seeds", *map(settings_text, entries)]
        print_json([e.model_dump() for e in entries]) if is_printed else print("\n\n".join(texts))
        return
    which = (wanted, path, of, seeds or wanted.seeds, names)
    options = {"scale": scale, "seeds": seeds, "rows": rows, "json": json_file, "data_root": data_root}
    again = command_words("reproduce", table, **options, configs=configs, out=path)
    with progress_to_stderr(is_printed), resumable(again, path, begun_by=""), show_grid(console) as progress:
        settings = published.searched(*which, data_root, progress)
        figures = published.run(wanted, published.grid(*which, settings), data_root, progress)
    found = notes(path) if published.search_section(wanted, of) is not None else []
    text = published.markdown(wanted, figures, found)
    result_tables.write(path, {"table.md": text})
    if is_printed:
        print_json([f.model_dump() for f in figures])
        return
    if json_file is not None:
        write_atomically(json_file, json.dumps([f.model_dump() for f in figures], indent=1).encode())
    print(f"{wanted.title}; ours (paper's), {seeds or wanted.seeds} seeds\n\n{text}\nruns and table: {path}")


def demo(out: Out = None, as_json: AsJson = False) -> None:
    """Compare four algorithms on ten clients, and write a report.

    Local, FedAvg, FedRep and Ditto on handwritten digits, distributed unevenly over the clients. Needs no files
    and takes less than a minute.
    """
    from fedtailor.experiments.config import CONFIGS
    from fedtailor.report.write import write

    path = out or Path("runs") / "demo"
    compare(CONFIGS / "demo.toml", out=path, as_json=as_json)
    report = write(path)
    if not as_json:
        print(f"report     {report}")
