"""The library without its extras: what everybody imports needs the dependencies that everybody has."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Missing())
import fedtailor.api, fedtailor.cli.main, fedtailor.sklearn
print("imported")
"""


def test_extras_are_imported_where_they_are_used() -> None:
    """Packages that only extras name, and what these bring along, cannot be imported."""
    about = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=;! ]", each)[0].lower() for each in requirements}

    optional = set().union(*map(names, about["optional-dependencies"].values())) - names(about["dependencies"])
    modules = {m for m, of in packages_distributions().items() if {d.lower() for d in of} <= optional} - {"fedtailor"}
    assert {"cryptography", "PIL", "peft"} <= modules
    done = subprocess.run([sys.executable, "-c", PROGRAM, *modules], capture_output=True, text=True)
    assert done.stdout == "imported\n", done.stderr
