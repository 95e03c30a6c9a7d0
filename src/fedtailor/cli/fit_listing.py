"""A fit in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from fedtailor.cli.listing import print_table, unit
from fedtailor.tables.words import sentences

FOLDED = 40  # sites of a fit that a terminal shows


def gain_of(record: dict[str, Any], row: dict[str, Any]) -> float:
    """By how much a site is better than alone, on test data; 0 where it has none."""
    gain = row["personal"] - row["alone"] if record["higher_is_better"] else row["alone"] - row["personal"]
    return 0.0 if gain != gain else float(gain)


def print_fit(console: Console, record: dict[str, Any]) -> None:
    """Every site alone, in common and personalized; what is shared, in words."""
    from fedtailor.studies.result_tables import number

    metric, task = record["metric"], f"{record['data']}: {record['task']} of {record['target'] or 'the target'}"
    print("\n".join(record["notes"]))
    print(f"task       {task}, model {record['model']}, {record['rounds']} rounds")
    rows = []
    for name, row in record["sites"].items():
        figures = [number(metric, row[k]) for k in ("alone", "common", "personal")]
        rows.append([name, str(row["train"] + row["val"] + row["test"]), *figures, row["served"]])
    if len(rows) > FOLDED:
        ordered = sorted(record["sites"], key=lambda name: gain_of(record, record["sites"][name]))
        extremes = {*ordered[: FOLDED // 2], *ordered[-FOLDED // 2 :]}
        print(f"{len(rows)} sites; those that lose and gain most are shown, all are in the report")
        rows = [row for row in rows if row[0] in extremes]
    means = [number(metric, record["means"][k]) for k in ("alone", "common", "personal")]
    columns = ("site", "rows", "alone", "in common", "personal", "served by")
    print_table(console, f"test {metric}{unit(metric)}", columns, rows, ["mean", "", *means, ""])
    if "baseline" in record["means"]:
        mean = number(metric, record["means"]["baseline"])
        print(f"baseline   {mean}: the mean of each site, or its shares of the classes, and nothing else")
    for line in sentences(record):
        print(f"{line[0]:<10} {line[1]}")
    for each in record.get("dropped", ()):
        if not each["round"]:  # not by halving
            print(f"left out   {each['label']}: {each['why']}")
    for label, words in record["shared"].items():
        print(f"shared     {label}: sends {words['sent']}; keeps {words['private']}")
    print(f"hurt       {100 * record['hurt']:.0f} % of the sites are worse off than alone, on test data")
