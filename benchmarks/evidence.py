"""Makes the pages of docs/results from stored records, and the records from runs. Resumable: runs are kept under runs/.

FEDTAILOR_DATA=... python -m benchmarks.evidence [PAGE ...]    run what is missing, write records and pages
python -m benchmarks.evidence --pages [PAGE ...]               only write the pages, from the records
python -m benchmarks.evidence PAGE --part "duw/figure3 --scale paper" [--rows NAMES] [--column NAME] [--out FOLDER] ...
                                                               one table, or some of its cells, into its record
python -m benchmarks.evidence --check [PAGE ...]               rerun the miniatures, mark the rows that changed
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import miniature, records
from benchmarks.records import RESULTS, ROOT, Provenance, RecordedPart, RecordedRow
from fedtailor import algorithms
from fedtailor.errors import ConfigError
from fedtailor.experiments.config import CompareConfig, RunConfig, parse, read_toml
from fedtailor.experiments.store import RESULTS as FINISHED
from fedtailor.experiments.store import RunFolder
from fedtailor.studies import compare, reproduce, result_tables, search
from fedtailor.studies.grid import Cell

CONFIGS = ROOT / "configs"
PAGES = {  # page -> what it shows: comparisons (TOML files), published tables (names), what scripts print
    "foundation": (
        "configs/foundation/fashion-mnist.toml",
        "configs/foundation/heart-disease.toml",
        "configs/foundation/qmnist.toml",
    ),
    "learn2pfed": (
        *(f"learn2pfed/table{name}" for name in ("1", "1-sorted", "1-mlp", "2", "3", "3-unit", "4", "4-100", "5", "6")),
        "learn2pfed/figure7",
        "benchmarks/learn2pfed_degrees.py",
    ),
    "duw": (
        "duw/figure3",
        "benchmarks/duw_claims.py",
        "benchmarks/duw_rule.py",
        "duw/table3",
        "duw/table3-rounds",
        "duw/figure2",
        "benchmarks/duw_cost.py",
    ),
    "fedselect": tuple(f"fedselect/{name}" for name in ("table1", "table1-others", "table2", "table3", "figure4")),
    "fedeq": tuple(
        f"fedeq/{name}"
        for name in (
            *("table1", "table2", "table1-shakespeare"),
            *("figure2", "figure3", "figure4", "figure4-equal", "figure5", "figure6"),
        )
    ),
    "federation": ("benchmarks/federation.py --table", "benchmarks/secure_sum.py"),
    "fit": (
        "benchmarks/fit.py --out runs/fit.json",
        "motley/school",
        "benchmarks/auto.py",
        "benchmarks/fit_growth.py --out runs/growth.json",
    ),
    "cifar100": ("configs/cifar100/superclass.toml", "configs/cifar100/dirichlet.toml"),
    "leaderboard": (
        "benchmarks/leaderboard.py --json docs/results/leaderboard.json",
        "benchmarks/leaderboard.py --model cnn --json docs/results/leaderboard-cnn.json",
    ),
    "adapters": ("benchmarks/adapters.py",),
    "eyes": ("eyes", "benchmarks/eyes.py"),
    "baselines": ("configs/baselines/fashion-mnist.toml", "configs/baselines/mnist.toml"),
}
SEVERAL = {  # pages of more than one algorithm
    "duw": ("DUW-FedAvg", "DUW-FedNova"),
    "fedavg-ft": ("FedAvg+FT", "FedProx+FT"),
    "learn2pfed": ("Learn2pFed-Net",),
}
FIGURES = ("<!-- figures -->", "<!-- /figures -->")  # in an algorithm's page, around what is written by this script
MADE = "made.json"  # in a folder of runs: commit and digest of each, from before it began
Key = tuple[str, str]  # row and column


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="PAGE")
    parser.add_argument("--pages", action="store_true", help="only write the pages")
    parser.add_argument("--check", action="store_true", help="rerun the miniatures and mark the rows that changed")
    parser.add_argument("--digest", action="store_true", help="take the miniatures of rows that have none")
    parser.add_argument("--part", help='one table, such as "duw/figure3 --scale paper"')
    parser.add_argument("--rows", default="", help="only these rows of it")
    parser.add_argument("--column", action="append", default=[], help="only this column of it; repeatable")
    parser.add_argument("--seeds", type=int, default=0, help="runs per cell; 0: as in the table")
    parser.add_argument("--out", type=Path, help="folder of its runs")
    parser.add_argument("--commit", default="", help="of runs that were begun without this script")
    asked = parser.parse_args()
    if asked.check:
        return min(check(asked.names or records.pages(), data_root()), 1)
    for name in asked.names or PAGES:
        parts = records.read(name)
        if asked.digest:
            take_digests(parts)
        elif asked.part:
            merge(parts, table(asked.part, asked.rows, asked.column, asked.seeds, asked.out, asked.commit))
        elif not asked.pages:
            for part in PAGES[name]:
                merge(parts, collected(part))
        if not asked.pages:
            records.write(name, parts)
        write_page(name, parts)
    if not (asked.pages or asked.part or asked.digest):
        if "baselines" in (asked.names or PAGES):
            write_figures()
        if "leaderboard" in (asked.names or PAGES):
            write_ranks()
    return 0


def data_root() -> Path | None:
    """Where the real data is."""
    return Path(os.environ["FEDTAILOR_DATA"]) if "FEDTAILOR_DATA" in os.environ else None


def write_page(name: str, parts: Sequence[RecordedPart]) -> None:
    """A page from its introduction and its record."""
    intro = (RESULTS / f"{name}.intro.md").read_text(encoding="utf-8")
    (RESULTS / f"{name}.md").write_text(records.page_text(intro, parts), encoding="utf-8")
    print(f"wrote docs/results/{name}.md")


def merge(parts: list[RecordedPart], new: RecordedPart) -> None:
    """Put a part in; of a table that is there already, only the rows that were made."""
    for old in parts:
        if (old.name, old.scale) == (new.name, new.scale):
            rows = {row.name: row for row in (*old.rows, *new.rows)}
            parts[parts.index(old)] = new
            new.rows = list(rows.values())
            return
    parts.append(new)


def collected(part: str) -> RecordedPart:
    """One part of a page, after running what is missing."""
    path = Path(part.split()[0])
    return script(part) if path.suffix == ".py" else comparison(part) if path.suffix == ".toml" else table(part)


def script(command: str) -> RecordedPart:
    """What a script prints."""
    path = command.split()[0]
    printed = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    title = (ROOT / path).read_text(encoding="utf-8").partition("\n")[0].strip('"')
    text = printed if printed.startswith("|") or "\n|" in printed else f"```\n{printed}```\n"
    command = f"python {command}"
    return RecordedPart(path, title, command, text=text, made=records.here(command))


def comparison(config: str) -> RecordedPart:
    """A comparison, run to its end."""
    checked: CompareConfig = parse(read_toml(ROOT / config), CompareConfig, config)
    folder = ROOT / "runs" / checked.compare.name
    note(folder, compare.cells(checked, folder))
    subprocess.run([sys.executable, "-m", "fedtailor", "compare", config], cwd=ROOT, check=True)
    grid = compare.cells(checked, folder)
    found, command = compare.rows(grid), f"fedtailor compare {config}"
    part = RecordedPart(config, checked.data.source, command, columns=tuple(result_tables.header(found)))
    for row in found:
        cells = [cell for cell in grid if cell.label == row.label]
        shown = dict(zip(part.columns[1:], result_tables.cells_of(row)[1:], strict=True))
        part.rows.append(recorded(row.label, shown, folder, {"": cells}, command))
    return part


def table(
    name: str,
    rows: str = "",
    only: Sequence[str] = (),
    seeds: int = 0,
    out: Path | None = None,
    commit: str = "",
) -> RecordedPart:
    """A published table, or some of its rows and columns, run to the end."""
    name, _, scale = name.partition(" --scale ")
    published, of = reproduce.load(CONFIGS, name), scale_of(scale)
    folder = out or ROOT / "runs" / f"{name.replace('/', '-')}-{of}"
    which = (published, folder, of, seeds or published.seeds, reproduce.rows_named(published, rows))
    settings = reproduce.searched(*which, data_root(), _quiet)
    cells = {key: group for key, group in reproduce.grid(*which, settings).items() if not only or key[1] in only}
    note(folder, [cell for group in cells.values() for cell in group], commit)
    figures = reproduce.run(published, cells, data_root(), _quiet)
    command = f"fedtailor reproduce {name}" + (" --scale paper" if of == "paper" else "")
    columns = ("", *(column.name for column in published.columns))
    is_searched = reproduce.search_section(published, of) is not None
    notes = tuple(search.notes(folder)) if is_searched else ()
    title = published.title + (", at the paper's size" if of == "paper" else "")
    part = RecordedPart(name, title, command, of, columns, notes=notes)
    for row in dict.fromkeys(row for row, _ in cells):
        shown = {f.column: reproduce.text(f) for f in figures if f.row == row}
        groups = {column: group for (title, column), group in cells.items() if title == row}
        made = recorded(row, shown, folder, groups, command)
        if is_searched:
            made.settings = {c: settings[f"{row} {c}"] for c in groups if settings.get(f"{row} {c}")}
        part.rows.append(made)
    return part


def _quiet(cell: str, round: int, rounds: int) -> None:
    if round == rounds:
        print(f"{cell}: done", file=sys.stderr, flush=True)


def note(folder: Path, cells: Sequence[Cell], commit: str = "") -> None:
    """Keep commit and digest of runs that have not begun; of others the commit that is given, or none."""
    noted, now = noted_in(folder), records.commit()
    new = [cell for cell in cells if cell.folder.name not in noted]
    found = miniature.digests({cell.label: without_theta(cell.config) for cell in reversed(new)}, data_root())
    for cell in new:
        known = commit if (cell.folder / FINISHED).exists() else now
        noted[cell.folder.name] = {"commit": known, "digest": found[cell.label], "digest_commit": now}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MADE).write_text(json.dumps(noted, indent=1), encoding="utf-8")


def noted_in(folder: Path) -> dict[str, Any]:
    """What is kept of the runs in a folder, by the name of the run's."""
    path = folder / MADE
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def without_theta(config: RunConfig) -> RunConfig:
    """Of runs whose weights were learned before, what learns them."""
    if "theta" not in config.algorithm.options:
        return config
    options = {k: v for k, v in config.algorithm.options.items() if k not in ("theta", "outer_iterations")}
    section = type(config.algorithm).model_validate({"name": config.algorithm.name} | options)
    return config.model_copy(update={"algorithm": section})


