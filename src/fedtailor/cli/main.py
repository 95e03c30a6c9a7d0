"""The command line's entry. Commands parse, call and print; each imports what it needs, so that --help stays fast."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from fedtailor.cli import (
    catalog,
    check_command,
    comparison_commands,
    federation_commands,
    fit_commands,
    folder_commands,
    model_commands,
    run_commands,
    sharing_commands,
)
from fedtailor.cli.interruptions import print_error
from fedtailor.errors import RankLost, UserError
from fedtailor.version import __version__

app = typer.Typer(
    name="fedtailor",
    help="Personalized federated learning that learns what each client should share.",
    epilog="Start with: fedtailor demo, fedtailor fit SITES --target COLUMN, or fedtailor init and run config.toml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(federation_commands.app)


@app.callback(invoke_without_command=True)
def top(show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Personalized federated learning that learns what each client should share."""
    if show_version:
        print(f"fedtailor {__version__}")
        raise typer.Exit


for _command in (
    comparison_commands.demo,
    catalog.init,
    catalog.schema,
    catalog.download,
    fit_commands.fit,
    fit_commands.predict,
    fit_commands.export,
    fit_commands.onboard,
    fit_commands.update,
    model_commands.model,
    sharing_commands.advise,
    sharing_commands.leave,
    check_command.check,
    run_commands.run,
    run_commands.resume,
    comparison_commands.compare,
    comparison_commands.reproduce,
    catalog.list_,
    folder_commands.show,
    folder_commands.explain,
    fit_commands.drift,
    folder_commands.report,
    folder_commands.watch,
):
    app.command(_command.__name__.rstrip("_"))(_command)


def main() -> None:
    """Run a command; an error that the user can correct is one line and exit code 2."""
    # threads that wait must not spin: on busy cores that makes two threads many times slower than one
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app(prog_name="fedtailor")
    except UserError as error:
        message = " ".join(str(error).splitlines())
        print_error(f"error: {check_command.as_options(message) if sys.argv[1:2] == ['fit'] else message}")
        sys.exit(2)
    except RankLost as lost:
        print_error(f"error: a rank was lost before the run began or after its end ({lost})")
        sys.exit(1)
    except OSError as error:
        if error.filename is None:
            raise
        print_error(f"error: {error.filename}: {error.strerror}")
        sys.exit(2)


if __name__ == "__main__":
    main()
