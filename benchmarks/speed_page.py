"""Writes docs/results/speed.md and its plot from what make bench and make bench-peers have measured.

python -m benchmarks.speed_page [--from runs/bench] [--to docs/results]
"""

from __future__ import annotations

import argparse
import json
import platform
from math import log10
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.speed_tasks import TASKS, title

COLOURS = ("#1f6feb", "#d1542d")
WIDTH, HEIGHT, EDGE = 560, 300, 50


def machine() -> str:
    """Where the figures come from, and the processor."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{records.note('speed', 'make bench')} Processor: {cpu}."


def speed_table(rows: list[dict[str, Any]]) -> list[str]:
    """Ours beside the limit."""
    lines = ["| workload | ours | limit | ratio | goal | limit is | engine |", "|---|---:|---:|---:|---:|---|---|"]
    for row in rows:
        unit, name = ("s", "s") if "ours_s" in row else ("gb", "GB")
        ours, limit = (f"{row[f'{side}_{unit}']:.3g} {name}" for side in ("ours", "limit"))
        goal = f"{row['goal']:.2f}" if "goal" in row else ""
        cells = [row["workload"], ours, limit, f"{row['ratio']:.2f}", goal, row["against"], row.get("engine", "")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def peers_table(rows: list[dict[str, Any]]) -> list[str]:
    """Seconds per round of other frameworks."""
    workloads = sorted({row["workload"] for row in rows})
    cells = {
        (row["peer"], row["workload"]): row["why"] if row["seconds"] is None else f"{row['seconds']:.3f}"
        for row in rows
    }
    lines = [f"- {title(k, TASKS[k])}" for k in workloads]
    lines += ["", "| seconds per round |" + "".join(f" {k} |" for k in workloads)]
    lines += ["|---|" + "---:|" * len(workloads)]
    for peer in dict.fromkeys(row["peer"] for row in rows):
        lines.append(f"| {peer} |" + "".join(f" {cells.get((peer, k), '')} |" for k in workloads))
    return lines


def plot(series: dict[str, list[tuple[float, float]]]) -> str:
    """Seconds over clients, both axes logarithmic, as SVG."""
    points = [p for line in series.values() for p in line]
    low = [min(p[i] for p in points) for i in (0, 1)]
    decades = [(int(log10(low[i]) // 1), int(-(-log10(max(p[i] for p in points)) // 1))) for i in (0, 1)]

    def place(value: float, axis: int) -> float:
        first, last = decades[axis]
        part = (log10(value) - first) / max(last - first, 1)
        return EDGE + part * (WIDTH - 2 * EDGE) if axis == 0 else HEIGHT - EDGE - part * (HEIGHT - 2 * EDGE)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    ]
    for power in range(decades[0][0], decades[0][1] + 1):
        x = place(10.0**power, 0)
        out.append(f'<path d="M{x:.1f} {EDGE}V{HEIGHT - EDGE}" stroke="#ddd"/>')
        out.append(f'<text x="{x:.1f}" y="{HEIGHT - EDGE + 16}" text-anchor="middle">{10**power:,}</text>')
    for power in range(decades[1][0], decades[1][1] + 1):
        y = place(10.0**power, 1)
        out.append(f'<path d="M{EDGE} {y:.1f}H{WIDTH - EDGE}" stroke="#ddd"/>')
        out.append(f'<text x="{EDGE - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>')
    for i, (name, line) in enumerate(series.items()):
        path = " ".join(f"{place(x, 0):.1f},{place(y, 1):.1f}" for x, y in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[i]}" stroke-width="2"/>')
        out.append(f'<text x="{EDGE + 10}" y="{20 + 16 * i}" fill="{COLOURS[i]}">{name}</text>')
    out.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">clients</text></svg>')
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--from", dest="source", type=Path, default=Path("runs/bench"))
    parser.add_argument("--to", type=Path, default=Path("docs/results"))
    asked = parser.parse_args()
    asked.to.mkdir(parents=True, exist_ok=True)
    rows = json.loads((asked.source / "speed.json").read_text(encoding="utf-8"))
    intro = (Path(__file__).parent.parent / "docs/results/speed.intro.md").read_text(encoding="utf-8")
    parts = [intro, machine(), "", "## Against the limit", "", "`make bench`", "", *speed_table(rows)]
    grown = {
        name: [(row["clients"], row["ours_s"]) for row in rows if "clients" in row and row["workload"].startswith(k)]
        for k, name in (("E", "a round of 100 clients, of all that there are"), ("D", "an epoch of Learn2pFed"))
    }
    if any(grown.values()):
        (asked.to / "speed-growth.svg").write_text(plot({k: v for k, v in grown.items() if v}), encoding="utf-8")
        parts += ["", "![Seconds over the number of clients](speed-growth.svg)"]
    if (peers := asked.source / "peers.json").exists():
        parts += ["", "## Other frameworks", "", "`make bench-peers`", ""]
        parts += peers_table(json.loads(peers.read_text(encoding="utf-8")))
    if (profile := asked.source / "profile.md").exists():
        parts += ["", "## Where the time goes", "", "`python -m benchmarks.profile_rounds`", ""]
        parts.append(profile.read_text(encoding="utf-8").rstrip())
    (asked.to / "speed.md").write_text("\n".join(parts) + "\n", encoding="utf-8")
    print(f"wrote {asked.to / 'speed.md'}")


if __name__ == "__main__":
    main()
