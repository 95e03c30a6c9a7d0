"""Check files against the schema on standard input: fedtailor schema | python tools/check_configs.py configs"""

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match


def checked(schema: dict[str, Any]) -> Draft202012Validator:
    """What tells the mistakes of a file, of a schema that is one; this takes more than a second."""
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def mistakes(validator: Draft202012Validator, files: list[Path]) -> Iterator[str]:
    """One line for each file that the schema refuses."""
    for file in files:
        tables = json.loads(json.dumps(tomllib.loads(file.read_text(encoding="utf-8")), default=str))
        wrong = best_match(validator.iter_errors(tables))
        if wrong is not None:
            yield f"{file}: {'.'.join(map(str, wrong.absolute_path)) or 'top'}: {wrong.message}"


def files_of(paths: list[Path]) -> list[Path]:
    """Files, and the TOML files below folders."""
    return [file for path in paths for file in (sorted(path.rglob("*.toml")) if path.is_dir() else [path])]


if __name__ == "__main__":
    files = files_of([Path(argument) for argument in sys.argv[1:]])
    wrong = list(mistakes(checked(json.load(sys.stdin)), files))
    print("\n".join([*wrong, f"{len(files) - len(wrong)} of {len(files)} configurations fit the schema"]))
    sys.exit(bool(wrong) or not files)
