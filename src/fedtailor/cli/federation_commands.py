"""`fedtailor federation`: a real federation of sites."""

from __future__ import annotations

import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.cli import model_commands, operators
from fedtailor.cli.federation_progress import Least, participation_of, print_participation, show_job
from fedtailor.cli.operators import Folder, private_folder
from fedtailor.cli.options import AsJson, Config, Settings
from fedtailor.cli.output import print_json
from fedtailor.cli.run_commands import print_run
from fedtailor.errors import ConfigError, RunError

app = typer.Typer(
    name="federation",
    help="A real federation: sites keep their data, a server coordinates training.",
    epilog="Start with: fedtailor federation local 3 config.toml",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Admin = Annotated[Path, typer.Option("--admin", help="The administrator's folder.")]
RunName = Annotated[str, typer.Option("--run", help="Name of the run; default: from the configuration.")]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Output folder; run again to add sites.")],
    site: Annotated[list[str], typer.Option("--site", help="Name of a site; repeatable.")] = [],  # noqa: B006
    host: Annotated[str, typer.Option("--host", help="Host name of the server, as sites see it.")] = "localhost",
    port: Annotated[int, typer.Option("--port", help="Port of the server.")] = 8002,
) -> None:
    """Create folders with certificates for the server, each site and the administrator.

    FOLDER/authority is the certificate authority: keep it safe. With --site, the keys of sites are made here and
    their folders must be sent to them: for trying. Where keys must not travel, leave --site out, and let each site
    make its own with request, approve and join. Run the same command with more sites to add them.
    """
    from fedtailor.flare import kits

    kits.require_flare()
    for name in kits.provision(folder, host, port, site):
        role = name if name in ("server", "admin") else "site"
        summary = {
            "server": f"start it with: fedtailor federation start server {folder / name}",
            "site": f"describe the data in {folder / name / kits.SITE}, then: "
            f"fedtailor federation start site {folder / name}",
            "admin": f"submit with: fedtailor federation submit CONFIG --admin {folder / name}",
        }[role]
        print(f"{name}: {summary}")
    if site:
        print("the sites' private keys were made here; to keep each at its site: request, approve and join")


