"""The page on the architecture: its files are there, and the layers are those of the linter."""

from __future__ import annotations

import re
import tomllib

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")


def test_the_way_of_a_value_has_ten_steps_in_files_that_are_there() -> None:
    steps = re.findall(r"^\| (\d+) \| `([\w/.]+)` \|", PAGE, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, 11))
    assert all((ROOT / "src/fedtailor" / file).is_file() for _, file in steps)


def test_the_picture_shows_the_layers_that_are_checked() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ][0]
    checked = [name for layer in contract["layers"] for name in layer.split(" | ")]
    picture = PAGE.split("```text\n")[1].split("```")[0].splitlines()
    shown = [name for line in picture for name in re.split(r"\s{3,}", line.strip())[0].split()]
    assert shown == checked
    described = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE, re.MULTILINE))))
    assert described == set(checked) - {"plugins", "errors", "version"}
