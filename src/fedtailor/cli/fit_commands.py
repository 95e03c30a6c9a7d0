"""Commands of an analyst: fit, update and drift; predictions, exports and newcomers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.cli.check_command import all_problems
from fedtailor.cli.interruptions import accept_trust, command_words, resumable
from fedtailor.cli.options import AsJson, DataRoot, Out, Run, RunOrFit, Settings, Site, Trust
from fedtailor.cli.output import console, print_json, print_table, progress_to_stderr, unit
from fedtailor.errors import ConfigError

if TYPE_CHECKING:
    from fedtailor.serving.onboard import Newcomer

SITES_SHOWN = 40  # of a fit, in a terminal
TERMS_SHOWN = 40


def fit(
    sites: Annotated[
        Path,
        typer.Argument(
            metavar="SITES",
            help="A folder with one CSV or Parquet file per site; a data source such as heart-disease; or module:load.",
        ),
    ],
    target: Annotated[str, typer.Option("--target", help="Column of your files to predict.")] = "",
    client_column: Annotated[
        str | None, typer.Option("--client-column", help="Column that names the site, if SITES is one file.")
    ] = None,
    task: Annotated[
        str,
        typer.Option("--task", metavar="TASK", help="classification, regression or count; default: by the column."),
    ] = "",
    target_scale: Annotated[
        str,
        typer.Option("--target-scale", metavar="SCALE", help="log: for a positive, heavy-tailed number."),
    ] = "",
    algorithm: Annotated[
        str, typer.Option("--algorithm", help="auto: each site gets the model that serves it best.")
    ] = "auto",
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="Training rounds; 0: 32.")] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of all randomness.")] = 0,
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit", min=0, help="Seconds for a table; 0: no limit. Models that do not fit are left out."
        ),
    ] = 0,
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="What a table's figures show, such as auroc, brier or mae.")
    ] = "",
    settings: Settings = [],  # noqa: B006
    data_root: DataRoot = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Fit a personal model for each site of your own data.

    Prints how well each site does alone, with one common model, and personalized, and writes a report. After
    an interruption, run the same command with --out to continue.
    """
    from fedtailor.experiments.progress import show_grid
    from fedtailor.experiments.store import FIT, new_path
    from fedtailor.report.write import write
    from fedtailor.tables.fit import fit as fitted
    from fedtailor.tables.fit_sources import source_of

    source = source_of(sites, target, client_column, task=task, target_scale=target_scale)
    path = out or new_path(Path("runs"), f"{sites.resolve().stem.replace(':', '.')}-fit")
    named = {"target": target, "client_column": client_column}
    of_source = named | {"task": task, "target_scale": target_scale, "data_root": data_root}
    of_training = {"algorithm": algorithm, "rounds": rounds, "seed": seed, "set": settings, "time_limit": time_limit}
    of_training |= {"metric": metric}
    again = command_words("fit", sites, **of_source, **of_training, out=path)
    aside, others = progress_to_stderr(as_json), all_problems(command_words("check", sites, **named), source)
    with others, aside, resumable(again, path, begun_by=FIT), show_grid(console) as listener:
        record = fitted(
            source,
            path,
            algorithm=algorithm,
            rounds=rounds,
            seed=seed,
            settings=settings,
            data_root=data_root,
            listener=listener,
            time_limit=time_limit,
            metric=metric,
        )
    page = write(path)
    if as_json:
        print_json({"folder": path, "report": page, **record})
        return
    print_fit(record)
    print(f"models     {path}\nreport     {page}")


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
    from fedtailor.data.tabular.read import read_rows
    from fedtailor.experiments.progress import show_grid
    from fedtailor.experiments.store import FIT, latest, root_of
    from fedtailor.report.write import FILE, write
    from fedtailor.tables.serve import site_column
    from fedtailor.tables.update import split_by_site
    from fedtailor.tables.update import update as updated

    accept_trust(run, trust)
    again = command_words("update", run, data=data, rows=rows, site=site, time_limit=time_limit, data_root=data_root)
    root = root_of(run)
    new_rows = None if rows is None else split_by_site(read_rows(rows)[1], site, site_column(latest(root)))
    with progress_to_stderr(as_json), resumable(again, root, begun_by=FIT), show_grid(console) as listener:
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
    print_fit(result.record)
    print_update(result.record["update"])
    print(f"models     {result.folder}\nreport     {page}")


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
    """Report whether new rows are like those that a fit was trained on.

    By site and column: how far values have moved, new categories, missing values; and whether predictions
    have moved. Compared with counts that the fit keeps; the training rows are not needed.
    """
    from fedtailor.tables.drift import drift_of

    accept_trust(run, trust)
    drifts = drift_of(run, data, site, client_column, data_root)
    print_json(drifts) if as_json else print_drift(drifts)


