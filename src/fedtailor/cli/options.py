"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML configuration; fedtailor init writes one.")]


def _latest(path: Path) -> Path:
    """The folder of the models that serve now, if a fit was updated."""
    from fedtailor.experiments.store import latest

    return latest(path)


Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", callback=_latest)]
RunOrRuns = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run or a comparison.", callback=_latest)]
RunOrFit = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run or a fit.", callback=_latest)]
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
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr.")]
