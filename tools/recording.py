"""A terminal recording as a moving SVG: python tools/recording.py docs/images/demo.svg -- fedtailor demo

The command is run, its lines are shown in the order and at the pace in which they came; waits are shortened.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

WIDTH, ROWS, LINE, CHARACTER, MARGIN = 80, 25, 19, 8.4, 18  # a terminal of 80 x 25; it scrolls
LONGEST_WAIT, TYPING, REST = 0.5, 0.05, 6.0  # seconds: between lines, per character, before it begins again
STYLE = """
  text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d7dae0; white-space: pre; }
  .prompt { fill: #7ec699; }
  .head { fill: #ffffff; font-weight: bold; }
  .path { fill: #8ab4f8; }
"""


def recorded(command: list[str]) -> list[tuple[float, str]]:
    """Lines that a command prints, each with the seconds since the one before."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"COLUMNS": str(WIDTH), "PYTHONUNBUFFERED": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        if "PYTHONPATH" in os.environ:
            environment["PYTHONPATH"] = str(Path(os.environ["PYTHONPATH"]).resolve())
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        lines, last = [], time.monotonic()
        for line in process.stdout:
            now = time.monotonic()
            lines.append((now - last, line.rstrip()))
            last = now
        if process.wait():
            sys.exit(f"{' '.join(command)} failed")
    return lines


def svg(commands: list[str], lines: list[tuple[float, str]]) -> str:
    """One picture: a line appears when its time has come."""
    shown: list[tuple[float, str, str]] = []
    at = 0.4
    for command in commands:
        at += TYPING * len(command)
        shown.append((at, "prompt", f"$ {command}"))
        at += 0.4
    for wait, text in lines:
        at += min(wait, LONGEST_WAIT)
        shown.append((at, _kind(text), text))
    whole = at + REST
    height = 2 * MARGIN + LINE * min(len(shown), ROWS)
    width = 2 * MARGIN + CHARACTER * WIDTH
    rules, texts, scrolled = [], [], ["0% { transform: translateY(0) }"]
    for number, (start, kind, text) in enumerate(shown):
        share = 100 * start / whole
        frames = f"0%, {share:.2f}% {{ opacity: 0 }} {share + 0.01:.2f}%, 100% {{ opacity: 1 }}"
        rules.append(f"  @keyframes a{number} {{ {frames} }}")
        rules.append(f"  #l{number} {{ animation: a{number} {whole:.1f}s infinite }}")
        if number >= ROWS:
            scrolled.append(f"{share:.2f}% {{ transform: translateY(-{LINE * (number + 1 - ROWS)}px) }}")
        y = LINE * (number + 0.75)
        texts.append(f'<text id="l{number}" class="{kind}" x="{MARGIN}" y="{y:.0f}">{escape(text)}</text>')
    box = f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}"'
    end = f"transform: translateY(-{LINE * max(0, len(shown) - ROWS)}px)"
    rules.append(f"  @keyframes scroll {{ {' '.join(scrolled)} }}")
    rules.append(f"  #all {{ {end}; animation: scroll {whole:.1f}s step-end infinite }}")
    still = "  @media (prefers-reduced-motion: reduce) { text, #all { animation: none !important } }"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">',
            f"<title>{escape(' and '.join(commands))}</title>",
            f"<style>{STYLE}{chr(10).join(rules)}\n{still}\n</style>",
            f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#1b1e26"/>',
            f'<svg y="{MARGIN}" width="{width:.0f}" height="{height - 2 * MARGIN}"><g id="all">',
            *texts,
            "</g></svg>",
            "</svg>\n",
        ]
    )


def _kind(text: str) -> str:
    if text.lstrip().startswith(("algorithm", "test")) or "seeds [" in text:
        return "head"
    return "path" if text.startswith(("runs and table", "report", "models")) else "line"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("command", nargs="+")
    parser.add_argument("--before", action="append", default=[], help="a line that is only shown")
    given = parser.parse_args()
    lines = recorded(given.command)
    given.file.write_text(svg([*given.before, " ".join(given.command)], lines), encoding="utf-8")


if __name__ == "__main__":
    main()
