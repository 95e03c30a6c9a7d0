"""Commands of a practitioner: a model for each site, predictions, export, newcomers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.options import (
    AsJson,
    DataRoot,
    Out,
    Run,
    RunOrFit,
    Settings,
    Site,
    Trust,
    console,
    print_json,
    progress_aside,
)
from fedtailor.cli.resume_hints import command, resumable, trusted
from fedtailor.errors import ConfigError


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
    from fedtailor.cli.checking import all_problems
    from fedtailor.cli.fit_listing import print_fit
    from fedtailor.experiments.progress import grid_shown
    from fedtailor.experiments.store import FIT, new_path
    from fedtailor.report.write import write
    from fedtailor.studies.fit import fit as fitted
    from fedtailor.studies.fit_folder import source_of

    source = source_of(sites, target, client_column, task=task, target_scale=target_scale)
    path = out or new_path(Path("runs"), f"{sites.resolve().stem.replace(':', '.')}-fit")
    named = {"target": target, "client_column": client_column}
    of_source = named | {"task": task, "target_scale": target_scale, "data_root": data_root}
    of_training = {"algorithm": algorithm, "rounds": rounds, "seed": seed, "set": settings, "time_limit": time_limit}
    of_training |= {"metric": metric}
    again = command("fit", sites, **of_source, **of_training, out=path)
    aside, others = progress_aside(as_json), all_problems(command("check", sites, **named), source)
    with others, aside, resumable(again, path, begun_by=FIT), grid_shown(console) as listener:
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
    print_fit(console, record)
    print(f"models     {path}\nreport     {page}")


def predict(
    run: RunOrFit,
    data: Annotated[Path, typer.Argument(metavar="FILE", help="Rows to predict: CSV or Parquet; or .npz with x.")],
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
    classification, class probabilities.
    """
    from fedtailor.data.tabular.read import client_name
    from fedtailor.serving.by_site import predicted_by_site, site_column
    from fedtailor.serving.personal import check_ending, personal, predicted, write_frame

    if out is not None:
        check_ending(out)
    trusted(run, trust)
    target = out or Path(f"{client_name(data) or data.stem}-predicted.csv")
    column = client_column or (None if site else site_column(run))
    if site:
        model = personal(run, site, data_root)
        frame, notes = predicted(model, data, interval), model.notes
        by = f"predicted by {model.title} for {site}"
    elif column is None:
        raise ConfigError("whose model? Name a site with --site, or the column that names it with --client-column")
    else:
        frame, notes = predicted_by_site(run, data, column, interval)
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
    trusted(run, trust)
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
    from fedtailor.cli.listing import print_newcomer
    from fedtailor.cli.records import newcomer_record
    from fedtailor.serving import onboard as onboarding

    trusted(run, trust)
    newcomer = onboarding.onboard(run, data, name, epochs, data_root)
    if as_json:
        print_json(newcomer_record(name, newcomer))
    else:
        print_newcomer(name, newcomer)
