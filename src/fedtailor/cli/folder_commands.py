"""Commands on the folder of a run, a comparison or a fit: show, explain, report, watch."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.cli.fit_commands import print_effects, print_fit
from fedtailor.cli.interruptions import accept_trust
from fedtailor.cli.options import AsJson, DataRoot, Run, RunOrFit, RunOrRuns, Trust
from fedtailor.cli.output import column_widths, console, framed_width, print_json, print_table
from fedtailor.cli.run_commands import print_run, run_record
from fedtailor.errors import ConfigError, RunError


def show(
    run: Run,
    clients: Annotated[bool, typer.Option("--clients", help="Also print metrics of every client.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a run, a comparison or a fit.

    Task, results, traffic, rejected replies.
    """
    if as_json:
        print_json(folder_record(run))
    else:
        print_folder(run, clients)


def explain(
    run: RunOrFit,
    site: Annotated[str, typer.Option("--site", help="Of a fit: also the own coefficients of this site.")] = "",
    model: Annotated[
        str,
        typer.Option(
            "--model", help='Of a fit: whose coefficients, such as "mixed, slopes"; default: which serves most.'
        ),
    ] = "",
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Show what the models of a fit mean, or how much a run shares.

    Of a fit: what each column does, with 95 % intervals, whether it does the same at all sites, and which
    columns the predictions need. Of a run: how much of each client's parameters is shared (0 is fully
    private, 1 fully common), by feature or layer; for learned aggregation weights, their weight by round.
    """
    from fedtailor.experiments.store import FIT
    from fedtailor.tables.explain_fit import explain_fit

    accept_trust(run, trust)
    if (run / FIT).exists():
        effects = explain_fit(run, site, data_root, model)
        print_json(effects) if as_json else print_effects(effects, site, run)
        return
    if site or model:
        raise ConfigError("--site and --model are for fits; of a run all clients are shown")
    if as_json:
        print_json(shares_record(run, data_root))
    elif not print_weights(run):
        print_shares(run, data_root)


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


def watch(
    run: RunOrRuns,
    port: Annotated[int, typer.Option("--port", metavar="N", help="Port; 0: any free one.")] = 0,
    data_root: DataRoot = None,
) -> None:
    """Serve a live report while a run is in progress.

    Reachable from this machine only; the page refreshes itself. Ctrl-C stops the server, not the run.
    """
    from fedtailor.report.watch import server

    with server(run, port, data_root) as page_server:
        print(f"watching {run} at {page_server.address} (Ctrl-C to stop)", flush=True)
        with suppress(KeyboardInterrupt):
            page_server.serve_forever()


def print_folder(path: Path, clients: bool = False) -> None:
    """Print a run, a comparison or a fit in a few lines; one that is not finished says how to continue."""
    from fedtailor.experiments.store import FIT, read_json
    from fedtailor.studies import result_tables
    from fedtailor.studies.compare import GRID, TABLE

    quoted = shlex.quote(str(path))
    if (path / FIT).exists():
        record = read_json(path / FIT)
        if "sites" not in record:
            raise RunError(f"{path}: an unfinished fit; continue with the same fedtailor fit and --out {quoted}")
        print_fit(record)
    elif (path / GRID).exists():
        if not (path / TABLE).exists():
            raise RunError(f"{path}: an unfinished comparison; continue with: fedtailor compare CONFIG --out {quoted}")
        print(result_tables.read(path, TABLE), end="")
    else:
        print_run(path, clients)


def folder_record(path: Path) -> dict[str, Any]:
    """The figures of a run, a comparison or a fit, as far as it has come."""
    from fedtailor.experiments.store import FIT, read_json
    from fedtailor.studies.compare import GRID

    if (path / FIT).exists():
        record = read_json(path / FIT)
        return {"folder": path, "what": "fit", "finished": "sites" in record, **record}
    if (path / GRID).exists():
        rows = _table_rows(path)
        return {"folder": path, "what": "comparison", "finished": (path / "table.json").exists(), "table": rows}
    return run_record(path)


def _table_rows(path: Path) -> list[dict[str, Any]]:
    from fedtailor.studies import result_tables

    file = path / "table.json"
    if not file.exists():
        return []
    try:
        rows: list[dict[str, Any]] = json.loads(result_tables.read(path, file.name))
    except ValueError as error:
        raise RunError(f"{file}: cannot be read ({error}); the same fedtailor compare writes it again") from None
    return rows


def print_weights(path: Path) -> bool:
    """Print the weights in the average, rounds by clients; False if the algorithm records none."""
    from fedtailor.studies.explain import WEIGHTS, weights

    by_round = weights(path)
    if not by_round:
        return False
    clients = list(dict.fromkeys(client for row in by_round.values() for client in row))
    rounds = [r for i, r in enumerate(by_round) if i in (0, len(by_round) - 1) or i % -(-len(by_round) // 20) == 0]
    rows = [[str(r), *(f"{by_round[r][c]:.3f}" if c in by_round[r] else "-" for c in clients)] for r in rounds]
    print_table("weight of each client in the average", ("round", *clients), rows)
    print(f"every round: {path / WEIGHTS}")
    return True


def print_shares(path: Path, data_root: Path | None) -> None:
    """Print shares and degrees, clients by parts of the model."""
    from fedtailor.studies.explain import SHARES, explain

    names, shares, degrees = explain(path, data_root)
    titles = {
        "share of the common model: 0 own, 1 common": (shares, ".2f"),
        "effective degree Lambda": (degrees, ".3g"),
    }
    for title, (rows, form) in titles.items():
        if rows:
            table = [["client", *names]]
            table += [[client, *(f"{row[name]:{form}}" for name in names)] for client, row in rows.items()]
            if len(names) > len(rows) and framed_width(column_widths(table)) >= console.width:
                table = [list(row) for row in zip(*table, strict=True)]
                table[0][0] = "part"
            print_table(title, table[0], table[1:])
    print(f"every parameter: {path / SHARES}")


def shares_record(path: Path, data_root: Path | None) -> dict[str, Any]:
    """Weights of the average by round, or shares and degrees by client."""
    from fedtailor.studies.explain import explain, weights

    if by_round := weights(path):
        return {"weights": by_round}
    _, shares, degrees = explain(path, data_root)
    return {"shares": shares, "degrees": degrees}
