"""`fedtailor federation fit` and `results`: a fit of tables that stay at their sites, and each site's results."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.cli.federation_progress import Least, participation_of, print_participation, show_job
from fedtailor.cli.operators import Folder
from fedtailor.cli.options import AsJson, Settings
from fedtailor.cli.output import print_json
from fedtailor.errors import ConfigError

MOST_HERE = 8  # sites that are processes of one machine


def fit(
    sites: Annotated[
        Path | None,
        typer.Argument(metavar="[SITES]", help="To try it on this machine: a folder with one table per site."),
    ] = None,
    admin: Annotated[Path | None, typer.Option("--admin", help="The administrator's folder: fit at the sites.")] = None,
    target: Annotated[str, typer.Option("--target", help="With SITES: column to predict.")] = "",
    client_column: Annotated[
        str | None, typer.Option("--client-column", help="With SITES: column that names the site, if it is one file.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the folds.")] = 0,
    run: Annotated[str, typer.Option("--run", help="Name of the run; default: fit and the seed.")] = "",
    settings: Settings = [],  # noqa: B006
    least: Least = 0,
    out: Annotated[Path | None, typer.Option("--out", help="With SITES: folder of the federation.")] = None,
    show_policy: Annotated[
        bool, typer.Option("--policy", help="Print what a site's policy must allow for a fit, and stop.")
    ] = False,
) -> None:
    """Fit a personal model for each site of a federation; tables, predictions and trees stay at the sites.

    With --admin: at the sites of a running federation, on the data that their site.toml names. With SITES: a
    trial on this machine, where each site is a process of its own. Afterwards each site prints and keeps its own
    figures with fedtailor federation results. After an interruption, run the same command to continue. Exit code 0:
    every site took part; 3: done without some, which are named.
    """
    from fedtailor.flare import kits

    if show_policy:
        print(policy(), end="")
        return
    kits.require_flare()
    if (sites is None) == (admin is None):
        raise ConfigError("federation fit: name the tables of a trial on this machine, or give --admin FOLDER")
    name = run or f"fit-seed{seed}"
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f'--run "{run}": use letters, digits, "-" and "_"')
    again = shlex.join(["fedtailor", *sys.argv[1:]])
    try:
        if admin is not None:
            attended = _at_sites(admin, fit_config({"source": "sites"}, seed, settings), name, least)
        elif sites is not None:
            attended = _local_trial(sites, target, client_column, seed, settings, name, out)
    except KeyboardInterrupt:
        print(f"interrupted; continue with: {again}", file=sys.stderr)
        raise typer.Exit(130) from None
    if code := print_participation(attended):
        raise typer.Exit(code)


def fit_config(data: dict[str, Any], seed: int, settings: list[str]) -> Any:
    """The configuration of a fit: one round of a program that solves, blends and chooses.

    Trees that all sites share are tried where sums are secure: by themselves a small site's show its rows.
    """
    from fedtailor.experiments.config import RunConfig, parse, with_settings

    tables: dict[str, Any] = {
        "seed": seed,
        "rounds": 1,
        "data": data,
        "model": {"name": "linear", "dtype": "float64"},
        "algorithm": {"name": "tablefit"},
    }
    chosen = dict(with_settings(tables, settings))
    if chosen.get("privacy", {}).get("secure_sum"):
        chosen["algorithm"] = {"boosted": True} | chosen["algorithm"]
    return parse(chosen, RunConfig, "fit")


def _at_sites(admin: Path, config: Any, name: str, least: int) -> dict[str, dict[str, Any]]:
    from fedtailor.experiments.store import read_json
    from fedtailor.flare import kits
    from fedtailor.flare.nvidia import Launcher

    names = tuple(read_json(admin / kits.ABOUT)["sites"])
    with show_job() as show:
        launcher = Launcher(admin, config, name, names, lambda text: print(text, flush=True), show, least)
        attended = launcher.run_to_end()
    print(f"{name}: done. The federation's weights are in the server's folder, under runs/{name}.")
    print("each site sees its own figures and report with: fedtailor federation results FOLDER")
    return attended


def _local_trial(
    sites: Path, target: str, column: str | None, seed: int, settings: list[str], name: str, out: Path | None
) -> dict[str, dict[str, Any]]:
    from fedtailor.experiments.building import load
    from fedtailor.flare import local_trial
    from fedtailor.tables.fit_sources import source_of

    source = source_of(sites, target, column)
    config = fit_config(source | ({"val": 0.0} if source["source"] == "folder" else {}), seed, settings)
    count = len(load(config).clients)
    if count > MOST_HERE:
        raise ConfigError(f"{sites}: has {count} sites; a trial on one machine is for at most {MOST_HERE}")
    folder = out or Path("runs") / f"federation-{sites.resolve().stem}-{name}"
    with show_job() as show:
        finished = local_trial.run_trial(
            folder, count, config, name, lambda text: print(text, flush=True), progress=show
        )
    for client in finished.about["clients"]:
        print(f"{client}: fedtailor federation results {shlex.quote(str(folder / client))}")
    return participation_of(finished.path)


def policy() -> str:
    """The table [policy] of a site.toml that allows a fit."""
    import tomli_w

    from fedtailor import algorithms
    from fedtailor.core.algorithm import reply_names

    sends = reply_names(algorithms.make("tablefit", {}))
    return tomli_w.dumps({"policy": {"algorithms": ["tablefit"], "models": ["linear"], "sends": sends}})


def results(
    folder: Folder,
    run: Annotated[str, typer.Option("--run", help="Name of the fit; default: the latest.")] = "",
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="What the figures show, such as auroc, brier or mae.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Print a site's results of a fit, on its own test rows, and write its report. Nothing leaves the site.

    FOLDER is the site's. Trees are grown here, if the site has the rows for them. The folder that is printed
    serves fedtailor predict and fedtailor export.
    """
    from fedtailor.cli.fit_commands import print_fit
    from fedtailor.flare import kits
    from fedtailor.flare.site import fit_results
    from fedtailor.report.write import write

    path, record = fit_results(folder / kits.SITE, run, metric)
    page = write(path)
    if as_json:
        print_json({"folder": path, "report": page, **record})
        return
    print_fit(record)
    (name,) = record["sites"]
    print(f"models     {path}\nreport     {page}")
    print(f"predict    fedtailor predict {shlex.quote(str(path))} FILE --site {shlex.quote(name)}")


COMMANDS = (fit, results)
