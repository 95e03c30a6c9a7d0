"""Arguments that several commands take, and the console they print to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML configuration; fedtailor init writes one.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
RunOrRuns = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run or a comparison.")]
RunOrFit = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run or a fit.")]
Site = Annotated[str, typer.Option("--site", help="Site whose model to use.")]
Settings = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as local.lr=0.1; repeatable.")
]
DataRoot = Annotated[
    Path | None, typer.Option("--data-root", help="Folder of data sets; default: FEDTAILOR_DATA or the user cache.")
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps or xpu; as federation.device."),
]
Trust = Annotated[bool, typer.Option("--trust", help='Run code outside fedtailor that RUN names ("module:Class").')]
Out = Annotated[Path | None, typer.Option("--out", help="Output folder; default: a new one under runs/.")]
