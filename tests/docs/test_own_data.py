"""The page on own data: its table of options is complete, its messages are those given; test_notebooks.py runs it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedtailor import data
from fedtailor.data.configs import FolderConfig
from fedtailor.errors import DataError
from fedtailor.experiments.config import parse
from tests.docs.pages import ROOT, make_sites

PAGE = ROOT / "docs/how-to/own-data.md"
WEST = Path("sites/west.csv")


def edit(change: Callable[[list[str]], list[str]], file: Path = WEST) -> None:
    file.write_text("\n".join(change(file.read_text().splitlines())) + "\n")


def remove_all() -> None:
    for file in Path("sites").iterdir():
        file.unlink()


def first_row(**values: str) -> None:
    """Put other values into the first row of west."""

    def change(lines: list[str]) -> list[str]:
        row = dict(zip(lines[0].split(","), lines[1].split(","), strict=True)) | values
        return [lines[0], ",".join(row.values()), *lines[2:]]

    edit(change)


WRONG: dict[str, tuple[Callable[[], object], dict[str, Any]]] = {
    "sites: no such folder": (lambda: Path("sites").rename("elsewhere"), {}),
    "sites: no data files; put one file per client there": (remove_all, {}),
    'sites/north.csv: no target column "outcom"; did you mean "outcome"?': (lambda: None, {"target": "outcom"}),
    'sites/west.csv: column "dose" is missing (north.csv has it)': (
        lambda: edit(lambda lines: [",".join(v for i, v in enumerate(x.split(",")) if i != 1) for x in lines]),
        {"missing": "error"},
    ),
    'sites/west.csv: column "dose" has the text "high" in data row 1 where a number is expected': (
        lambda: first_row(dose="high"),
        {},
    ),
    'sites/west.csv: column "dose" has no value in 1 of 120 rows': (
        lambda: first_row(dose=""),
        {"missing": "error"},
    ),
    "sites/west.csv: line 3 has 3 fields, the header has 4; correct it": (
        lambda: edit(lambda lines: [*lines[:2], lines[2].rpartition(",")[0], *lines[3:]]),
        {},
    ),
    "sites/west.csv: column 1 has no name (a row index?)": (
        lambda: edit(lambda lines: [f"{'' if i == 0 else i},{line}" for i, line in enumerate(lines)]),
        {},
    ),
    'sites/west.csv: column "age" appears more than once': (
        lambda: edit(lambda lines: [lines[0].replace("dose", "age"), *lines[1:]]),
        {},
    ),
    "sites/west.csv: not UTF-8": (lambda: WEST.write_bytes(b"age,outcome\n1,\x81\n"), {}),
    "sites/west.csv: empty file": (lambda: WEST.write_text(""), {}),
    'sites/west.tsv: client "west" is also in west.csv; keep one of them': (
        lambda: Path("sites/west.tsv").write_text("a\n"),
        {},
    ),
}


def listed(heading: str) -> list[list[str]]:
    """The rows of the table below a heading."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]


def test_all_options_are_listed_with_their_defaults() -> None:
    fields = {name: field for name, field in FolderConfig.model_fields.items() if name != "source"}
    table = {key.strip("`"): default.strip("`") for key, default, _ in listed("Options")}
    assert set(table) == set(fields)
    for name, field in fields.items():
        if field.is_required():
            wanted = "required"
        elif isinstance(field.default, str):
            wanted = f'"{field.default}"'
        else:
            wanted = {(): "[]", None: "none", False: "false", True: "true"}.get(field.default, str(field.default))
        assert table[name] == wanted, name


def test_all_messages_are_tried() -> None:
    assert [message.strip("`") for message, _ in listed("Errors you may see")] == list(WRONG)


@pytest.mark.parametrize("message", WRONG)
def test_messages_are_those_given(message: str, empty_folder: Path) -> None:
    make_sites()
    spoil, options = WRONG[message]
    spoil()
    config = parse({"data": {"source": "folder", "path": "sites", "target": "outcome"} | options})
    with pytest.raises(DataError) as error:
        data.load(config.data, seed=0)
    assert str(error.value).replace(f"{empty_folder.resolve()}/", "").startswith(message)
