"""`fedtailor update`: sites have new rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedtailor.cli.options import AsJson, DataRoot, Trust, console, print_json, progress_aside
from fedtailor.cli.resume_hints import command, resumable, trusted


def update(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a fit.")],
    data: Annotated[
        Path | None, typer.Option("--data", help="Where all rows are now; default: where the fit read them.")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option("--rows", metavar="FILE", help="New rows only: CSV or Parquet; with --site.")
    ] = None,
    site: Annotated[str, typer.Option("--site", help="Site of the new rows; default: by the fit's column.")] = "",
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=0, help="Seconds; 0: no limit. Models that do not fit are left out.")
    ] = 0,
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Update a fit when sites have new rows, or when there are new sites.

    Test rows stay test rows, new rows are split by the same rule. Training begins where the fit ended; boosted trees
    are grown only where rows changed. The earlier models serve until the new ones are complete, and are kept.
    After an interruption, run the same command again.
    """
    from fedtailor.cli.fit_listing import print_fit
    from fedtailor.data.tables import read_rows
    from fedtailor.experiments.progress import grid_shown
    from fedtailor.experiments.store import FIT, latest, root_of
    from fedtailor.report.write import FILE, write
    from fedtailor.serving.by_site import site_column
    from fedtailor.studies.update import sites_in
    from fedtailor.studies.update import update as updated

    trusted(run, trust)
    again = command("update", run, data=data, rows=rows, site=site, time_limit=time_limit, data_root=data_root)
    root = root_of(run)
    new_rows = None if rows is None else sites_in(read_rows(rows)[1], site, site_column(latest(root)))
    with progress_aside(as_json), resumable(again, root, begun_by=FIT), grid_shown(console) as listener:
        result = updated(run, data=data, rows=new_rows, data_root=data_root, listener=listener, time_limit=time_limit)
    page = root / FILE
    if result.is_new:
        write(result.folder)
        write(result.folder, page)
    if as_json:
        print_json({"folder": result.folder, "is_new": result.is_new, "report": page, **result.record})
        return
    if not result.is_new:
        print(f"nothing to update: all rows are those that {result.folder} was fitted to")
        return
    print_fit(console, result.record)
    print_update(console, result.record["update"])
    print(f"models     {result.folder}\nreport     {page}")


def print_update(console: Console, changes: dict[str, Any]) -> None:
    """Rows and figures before and after, of the sites that changed."""
    from fedtailor.cli.listing import print_table, unit
    from fedtailor.studies.tables import number

    metric, sites = changes["metric"], changes["sites"]
    rows = [
        [name, str(row["rows_before"]), str(row["rows_after"]), str(row["same_test_rows"])]
        + [number(metric, row[key]) for key in ("before", "after")]
        for name, row in sites.items()
        if name in changes["changed"]
    ]
    title = f"changed sites; test {metric}{unit(metric)} of the earlier and the new model on the same rows"
    print_table(console, title, ("site", "rows before", "now", "test rows", "earlier", "new"), rows)
    others = len(sites) - len(rows)
    if others:
        print(f"unchanged  {others} sites have the rows they had; their models moved with the common part")
    for words, names in (("new sites", changes["new_sites"]), ("gone", changes["gone"])):
        if names:
            print(f"{words:<10} {', '.join(names)}")
    for note in changes["notes"]:
        print(f"note       {note}")