@app.command()
def start(
    role: Annotated[str, typer.Argument(metavar="ROLE", help="server or site.")],
    folder: Folder,
    background: Annotated[bool, typer.Option("--background", help="Run in the background.")] = False,
) -> None:
    """Start the server, or a site with its own data.

    Runs until stopped (Ctrl-C). A restarted site restores its private state.
    """
    from fedtailor.flare import kits, operate

    kits.require_flare()
    if role not in ("server", "site"):
        raise ConfigError(f'"{role}" is neither server nor site')
    to_end = shlex.join(["fedtailor", "federation", "stop", str(folder)])
    if background:
        pid = operate.start_participant(role, folder)
        if role == "server" and (fault := operate.wait_until_serving(folder)):
            raise RunError(f"{folder}: process {pid} does not serve: {fault}")
        state = "serves" if role == "server" else "is started"
        print(f"{role} {state} as process {pid}; log: {folder / operate.LOG}; end: {to_end}")
        return
    if operate.find_process(folder) is not None:
        raise RunError(f"{folder}: runs already; {to_end} ends it")
    operate.start_participant(role, folder)
    print(f"{role} is started; log: {folder / operate.LOG}; Ctrl-C ends it", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        operate.wait_for(folder)
    except KeyboardInterrupt:
        operate.stop_participant(folder)


@app.command()
def stop(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A participant's folder, or the name of a run.")],
    admin: Annotated[Path | None, typer.Option("--admin", help="The administrator's folder, to stop a run.")] = None,
) -> None:
    """Stop a participant that runs in the background, or a run.

    Nothing is lost: private states are on the sites' disks, and submitting the run again continues it.
    """
    from fedtailor.flare import kits, operate

    kits.require_flare()
    if admin is None:
        if not operate.stop_participant(Path(target)):
            raise RunError(f"{target}: is not running; to stop a run, give its name and --admin FOLDER")
        print(f"{target}: stopped")
        return
    from fedtailor.flare.nvidia import admin_session

    with admin_session(admin / kits.KIT, kits.ADMIN) as session:
        jobs = [job["job_id"] for job in session.jobs(target) if job["job_id"] in session.running()]
        for job in jobs:
            session.abort(job)
    if not jobs:
        raise RunError(f'no run "{target}" is at work; fedtailor federation status --admin {admin} lists them')
    print(f"{target}: stopped; submit it again to continue")


@app.command()
def submit(
    config: Config,
    admin: Admin,
    settings: Settings = [],  # noqa: B006
    run: RunName = "",
    least: Least = 0,
) -> None:
    """Submit a run to the sites, and wait until it is done.

    The sites use their own data: [data] in CONFIG is ignored. If a job dies it is resubmitted from the last
    checkpoint. Ctrl-C leaves the job running; run the same command to attach to it again. Exit code 0: every site
    took part in every round; 3: done, and the lines say which site missed a round and why.
    """
    from fedtailor.data.configs import SitesConfig
    from fedtailor.experiments.store import read_json
    from fedtailor.flare import kits

    kits.require_flare()
    from fedtailor.flare.nvidia import Launcher

    checked = _read_config(config, settings).model_copy(update={"data": SitesConfig()})
    name = _name(run, "sites", checked)
    sites = tuple(read_json(admin / kits.ABOUT)["sites"])
    again = shlex.join(["fedtailor", *sys.argv[1:]])
    try:
        with show_job() as show:
            attended = Launcher(admin, checked, name, sites, _say, show, least).run_to_end()
    except KeyboardInterrupt:
        print(f"the job continues; attach to it again with: {again}", file=sys.stderr)
        raise typer.Exit(130) from None
    print(f"{name}: done. Results are in the server's folder, under runs/{name}; the personal models are at the sites.")
    if code := print_participation(attended):
        raise typer.Exit(code)


@app.command()
def job(
    config: Config,
    out: Annotated[Path, typer.Option("--out", help="Folder of the job; created.")],
    settings: Settings = [],  # noqa: B006
    site: Annotated[list[str], typer.Option("--site", help="A site that must take part; repeatable.")] = [],  # noqa: B006
    run: RunName = "",
    least: Least = 0,
) -> None:
    """Write a run as a job of NVIDIA FLARE, for a FLARE that is there already: submit it with FLARE's own tools.

    The job holds names of classes and the configuration, no code: fedtailor is installed at the server and at every
    site, and each site has its site.toml in the folder local of its FLARE workspace.
    """
    import json

    from fedtailor.data.configs import SitesConfig
    from fedtailor.flare import kits

    kits.require_flare()
    from fedtailor.flare.nvidia import Coordinator, asker, write_job

    checked = _read_config(config, settings).model_copy(update={"data": SitesConfig()})
    name = _name(run, "sites", checked)
    if (out / name).exists():
        raise RunError(f"{out / name}: exists already; choose another --run or --out")
    server = Coordinator(name, json.dumps(checked.plain()), sorted(site), least, submitter=asker())
    print(f"{write_job(name, server, out)}: submit it with: nvflare job submit -j {shlex.quote(str(out / name))}")


@app.command()
def local(
    sites: Annotated[int, typer.Argument(metavar="N", min=1, help="Number of sites; each gets one client's data.")],
    config: Config,
    settings: Settings = [],  # noqa: B006
    run: RunName = "",
    data_root: Annotated[Path | None, typer.Option("--data-root", help="Folder of data sets.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the federation; default: under runs/.")] = None,
) -> None:
    """Run a whole federation on this machine: a server and N sites on 127.0.0.1, with real certificates.

    After an interruption, run the same command to continue. With a larger N, more sites join.
    """
    from fedtailor.flare import kits

    kits.require_flare()
    from fedtailor.flare import local_trial

    checked = _read_config(config, settings)
    name = _name(run, checked.data.source, checked)
    folder = out or Path("runs") / f"federation-{name}"
    again = shlex.join(["fedtailor", *sys.argv[1:]])
    try:
        with show_job() as show:
            finished = local_trial.run_trial(folder, sites, checked, name, _say, data_root, show)
    except KeyboardInterrupt:
        print(f"interrupted; continue with: {again}", file=sys.stderr)
        raise typer.Exit(130) from None
    print_run(finished.path)
    print(f"a site's own model: fedtailor federation personal {folder / finished.about['clients'][0]}")
    if code := print_participation(participation_of(finished.path)):
        raise typer.Exit(code)


@app.command()
def personal(folder: Folder, as_json: AsJson = False) -> None:
    """Print where a site's personal models are stored, for each run."""
    from fedtailor.experiments.store import read_json
    from fedtailor.flare.site import KINDS

    private = private_folder(folder)
    models = [(run, kind) for run in sorted(private.glob("*/personal")) for kind in KINDS]
    saved = []
    for run, kind in models:
        if (run / f"{kind}.json").exists():
            about: dict[str, Any] = read_json(run / f"{kind}.json")
            saved.append({"run": run.parent.name, "kind": kind, "round": about["round"], "file": run / about["file"]})
    if not saved:
        raise RunError(f"{private}: no personal model yet; it is written when a run ends")
    if as_json:
        print_json(saved)
        return
    for model in saved:
        print(f"{model['run']}, {model['kind']} round {model['round']}: {model['file']}")


def _read_config(config: Path, settings: list[str]) -> Any:
    from fedtailor import algorithms
    from fedtailor.experiments.config import RunConfig, parse, read_toml, with_settings

    checked: RunConfig = parse(with_settings(read_toml(config), settings), RunConfig, str(config))
    algorithms.make(checked.algorithm.name, checked.algorithm.options)  # report errors in it now
    return checked


def _name(run: str, source: str, config: Any) -> str:
    """The name of a run, which is also that of a folder and of a job."""
    if not re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9_-]{0,80})?", run):
        raise ConfigError(f'--run "{run}": use letters, digits, "-" and "_"; a letter or digit first')
    title = f"{source}-{config.algorithm.name}-seed{config.seed}"
    return run or "".join(c if c.isalnum() or c in "-_" else "-" for c in title)


def _say(text: str) -> None:
    print(text, flush=True)


MOST_HERE = 8  # sites that are processes of one machine


@app.command()
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
        launcher = Launcher(admin, config, name, names, _say, show, least)
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
        finished = local_trial.run_trial(folder, count, config, name, _say, progress=show)
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


@app.command()
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


for _command in operators.COMMANDS:
    app.command()(_command)
app.command("model")(model_commands.federated_model)
