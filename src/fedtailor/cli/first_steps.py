"""Commands to begin with: a demo, a configuration and its schema, public data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.options import DataRoot, Out, console, print_json
from fedtailor.errors import ConfigError


def demo(out: Out = None) -> None:
    """Compare four algorithms on ten clients, and write a report.

    Local, FedAvg, FedRep and Ditto on handwritten digits that differ from client to client; needs no files and
    takes less than a minute.
    """
    from fedtailor.cli.main import compare
    from fedtailor.experiments.config import CONFIGS
    from fedtailor.report.write import write

    path = out or Path("runs") / "demo"
    compare(CONFIGS / "demo.toml", out=path)
    print(f"report     {write(path)}")


def init(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write.")] = Path("config.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented configuration with every key at its default.

    Options of the model and of the algorithm are in comments: another one has others.
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

    Files come from their official address and appear only when their checksum is right.
    """
    from fedtailor.cli.listing import download_with_progress

    download_with_progress(console, name, data_root)


def schema() -> None:
    """Print the JSON schema of a configuration.

    For editors, agents and checks: every key of a run, a comparison or a published table, its default, what it may be
    and its sentence; options of algorithms and models by name.

    Example: fedtailor schema > fedtailor.schema.json, and "#:schema fedtailor.schema.json" atop config.toml
    """
    from fedtailor.studies.schema import configuration_schema

    print_json(configuration_schema())
