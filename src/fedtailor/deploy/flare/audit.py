"""The site's record of every message: one JSON line each, written before the reply leaves."""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedtailor.core import codec
from fedtailor.core.trees import items
from fedtailor.errors import RunError


class Audit:
    """Appends to the site's own file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write(self, request: bytes, reply: bytes, places: int = 0, **about: Any) -> None:
        """A message that was answered: what it asked for, and what left; one that cannot be read by its length."""
        answer, out = codec.decode(reply, sys.maxsize)  # this site wrote it
        try:
            header, tree = codec.decode(request, places)
            what = header.get("op")
        except codec.BrokenMessage:
            about |= {k: answer[k] for k in ("refused", "error") if k in answer}
            self.line(about | {"asked": "nothing that can be read", "came": {"bytes": len(request)}})
            return
        what = what or header.get("function") or ("secure sum" if "sum" in header else "gradients")
        line = about | {"asked": what, "round": header.get("round")} | {k: header[k] for k in ("step",) if k in header}
        line["came"] = {"bytes": len(request), "keys": _shapes(tree)}
        line["left"] = {"bytes": len(reply), "keys": _shapes(out)}
        line |= {k: answer[k] for k in ("refused", "error") if k in answer}
        self.line(line)

    def line(self, content: dict[str, Any]) -> None:
        """Any line, with the time."""
        stamped = {"time": datetime.now(UTC).isoformat(timespec="milliseconds")} | content
        with self.path.open("ab") as file:
            file.write(json.dumps(stamped).encode() + b"\n")


def _shapes(tree: Any) -> dict[str, list[int]]:
    return {path or "number": list(leaf.shape) for path, leaf in items(tree)}


def told(path: Path) -> list[str]:
    """The record for people: for each run what was asked for how often, what left, and what was refused."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        raise RunError(f"{path}: no record yet; it begins with the first message") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from None
    runs: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        runs.setdefault(line.get("run") or "before any run", []).append(line)
    return [text for run, its in runs.items() for text in _of_run(run, its)]


def _of_run(run: str, lines: list[dict[str, Any]]) -> list[str]:
    rounds = {line["round"] for line in lines if line.get("round") is not None}
    text = [f"{run}: {lines[0]['time'][:16]} to {lines[-1]['time'][:16]}, {len(lines)} messages, {len(rounds)} rounds"]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if "refused" not in line and "left" in line:
            kinds.setdefault(" ".join(filter(None, (line["asked"], line.get("step")))), []).append(line)
    for kind, its in kinds.items():
        sent = sum(line["left"]["bytes"] for line in its)
        keys = ", ".join(f"{key} {shape}" for key, shape in its[-1]["left"]["keys"].items()) or "nothing but its end"
        text.append(f"  {kind}: {len(its)} times, {sent:,} bytes left; at last {keys}")
    for why, times in Counter(line["refused"] for line in lines if "refused" in line).most_common():
        text.append(f"  refused {times} times: {why}")
    return text
