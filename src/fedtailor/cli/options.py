"""Arguments that several commands take, and the console they print to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; fedtailor init writes one.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
RunOrRuns = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a comparison.")]
RunOrFit = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a fit.")]
Site = Annotated[str, typer.Option("--site", help="Whose model.")]
Settings = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as local.lr=0.1; repeatable.")
]
DataRoot = Annotated[
    Path | None, typer.Option("--data-root", help="Folder of the data sets; else FEDTAILOR_DATA or the user's cache.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to write to; else a new one under runs/.")]
