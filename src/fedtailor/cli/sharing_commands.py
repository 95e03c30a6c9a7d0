"""Commands on whether to share: advise before any training, and leave afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.cli.options import AsJson, DataRoot, Settings
from fedtailor.cli.output import print_json, print_table, progress_to_stderr
from fedtailor.errors import ConfigError

FILE, PAGE = "advice.json", "advice.html"


def advise(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="A folder with one CSV or Parquet file per site, or one file.")
    ],
    target: Annotated[str, typer.Option("--target", help="Column to predict.")] = "",
    client_column: Annotated[
        str | None, typer.Option("--client-column", help="Column that names the site, if DATA is one file.")
    ] = None,
    newcomer: Annotated[
        str,
        typer.Option("--newcomer", metavar="SITE", help="Advice for this site, which considers joining the others."),
    ] = "",
    worth: Annotated[
        bool, typer.Option("--worth", help="Also what each site's rows are worth to every other one.")
    ] = False,
    level: Annotated[float, typer.Option("--level", help="Level of intervals.")] = 0.9,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the bootstrap.")] = 0,
    settings: Settings = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option("--out", help="Also write JSON and a page to this folder.")] = None,
    data_root: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Advise each site whether to share, from one exchange of sums, before any training.

    The gain is the expected squared error of new rows by a site's own ridge regression, less that by the mixed model
    of all sites; its interval is for that expectation.
    """
    from fedtailor.report.advice_page import between, write_advice
    from fedtailor.tables.advice import advise as advised
    from fedtailor.tables.advice import read_sites
    from fedtailor.tables.worth import worth as worth_matrix

    if not 0 < level < 1:
        raise ConfigError(f"--level {level}: must be between 0 and 1")
    if newcomer and worth:
        raise ConfigError("--worth: of sites that are in; leave out --newcomer")
    with progress_to_stderr(as_json):
        rows = read_sites(data, target, client_column, data_root, settings)
        record: dict[str, Any] = advised(rows, newcomer=newcomer, level=level, seed=seed)
        if worth:
            record["worth"] = worth_matrix(rows)
    if out is not None:
        write_advice(record, out)
    if as_json:
        print_json(record)
        return
    lines = []
    for name, row in record["sites"].items():
        numbers = [f"{row[key]:.3g}" for key in ("own_error", "gain")]
        percent = f"{row['percent']['gain']:+.1f} %"
        lines.append([name, str(row["rows"]), *numbers, between(row["low"], row["high"]), percent, row["verdict"]])
    columns = ("site", "rows", "alone", "gain", f"{100 * level:g} %", "relative", "advice")
    print_table(f"expected squared error of {record['target']} alone, and the gain of sharing", columns, lines)
    print(f"varies     {record['random']} between sites")
    if worth:
        given = record["worth"]["given"]
        print_table(
            "worth of a site's rows to the others, added up",
            ("site", "worth"),
            [[n, f"{v:.3g}"] for n, v in given.items()],
        )
    if out is not None:
        print(f"written    {out / FILE}, {out / PAGE}")


def leave(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a fit of your own tables.")],
    site: Annotated[list[str], typer.Option("--site", metavar="SITE", help="Who leaves; repeatable.")],
    identity: Annotated[
        Path | None,
        typer.Option("--identity", metavar="KIT", help="Folder with client.crt and client.key: sign by it."),
    ] = None,
    data_root: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Fit the sites that stay anew, without a site, and delete everything that was fitted to its rows.

    What serves afterwards is what a fresh fit of the sites that stay would be. A record, signed if there is a
    certificate, says who left and which files went.
    """
    from fedtailor.cli.output import console
    from fedtailor.experiments.progress import show_grid
    from fedtailor.experiments.store import root_of
    from fedtailor.report.write import FILE as REPORT
    from fedtailor.report.write import write
    from fedtailor.tables.leave import leave as left

    with progress_to_stderr(as_json), show_grid(console) as listener:
        result = left(run, site, identity=identity, data_root=data_root, listener=listener)
    page = write(result.folder)
    write(result.folder, root_of(run) / REPORT)
    if as_json:
        print_json({"folder": result.folder, "report": page, "departure": result.departure})
        return
    print(f"left       {', '.join(site)}; {len(result.departure['deleted'])} files deleted")
    print(f"models     {result.folder}\nrecord     {result.file} ({result.departure['signature']['kind']})")