def recorded(
    name: str, shown: dict[str, str], folder: Path, groups: Mapping[str, Sequence[Cell]], command: str
) -> RecordedRow:
    """A row with what is known of its runs, which are grouped by column."""
    cells, noted = [cell for group in groups.values() for cell in group], noted_in(folder)

    def joined(values: Sequence[str]) -> str:
        return ", ".join(dict.fromkeys(value for value in values if value))

    versions = [RunFolder(cell.folder).about["versions"]["fedtailor"] for cell in cells if cell.folder.exists()]
    entries = [noted[cell.folder.name] for cell in cells]
    seeds = tuple(dict.fromkeys(cell.seed for cell in cells))
    made = Provenance(joined(versions), joined([entry["commit"] for entry in entries]), seeds, command)
    digests = {column: noted[group[0].folder.name]["digest"] for column, group in groups.items()}
    row = RecordedRow(name, shown, made, digests={c: tuple(d) for c, d in digests.items() if d is not None})
    row.digest_commit = joined([entry["digest_commit"] for entry in entries])
    return row


def configurations(part: RecordedPart) -> dict[Key, RunConfig]:
    """What the rows of a part would run today, by row and column; of a comparison the column is ""."""
    if part.name.endswith(".toml"):
        checked: CompareConfig = parse(read_toml(ROOT / part.name), CompareConfig, part.name)
        return {(cell.label, ""): cell.config for cell in reversed(compare.cells(checked, ROOT))}
    published = reproduce.load(CONFIGS, part.name)
    here = {row.name for row in published.rows} & {row.name for row in part.rows}
    found = {f"{row.name} {column}": each for row in part.rows for column, each in row.settings.items()}
    cells = reproduce.grid(published, ROOT, scale_of(part.scale), 1, sorted(here), found) if here else {}
    return {key: group[0].config for key, group in cells.items()}


