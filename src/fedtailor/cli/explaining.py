"""`fedtailor explain` and `drift`: what the models of a fit mean, what a run shares, whether new rows are alike."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedtailor.cli.options import AsJson, DataRoot, RunOrFit, Trust, console, print_json
from fedtailor.cli.resume_hints import trusted
from fedtailor.errors import ConfigError

MOST = 40  # terms that a terminal shows


def explain(
    run: RunOrFit,
    site: Annotated[str, typer.Option("--site", help="Of a fit: also the own coefficients of this site.")] = "",
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Show what the models of a fit mean, or how much a run shares.

    Of a fit: what each column does, with 95 % intervals, whether it does the same at all sites, and which
    columns the predictions need. Of a run: how much of each client's parameters is shared (0 is fully
    private, 1 fully common), by feature or layer; for learned aggregation weights, their weight by round.
    """
    from fedtailor.cli.listing import print_shares, print_weights
    from fedtailor.cli.records import shares_record
    from fedtailor.experiments.store import FIT
    from fedtailor.tables.explain_fit import explain_fit

    trusted(run, trust)
    if (run / FIT).exists():
        effects = explain_fit(run, site, data_root)
        print_json(effects) if as_json else print_effects(console, effects, site, run)
        return
    if site:
        raise ConfigError(f"--site {site}: is for fits; of a run all clients are shown")
    if as_json:
        print_json(shares_record(run, data_root))
    elif not print_weights(console, run):
        print_shares(console, run, data_root)


def drift(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a fit of tables.")],
    data: Annotated[Path, typer.Argument(metavar="FILE", help="New rows: CSV or Parquet.")],
    site: Annotated[str, typer.Option("--site", help="Site whose rows they are; default: by column.")] = "",
    client_column: Annotated[
        str | None, typer.Option("--client-column", help="Column that names each row's site, if there is no --site.")
    ] = None,
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Tell whether new rows are like those that a fit was trained on.

    By site and column: how far values have moved, new categories, missing values; and whether predictions
    have moved. Compared with counts that the fit keeps; the training rows are not needed.
    """
    from fedtailor.tables.drift import drift_of

    trusted(run, trust)
    drifts = drift_of(run, data, site, client_column, data_root)
    print_json(drifts) if as_json else print_drift(console, drifts)


def print_drift(console: Console, drifts: Mapping[str, Any]) -> None:
    """The columns that have drifted, by site; and words."""
    from fedtailor.cli.listing import print_table

    rows = [
        [name, each["column"], f"{each['psi']:.2f}", f"{each['ks']:.2f}", each["words"]]
        for name, site in drifts["sites"].items()
        for each in site["columns"]
        if each["drifted"]
    ]
    if rows:
        print_table(console, "what has drifted", ("site", "column", "PSI", "KS", "how"), rows[:MOST])
        if len(rows) > MOST:
            print(f"{len(rows) - MOST} more: fedtailor drift --json has all")
    for name, site in drifts["sites"].items():
        for note in site["notes"]:
            print(f"{name}: {note}")
    for words in drifts["words"]:
        print(f"{'drift':<10} {words}")


def print_effects(console: Console, effects: Mapping[str, Any], site: str, path: Path) -> None:
    """Coefficients, importance, and words."""
    from fedtailor.cli.listing import print_table
    from fedtailor.studies.result_tables import number
    from fedtailor.tables.effects import EFFECTS
    from fedtailor.tables.words import about_model, importance_words, shared_words

    coefficients = effects["coefficients"]
    if coefficients:
        for output in coefficients["outputs"]:
            columns, rows = coefficient_rows(output, coefficients, site)
            print_table(console, title_of(coefficients, output, effects["target"]), columns, rows[:MOST])
            if len(rows) > MOST:
                print(f"{len(rows) - MOST} more: fedtailor explain --json has all")
        for words in (about_model(coefficients), *shared_words(coefficients)):
            print(f"{'sites' if words != about_model(coefficients) else 'model':<10} {words}")
    importance = effects["importance"]
    if importance["columns"]:
        metric = importance["metric"]
        rows = [
            [each["column"], number(metric, each["mean"]), number(metric, each["sd"])]
            + ([number(metric, each["sites"].get(site, float("nan")))] if site else [])
            for each in importance["columns"]
        ]
        split = "held-out" if importance["held_out"] else "training"
        title = f"by how much {metric} gets worse if a column is shuffled, on {importance['rows']} {split} rows"
        print_table(console, title, ("column", "worse by", "±", *((f"at {site}",) if site else ())), rows[:MOST])
    for words in importance_words(importance):
        print(f"{'matters':<10} {words}")
    if site:
        print(f"served     {site} is served by {effects['served'][site]}")
    print(f"all of it  {path / EFFECTS}")


def title_of(coefficients: Mapping[str, Any], output: Mapping[str, Any], target: str) -> str:
    """What the coefficients are of."""
    from fedtailor.tables.words import is_factor

    if coefficients["scale"] == "log-odds":
        return f"odds of {output['class']} against {output['against']}: by which factor they change"
    if is_factor(coefficients["scale"]):
        return f"by which factor {target} changes"
    return f"coefficients, in units of {coefficients['scale'] or target}"


def coefficient_rows(
    output: Mapping[str, Any], coefficients: Mapping[str, Any], site: str
) -> tuple[tuple[str, ...], list[list[str]]]:
    """A line per term: per unit of its column, with the interval; and what differs between sites."""
    import math

    from fedtailor.tables.coefficients import INTERCEPT
    from fedtailor.tables.words import is_factor, unit_of

    is_odds, is_single = is_factor(coefficients["scale"]), len(coefficients["sites"]) == 1

    def cells(term: Mapping[str, Any], each: Mapping[str, Any]) -> list[str]:
        if each["value"] is None:
            return ["?", "?"]
        values = [float(each[key]) / (term["sd"] or 1.0) for key in ("value", "low", "high")]
        texts = [f"{math.exp(min(v, 50)) if is_odds else v:.3g}" for v in values]
        return [texts[0], f"{texts[1]} to {texts[2]}"]

    rows = []
    for term in output["terms"]:
        name = "level" if term["name"] == INTERCEPT else f"{term['name']} ({unit_of(term)})"
        own = cells(term, term["sites"][0]) if site else []
        spread = "-" if term["value"] is None else f"{term['spread'] / (term['sd'] or 1.0):.3g}"
        differ = [] if is_single else [spread if term["differs"] else "common", f"{term['share']:.2f}"]
        rows.append([name, *cells(term, term), *own, *differ])
    of_site = (f"at {site}", "95 % interval ") if site else ()
    of_sites = () if is_single else ("sd of sites", "common")
    return ("", "effect", "95 % interval", *of_site, *of_sites), rows