def predict(
    run: RunOrFit,
    data: Annotated[
        Path, typer.Argument(metavar="FILE", help="Rows to predict: CSV or Parquet; or .npz with x; images.")
    ],
    site: Annotated[str, typer.Option("--site", help="Site whose model to use; default: by column.")] = "",
    client_column: Annotated[
        str | None, typer.Option("--client-column", help="Column that names each row's site, if there is no --site.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="CSV or Parquet file to write; default: FILE-predicted.csv here.")
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SHARE", min=0, max=1, help="Of numbers also an interval, as 0.9.")
    ] = 0,
    data_root: DataRoot = None,
    trust: Trust = False,
) -> None:
    """Predict new rows with the personal model of one site, or of each row's own site.

    Rows are prepared as in training. The output file has all columns of FILE, the prediction and, in
    classification, class probabilities. Of an image, or a folder of images, the predicted masks are written.
    """
    from fedtailor.data.files import client_name
    from fedtailor.experiments.store import latest
    from fedtailor.serving.predict import check_ending, predict_by_site, predict_file, write_frame
    from fedtailor.tables.serve import personal, site_column

    accept_trust(run, trust)
    known = personal(run, site, data_root) if site else None
    if known is not None and known.task == "segmentation":
        from fedtailor.serving.predict_masks import write_masks

        files = write_masks(known, latest(run), data, out)
        more = f" and {len(files) - 1} more masks" if len(files) > 1 else ""
        print("\n".join([*known.notes, f"wrote {files[0]}{more}, predicted by {known.title} for {site}"]))
        return
    if out is not None:
        check_ending(out)
    target = out or Path(f"{client_name(data) or data.stem}-predicted.csv")
    column = client_column or (None if site else site_column(run))
    if known is not None:
        frame, notes = predict_file(known, data, interval), known.notes
        by = f"predicted by {known.title} for {site}"
    elif column is None:
        raise ConfigError("whose model? Name a site with --site, or the column that names it with --client-column")
    else:
        frame, notes = predict_by_site(run, data, column, interval)
        by = f'each predicted by the model of its site, as "{column}" names it'
    write_frame(target, frame)
    print("\n".join([*notes, f"wrote {target}: {frame.height} rows, {by}"]))


def export(
    run: RunOrFit,
    site: Site,
    to: Annotated[str, typer.Option("--to", help="onnx, torch, safetensors or json.")],
    out: Annotated[Path | None, typer.Option("--out", help="File to write; default: SITE with the extension.")] = None,
    data_root: DataRoot = None,
    trust: Trust = False,
) -> None:
    """Export the personal model of a site for other programs.

    onnx holds every model that a fit serves and takes columns as they are in a file; json holds linear models,
    with coefficients in your units. The exported file is loaded again and compared with the run on sample rows;
    if it differs, no file is written. SITE.preparation.json next to it describes how rows are prepared.
    """
    from fedtailor.serving.export import ENDINGS
    from fedtailor.serving.export import export as exported

    if to not in ENDINGS:
        raise ConfigError(f'--to "{to}": known are {", ".join(ENDINGS)}')
    accept_trust(run, trust)
    for file in exported(run, site, to, out, data_root):  # type: ignore[arg-type]
        print(f"wrote {file}")


def onboard(
    run: Run,
    data: Annotated[Path, typer.Option("--data", help="The newcomer's file; or a TOML file with a [data] table.")],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the newcomer.")],
    epochs: Annotated[
        int, typer.Option("--epochs", metavar="N", min=0, help="Epochs to fine-tune its private parameters.")
    ] = 3,
    data_root: DataRoot = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Give a newcomer a personal model from a finished run.

    The other clients are not affected. The model is saved in the run folder, under newcomers/NAME.
    """
    from fedtailor.serving import onboard as onboarding

    accept_trust(run, trust)
    newcomer = onboarding.onboard(run, data, name, epochs, data_root)
    if as_json:
        figures = {"samples": newcomer.samples, "metrics": newcomer.metrics, "model": newcomer.path}
        print_json({"name": name, **figures, "curve": newcomer.curve})
    else:
        print_newcomer(name, newcomer)


def print_fit(record: dict[str, Any]) -> None:
    """Print test figures of every site alone, in common and personalized; then what is shared, in words."""
    from fedtailor.studies.result_tables import number
    from fedtailor.tables.words import fit_sentences, what_leaves

    metric, task = record["metric"], f"{record['data']}: {record['task']} of {record['target'] or 'the target'}"
    print("\n".join(record["notes"]))
    print(f"task       {task}, model {record['model']}, {record['rounds']} rounds")
    rows = []
    for name, row in record["sites"].items():
        figures = [number(metric, row[k]) for k in ("alone", "common", "personal")]
        rows.append([name, str(row["train"] + row["val"] + row["test"]), *figures, row["served"]])
    if len(rows) > SITES_SHOWN:
        sign = 1 if record["higher_is_better"] else -1
        gains = {name: sign * (row["personal"] - row["alone"]) for name, row in record["sites"].items()}
        ordered = sorted(gains, key=lambda name: 0.0 if math.isnan(gains[name]) else gains[name])
        extremes = {*ordered[: SITES_SHOWN // 2], *ordered[-SITES_SHOWN // 2 :]}
        print(f"{len(rows)} sites; those that lose and gain most are shown, all are in the report")
        rows = [row for row in rows if row[0] in extremes]
    means = [number(metric, record["means"][k]) for k in ("alone", "common", "personal")]
    columns = ("site", "rows", "alone", "in common", "personal", "served by")
    print_table(f"test {metric}{unit(metric)}", columns, rows, ["mean", "", *means, ""])
    if "baseline" in record["means"]:
        mean = number(metric, record["means"]["baseline"])
        print(f"baseline   {mean}: the mean of each site, or its shares of the classes, and nothing else")
    for about, words in fit_sentences(record):
        print(f"{about:<10} {words}")
    for each in record.get("dropped", ()):
        if not each["round"]:  # not by halving
            print(f"left out   {each['label']}: {each['why']}")
    for names, sent, private in what_leaves(record["shared"]):
        print(f"shared     {names}: a site sends {sent}, and keeps {private}")
    # of a table the line `sites` says it, with what chance does
    if "differences" not in record and math.isfinite(record["hurt"]):
        print(f"hurt       {100 * record['hurt']:.0f} % of the sites are worse off than alone, on test data")


def print_update(changes: dict[str, Any]) -> None:
    """Print rows and figures before and after, of the sites that changed."""
    from fedtailor.studies.result_tables import number

    metric, sites = changes["metric"], changes["sites"]
    rows = [
        [name, str(row["rows_before"]), str(row["rows_after"]), str(row["same_test_rows"])]
        + [number(metric, row[key]) for key in ("before", "after")]
        for name, row in sites.items()
        if name in changes["changed"]
    ]
    title = f"changed sites; test {metric}{unit(metric)} of the earlier and the new model on the same rows"
    print_table(title, ("site", "rows before", "now", "test rows", "earlier", "new"), rows)
    others = len(sites) - len(rows)
    if others:
        print(f"unchanged  {others} sites with the same rows; their models changed with the common part")
    for words, names in (("new sites", changes["new_sites"]), ("gone", changes["gone"])):
        if names:
            print(f"{words:<10} {', '.join(names)}")
    for note in changes["notes"]:
        print(f"note       {note}")


def print_drift(drifts: Mapping[str, Any]) -> None:
    """Print the columns that have drifted, by site; and what that means, in words."""
    rows = [
        [name, each["column"], f"{each['psi']:.2f}", f"{each['ks']:.2f}", each["words"]]
        for name, site in drifts["sites"].items()
        for each in site["columns"]
        if each["drifted"]
    ]
    if rows:
        print_table("columns that have drifted", ("site", "column", "PSI", "KS", "how"), rows[:TERMS_SHOWN])
        if len(rows) > TERMS_SHOWN:
            print(f"{len(rows) - TERMS_SHOWN} more: fedtailor drift --json has all")
    for name, site in drifts["sites"].items():
        for note in site["notes"]:
            print(f"{name}: {note}")
    for words in drifts["words"]:
        print(f"{'drift':<10} {words}")


def print_effects(effects: Mapping[str, Any], site: str, path: Path) -> None:
    """Print coefficients and importance, as tables and in words; with `site`, its own coefficients too."""
    from fedtailor.studies.result_tables import metric_name, number
    from fedtailor.tables.effects import EFFECTS
    from fedtailor.tables.words import (
        aliased_sentence,
        importance_sentences,
        model_sentence,
        sharing_sentences,
    )

    coefficients = effects["coefficients"]
    if coefficients:
        for output in coefficients["outputs"]:
            columns, rows = coefficient_rows(output, coefficients, site)
            print_table(coefficients_title(coefficients, output, effects["target"]), columns, rows[:TERMS_SHOWN])
            if len(rows) > TERMS_SHOWN:
                print(f"{len(rows) - TERMS_SHOWN} more: fedtailor explain --json has all")
        for words in (model_sentence(coefficients), *sharing_sentences(coefficients)):
            print(f"{'sites' if words != model_sentence(coefficients) else 'model':<10} {words}")
        if words := aliased_sentence(coefficients["outputs"][0]["terms"]):
            print(f"aliased    {words}")
    importance = effects["importance"]
    if importance["columns"]:
        metric = importance["metric"]
        rows = [
            [each["column"], number(metric, each["mean"]), number(metric, each["sd"])]
            + ([number(metric, each["sites"].get(site, float("nan")))] if site else [])
            for each in importance["columns"]
        ]
        split = "held-out" if importance["held_out"] else "training"
        rows_used = f"{importance['rows']} {split} rows"
        title = f"how much worse {metric_name(metric)} gets if a column is shuffled, on {rows_used}"
        print_table(title, ("column", "worse by", "sd", *((f"at {site}",) if site else ())), rows[:TERMS_SHOWN])
    for words in importance_sentences(importance):
        print(f"{'matters':<10} {words}")
    if site:
        print(f"served     site {site}: {effects['served'][site]}")
    print(f"details    {path / EFFECTS}")


def coefficients_title(coefficients: Mapping[str, Any], output: Mapping[str, Any], target: str) -> str:
    from fedtailor.tables.words import is_factor

    if coefficients["scale"] == "log-odds":
        return f"odds of {output['class']} against {output['against']}: factor by which they change"
    if is_factor(coefficients["scale"]):
        return f"factor by which {target} changes"
    return f"coefficients, in units of {coefficients['scale'] or target}"


def coefficient_rows(
    output: Mapping[str, Any], coefficients: Mapping[str, Any], site: str
) -> tuple[tuple[str, ...], list[list[str]]]:
    """A line per term: per unit of its column, with the interval; and what differs between sites."""
    from fedtailor.tables.coefficients import INTERCEPT
    from fedtailor.tables.words import is_factor, unit_of

    is_odds, is_single = is_factor(coefficients["scale"]), len(coefficients["sites"]) == 1

    def cells(term: Mapping[str, Any], each: Mapping[str, Any]) -> list[str]:
        if each["value"] is None:
            return ["aliased", ""]
        values = [float(each[key]) / (term["sd"] or 1.0) for key in ("value", "low", "high")]
        texts = [f"{math.exp(min(v, 50)) if is_odds else v:.3g}" for v in values]
        return [texts[0], f"{texts[1]} to {texts[2]}"]

    rows = []
    for term in output["terms"]:
        name = term["name"] if term["name"] == INTERCEPT else f"{term['name']} ({unit_of(term)})"
        own = cells(term, term["sites"][0]) if site else []
        spread = "-" if term["value"] is None else f"{term['spread'] / (term['sd'] or 1.0):.3g}"
        differ = [] if is_single else [spread if term["differs"] else "common", f"{term['share']:.2f}"]
        differ = ["", ""] if differ and term["value"] is None else differ
        rows.append([name, *cells(term, term), *own, *differ])
    of_site = (f"at {site}", "95 % interval ") if site else ()
    of_sites = () if is_single else ("sd between", "shrinkage")
    return ("", "effect", "95 % interval", *of_site, *of_sites), rows


def print_newcomer(name: str, newcomer: Newcomer) -> None:
    from fedtailor.studies.result_tables import number

    samples = ", ".join(f"{count} {split}" for split, count in newcomer.samples.items())
    print(f"newcomer   {name}: {samples} samples")
    for split, metrics in newcomer.metrics.items():
        if not newcomer.samples[split]:
            continue
        print(f"{split:<10} " + ", ".join(f"{k} {number(k, v)}{unit(k)}" for k, v in metrics.items()))
    if newcomer.curve is not None:
        _print_curve(newcomer.curve)
    print(f"model      {newcomer.path}")


def _print_curve(curve: dict[str, Any]) -> None:
    """Print its learning curve, and what is expected of more rows."""
    rows = [
        [str(point["rows"]), *(f"{point[k]['mean']:.3g} ± {point[k]['error']:.2g}" for k in point if k != "rows"), ""]
        for point in curve["points"]
    ]
    names = [key for key in curve["points"][0] if key != "rows"]
    beyond = curve.get("expected", [])
    rows += [[str(point["rows"]), *("" for _ in names), f"{point['personal']:.3g}"] for point in beyond]
    columns = ("rows", *names, "expected, personal")
    print_table(f"{curve['metric']} by number of its rows, on rows that were held out", columns, rows)
    print(f"expected   {curve['sentence']}")
