"""Commands to begin with: a demo, a configuration and its schema, public data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.options import AsJson, DataRoot, Out, console, print_json
from fedtailor.errors import ConfigError


def demo(out: Out = None, as_json: AsJson = False) -> None:
    """Compare four algorithms on ten clients, and write a report.

    Local, FedAvg, FedRep and Ditto on handwritten digits, distributed unevenly over the clients. Needs no files
    and takes less than a minute.
    """
    from fedtailor.cli.main import compare
    from fedtailor.experiments.config import CONFIGS
    from fedtailor.report.write import write

    path = out or Path("runs") / "demo"
    compare(CONFIGS / "demo.toml", out=path, as_json=as_json)
    report = write(path)
    if not as_json:
        print(f"report     {report}")


def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write.")] = Path("config.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented configuration with every key at its default.

    Options of the model and the algorithm are commented out, because they depend on which ones you choose.
    """
    from fedtailor.experiments.template import template

    if path.exists() and not force:
        raise ConfigError(f"{path}: exists already; --force replaces it")
    path.write_text(template(), encoding="utf-8")
    print(f"wrote {path}; run it with: {shlex.join(['fedtailor', 'run', str(path)])}")


def download(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data source such as mnist; see fedtailor list data.")],
    data_root: DataRoot = None,
) -> None:
    """Download a public data set and check it.

    Files are fetched from their official address and saved only if their checksum is correct.
    """
    from fedtailor.cli.listing import download_with_progress

    download_with_progress(console, name, data_root)


def schema() -> None:
    """Print the JSON schema of a configuration.

    For editors, agents and validators: every key of a run, a comparison or a published table with its default, allowed
    values and description; options of algorithms and models by name.

    Example: fedtailor schema > fedtailor.schema.json, and "#:schema fedtailor.schema.json" at the top of config.toml
    """
    from fedtailor.studies.schema import configuration_schema

    print_json(configuration_schema())
