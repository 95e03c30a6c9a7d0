"""`fedtailor model` and `fedtailor federation model`: statistical models of a formula over sites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.cli.federation_progress import participation_of, print_participation, show_job
from fedtailor.cli.options import AsJson
from fedtailor.cli.output import print_json
from fedtailor.errors import ConfigError

MOST_HERE = 8  # sites that are processes of one machine

FormulaText = Annotated[
    str, typer.Argument(metavar="FORMULA", help='As in lme4: "score ~ age + dose * arm + (1 + dose | site)".')
]
Family = Annotated[
    str, typer.Option("--family", help='gaussian, binomial, poisson or cox, whose response is "Surv(time, event)".')
]
SiteColumn = Annotated[
    str, typer.Option("--site", metavar="COLUMN", help="Column that names the site; default: of the first ( | ).")
]
MaximumLikelihood = Annotated[bool, typer.Option("--ml", help="Plain in place of restricted maximum likelihood.")]
Level = Annotated[float, typer.Option("--level", help="Level of intervals.")]
Profile = Annotated[bool, typer.Option("--profile", help="Profile intervals of standard deviations and correlations.")]
Secure = Annotated[bool, typer.Option("--secure", help="Add up replies by secure sums.")]
Latex = Annotated[bool, typer.Option("--latex", help="Print a table for a paper.")]


def model(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A folder with a table per site, or one table.")],
    formula: FormulaText,
    family: Family = "gaussian",
    site: SiteColumn = "",
    ml: MaximumLikelihood = False,
    level: Level = 0.95,
    profile: Profile = False,
    against: Annotated[
        str, typer.Option("--against", metavar="FORMULA", help="Likelihood ratio test against this model.")
    ] = "",
    modes: Annotated[bool, typer.Option("--modes", help="Print the conditional modes of every site.")] = False,
    without: Annotated[list[str], typer.Option("--without", metavar="SITE", help="Leave a site out; repeatable.")] = [],  # noqa: B006
    secure: Secure = False,
    agree: Annotated[
        bool, typer.Option("--agree", help="Print what sites of a federation must agree on for site.toml, and stop.")
    ] = False,
    latex: Latex = False,
    out: Annotated[Path | None, typer.Option("--out", help="Also write text, JSON and LaTeX to this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit a statistical model to the tables of several sites, of which only sums are used.

    Estimates, standard errors, tests and intervals are those of lme4 (and of survival's coxph, with sites as strata)
    fitted to the pooled rows.
    """
    from fedtailor.inference import statistical_model as statistics
    from fedtailor.inference.formula_data import agreement

    if agree:
        print(agreement(data, formula, family, site), end="")
        return
    options: dict[str, Any] = {"site": site, "reml": not ml, "level": level, "secure": secure}
    fitted = statistics.model(data, formula, family, profile=profile and not against, **options)  # type: ignore[arg-type]
    if without:
        fitted = fitted.leave(*without)
    if against:
        other = statistics.model(data, against, family, **options)  # type: ignore[arg-type]
        other = other.leave(*without) if without else other
        _print_comparison(statistics.anova(fitted, other), as_json)
        return
    if out is not None:
        statistics.write_model(fitted, out)
    print_model(fitted, as_json=as_json, latex=latex, modes=modes)


def _print_comparison(test: Any, as_json: bool) -> None:
    if as_json:
        print_json(test.json())
    else:
        print(test)


def print_model(fitted: Any, *, as_json: bool, latex: bool, modes: bool) -> None:
    if as_json:
        print_json(fitted.json())
    elif latex:
        print(fitted.latex())
    else:
        print(fitted.text())
        if modes:
            print()
            print(fitted.modes_text())


def federated_model(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="To try it on this machine: a folder with a table per site, or one table. With --admin: the TOML "
            "file that fedtailor model --agree printed.",
        ),
    ],
    formula: Annotated[str, typer.Argument(metavar="[FORMULA]", help="Without --admin: as in lme4.")] = "",
    admin: Annotated[Path | None, typer.Option("--admin", help="The administrator's folder: fit at the sites.")] = None,
    family: Family = "gaussian",
    site: SiteColumn = "",
    ml: MaximumLikelihood = False,
    level: Level = 0.95,
    profile: Profile = False,
    secure: Secure = False,
    run: Annotated[str, typer.Option("--run", help="Name of the run.")] = "model",
    out: Annotated[Path | None, typer.Option("--out", help="Without --admin: folder of the federation.")] = None,
    latex: Latex = False,
    as_json: AsJson = False,
) -> None:
    """Fit a statistical model at the sites of a federation; rows and conditional modes stay there.

    With --admin: each site has in its site.toml the table [data] that fedtailor model --agree printed, with the path
    of its own file. Without: a trial on this machine, where each site is a process of its own.
    """
    from fedtailor.flare import kits
    from fedtailor.inference.statistical_model import Request

    kits.require_flare()
    if (admin is None) != bool(formula):
        raise ConfigError("federation model: give a formula for a trial on this machine, or --admin FOLDER")
    known: Any = family
    request = Request(formula, known, site, not ml, level, profile, secure=secure)
    log = typer.echo if not (as_json or latex) else (lambda text: typer.echo(text, err=True))
    fitted, attended = (
        _local_trial(data, request, run, out or Path("runs") / f"federation-{run}", log)
        if admin is None
        else _at_sites(data, request, run, admin, log)
    )
    print_model(fitted, as_json=as_json, latex=latex, modes=False)
    if code := print_participation(attended, log):
        raise typer.Exit(code)


def _local_trial(data: Path, request: Any, name: str, folder: Path, say: Callable[[str], None]) -> Any:
    """The whole federation on this machine: server and sites are processes."""
    from fedtailor.data.sources.saved_data import save
    from fedtailor.flare.local_trial import run_trial
    from fedtailor.inference.finished_model import finished
    from fedtailor.inference.formula_data import load_formula
    from fedtailor.inference.statistical_model import config_of

    design, rows = load_formula(data, request.formula, request.family, request.site)
    if len(rows.clients) > MOST_HERE:
        raise ConfigError(f"{data}: has {len(rows.clients)} sites; a trial on one machine is for at most {MOST_HERE}")
    save(rows, folder / "data")
    config = config_of(request, design, {"source": "saved", "path": str((folder / "data").resolve())})
    with show_job(to_stderr=True) as show:
        run = run_trial(folder, len(rows.clients), config, name, say, progress=show)
    return finished(request, design, run), participation_of(run.path)


def _at_sites(agreed: Path, request: Any, name: str, admin: Path, say: Callable[[str], None]) -> Any:
    """At the sites of a running federation, whose site.toml have what was agreed on."""
    from fedtailor.experiments.store import RunFolder, read_json
    from fedtailor.flare import kits
    from fedtailor.flare.nvidia import Launcher
    from fedtailor.inference.finished_model import finished
    from fedtailor.inference.formula_data import read_agreement
    from fedtailor.inference.statistical_model import config_of

    design = read_agreement(agreed)
    request = replace(request, formula=design.formula.text, family=design.family, site=design.formula.site)
    names = tuple(read_json(admin / kits.ABOUT)["sites"])
    with show_job(to_stderr=True) as show:
        attended = Launcher(admin, config_of(request, design), name, names, say, show).run_to_end()
    folder = admin.parent / "server" / kits.RUNS / name
    if not folder.is_dir():
        raise ConfigError(f"the model is in the server's folder, under {kits.RUNS}/{name}; run this command beside it")
    return finished(request, design, RunFolder.open(folder)), attended
