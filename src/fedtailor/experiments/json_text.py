"""JSON with one blank for each level, as `json.dumps(value, indent=1)` writes it.

The library's own writer leaves a cycle of closures behind with every call; a site that writes several files in each
round keeps them until the next full collection, which is rare in a process that has torch loaded.
"""

from __future__ import annotations

import json
from typing import Any


def indented(value: Any, level: int = 0) -> str:
    """The same text as `json.dumps(value, indent=1)`."""
    inner, outer = "\n" + " " * (level + 1), "\n" + " " * level
    if isinstance(value, dict) and value:
        pairs = [f"{_key(key)}: {indented(held, level + 1)}" for key, held in value.items()]
        return "{" + inner + ("," + inner).join(pairs) + outer + "}"
    if isinstance(value, list | tuple) and value:
        return "[" + inner + ("," + inner).join(indented(held, level + 1) for held in value) + outer + "]"
    return json.dumps(value)


def _key(key: Any) -> str:
    """Names are text; numbers, true, false and null are put in quotes."""
    if not isinstance(key, str):
        key = next(iter(json.loads(json.dumps({key: None}))))
    return json.dumps(key)
