"""Sections of a fit of tables: how good its probabilities and numbers are, what the sites' rows are like."""

from __future__ import annotations

from typing import Any

from fedtailor.report.formatting import count
from fedtailor.report.page_model import Cell, Chart, Section, Table, Value, cells

MANY = 12  # sites, above which the table is folded
QUANTILES = ("5 %", "25 %", "median", "75 %", "95 %")


def quality(record: dict[str, Any]) -> Section:
    """Calibration and ROC, or residuals, on test rows."""
    section = Section("quality", "How good the models are")
    plots = record.get("plots", {})
    charts = [*_of_classes(plots), *_of_numbers(plots, record["target"])]
    if not charts:
        return section.without("test rows are too few for plots, or there are more than two classes")
    return Section(
        section.id, section.title, ("On test rows, by the models that serve the sites.",), charts=tuple(charts)
    )


def _of_classes(plots: dict[str, Any]) -> list[Chart]:
    if "reliability" not in plots:
        return []
    bins = plots["reliability"]
    rows: list[tuple[Value, ...]] = [("personal models", p, share, n) for p, share, n in bins]
    rows += [("perfect", 0.0, 0.0, None), ("perfect", 1.0, 1.0, None)]
    furthest = max(abs(p - share) for p, share, _ in bins)
    reliability = Chart(
        "reliability",
        "lines",
        "Calibration",
        f"Probability that was said against how often it was so, in bins; furthest apart by {furthest:.2f}.",
        ("line", "probability", "frequency", "rows"),
        rows,
        {
            "x": "probability",
            "y": "frequency",
            "series": "line",
            "xlabel": "predicted probability",
            "ylabel": "frequency",
        },
        "On the straight line, probabilities are what they say.",
    )
    curves = {name: points for name, points in plots["roc"].items() if points}
    if not curves:
        return [reliability]
    roc = Chart(
        "roc",
        "lines",
        "ROC curves",
        f"True against false positives, of all sites and the largest: {', '.join(curves)}.",
        ("site", "false positives", "true positives"),
        [(name, x, y) for name, points in curves.items() for x, y in points],
        {
            "x": "false positives",
            "y": "true positives",
            "series": "site",
            "xlabel": "false positives",
            "ylabel": "true positives",
        },
        "All sites together, and the sites with most test rows.",
    )
    return [reliability, roc]


def _of_numbers(plots: dict[str, Any], target: str) -> list[Chart]:
    residuals = plots.get("residuals")
    if not residuals:
        return []
    rows = [(name, each[2], each[0], each[1], each[3], each[4]) for name, each in residuals.items()]
    wide = max(residuals, key=lambda name: residuals[name][-1] - residuals[name][0])
    return [
        Chart(
            "residuals",
            "intervals",
            "Residuals of each site",
            f"Five quantiles of the residuals of each site; the widest are those of {wide}.",
            ("site", "median", *(QUANTILES[k] for k in (0, 1, 3, 4))),
            rows,
            {
                "x": "median",
                "low": QUANTILES[0],
                "high": QUANTILES[4],
                "inner": [QUANTILES[1], QUANTILES[3]],
                "name": "site",
                "diverging": True,
                "xlabel": f"{target}, true less predicted",
            },
            "Dot: median; thick: half of the rows; thin: 90 % of them. Right of zero the model says too little.",
        )
    ]


def card(record: dict[str, Any]) -> Section:
    """Rows, target and drift of each site."""
    section = Section("card", "The sites' data")
    if "card" not in record:
        return section.without("the fit is not one of tables")
    rows, drifting = [], 0
    for name, each in record["card"].items():
        drifting += bool(each["drift"])
        words = ", ".join(f"{feature} {apart:+.1f} sd" for feature, apart in each["drift"]) or "-"
        rows.append((Cell(name, name), Cell(f"{each['rows']:,}", each["rows"]), *cells(each["target"], words)))
    text = (
        f"{drifting} of {count(len(rows), 'site')} {'has' if drifting == 1 else 'have'} features that are far from "
        "those of all sites together: by half a standard deviation or more, and beyond chance.",
        *(note for note in record["notes"] if "missing at" in note or "NOT ALL ROWS" in note or "far from all" in note),
    )
    columns = ("site", "training rows", record["target"] or "target", "features that differ most")
    return Section(
        section.id,
        section.title,
        text,
        tables=(Table("Before training", columns, rows, sortable=True, words=True, folded=len(rows) > MANY),),
    )