def scale_of(name: str) -> reproduce.Scale:
    return "paper" if name == "paper" else "cpu"


def check(names: Sequence[str], root: Path | None) -> int:
    """Rerun the miniatures, mark and list the rows whose numbers have changed; how many are not marked as before."""
    begun, parts = time.perf_counter(), {name: records.read(name) for name in names}
    rows = [(name, part, row) for name, each in parts.items() for part in each for row in part.rows if row.digests]
    today = {id(part): attempted(part) for _, part, _ in rows}
    wanted = {
        (i, column): today[id(part)][row.name, column]
        for i, (_, part, row) in enumerate(rows)
        for column in row.digests
        if (row.name, column) in today[id(part)]
    }
    found = miniature.digests(wanted, root)
    news, marked, unknown = 0, 0, 0
    for i, (name, part, row) in enumerate(rows):
        now = {column: found.get((i, column), "gone") for column in row.digests}
        changed = tuple(c for c, one in now.items() if one is not None and not miniature.agree(row.digests[c], one))
        news, marked = news + (changed != row.changed), marked + bool(changed)
        unknown += None in now.values()
        row.changed = changed
        if changed:
            print(f"{name}: {part.command}: {row.name}" + (f": {', '.join(changed)}" if any(changed) else ""))
    for name, each in parts.items():
        records.write(name, each)
        write_page(name, each)
    rest = f"; {unknown} rows without their data" if unknown else ""
    took = f"{len(wanted)} miniatures, {time.perf_counter() - begun:.0f} s"
    print(f"{marked} of {len(rows)} rows changed, {news} not marked as before{rest}; {took}")
    return news


