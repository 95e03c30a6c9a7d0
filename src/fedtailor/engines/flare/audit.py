"""The site's record of every message: one JSON line each, written before the reply leaves."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedtailor.core import codec
from fedtailor.core.trees import items


class Audit:
    """Appends to the site's own file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write(self, request: bytes, reply: bytes, **about: Any) -> None:
        """A message that was answered: what it asked for, and what left."""
        header, tree = codec.decode(request)
        answer, out = codec.decode(reply)
        what = header.get("op") or header.get("function") or ("secure sum" if "sum" in header else "gradients")
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
