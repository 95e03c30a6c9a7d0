"""The command line inside a notebook: %load_ext fedtailor.cli.notebook, then %fedtailor compare first.toml

Commands run in the kernel's own process, so that tables and progress are drawn by the notebook.
"""

from __future__ import annotations

import os
import shlex
from typing import Any

from fedtailor.errors import UserError


def fedtailor(line: str) -> None:
    """Run a command; what the user can put right is one line, not a traceback."""
    from fedtailor.cli.main import app

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app(shlex.split(line), prog_name="fedtailor", standalone_mode=False)
    except UserError as error:
        print(f"error: {error}")


def load_ipython_extension(ipython: Any) -> None:
    """Register the magic %fedtailor."""
    ipython.register_magic_function(fedtailor, "line")