def take_digests(parts: Sequence[RecordedPart]) -> None:
    """The miniatures of rows whose runs had none, at the commit of today."""
    wanted: dict[tuple[int, str, str], RunConfig] = {}
    for i, part in enumerate(parts):
        rows = {row.name for row in part.rows if not row.digests}
        new = {key: config for key, config in configurations(part).items() if key[0] in rows} if rows else {}
        first: dict[tuple[str, str], str] = {}
        for (row, column), config in new.items():
            first.setdefault((row, config.model_dump_json()), column)
        wanted |= {(i, row, column): new[row, column] for (row, _), column in first.items()}
    found, now = miniature.digests(wanted, data_root()), records.commit()
    for (i, name, column), digest in found.items():
        if digest is not None:
            recorded_row = parts[i].row(name)
            recorded_row.digests[column], recorded_row.digest_commit = digest, now


def attempted(part: RecordedPart) -> dict[Key, RunConfig]:
    """The configurations of a part; none if its file is gone, or is another."""
    try:
        return configurations(part)
    except ConfigError:
        return {}


def write_figures() -> None:
    """Every algorithm's page gets its rows of the comparison of all algorithms."""
    every = {part.title: {row.name: row.cells for row in part.rows} for part in records.read("baselines")}
    tables = {data: {title: cells["test accuracy %"] for title, cells in rows.items()} for data, rows in every.items()}
    for page in sorted((ROOT / "docs" / "algorithms").glob("*.md")):
        before, begin, rest = page.read_text(encoding="utf-8").partition(FIGURES[0])
        titles = SEVERAL.get(page.stem, ()) or tuple(t for t in next(iter(tables.values())) if t.lower() == page.stem)
        lines = [
            f"| {title} | {source} | " + " | ".join(rows[t] for t in (title, "Local", "FedAvg")) + " |"
            for title in titles
            for source, rows in tables.items()
            if title in rows
        ]
        head = [
            "Test accuracy in %, 20 clients, Dirichlet 0.1, two seeds, as in "
            "[all algorithms](../results/baselines.md):",
            "",
            "| algorithm | data | accuracy | Local | FedAvg |",
            "|---|---|---:|---:|---:|",
        ]
        block = "\n".join([*head, *lines] if lines else ["See the [results](../index.md#results)."])
        after = rest.partition(FIGURES[1])[2]
        page.write_text(f"{before}{begin}\n{block}\n{FIGURES[1]}{after}", encoding="utf-8")


def write_ranks() -> None:
    """The page of an algorithm that is not in the comparison of all algorithms gets its rows of the leaderboard."""
    board = json.loads((RESULTS / "leaderboard.json").read_text(encoding="utf-8"))
    titles = {kind.title.lower(): kind.title for kind in algorithms.algorithms().values()}
    for page in sorted((ROOT / "docs" / "algorithms").glob("*.md")):
        before, begin, rest = page.read_text(encoding="utf-8").partition(FIGURES[0])
        old, end, after = rest.partition(FIGURES[1])
        block = ranked(titles.get(page.stem, ""), board)
        if block and "results/baselines.md" not in old:
            page.write_text(f"{before}{begin}\n{block}\n{end}{after}", encoding="utf-8")


def ranked(title: str, board: dict[str, list[dict[str, Any]]]) -> str:
    """An algorithm's accuracy and rank by column of the leaderboard, both in the round that validation selects."""
    lines = []
    for column, rows in board.items():
        at = {row["title"]: row["figures"][2] for row in rows}
        if title in at:
            rank = 1 + sum(value > at[title] for value in at.values())
            three = " | ".join(f"{at[t]:.2f}" if t in at else "" for t in (title, "Local", "FedAvg"))
            lines.append(f"| {column} | {three} | {rank} of {len(at)} |")
    head = [
        "Test accuracy in %, Fashion-MNIST, 20 clients, one seed, 15 rounds: see the",
        "[leaderboard](../results/leaderboard.md).",
        "",
        "| clients | its own | Local | FedAvg | rank |",
        "|---|---:|---:|---:|---:|",
    ]
    return "\n".join([*head, *lines]) if lines else ""


if __name__ == "__main__":
    sys.exit(main())
