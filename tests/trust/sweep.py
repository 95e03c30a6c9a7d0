"""Every byte of every file of a folder changed, cut off and taken away, and what each reader of the file then says."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor.errors import UserError
from fedtailor.flare.audit import SIZE
from tests.trust.commands import COMMANDS, Reader

OUTSIDE = {  # nothing of fedtailor reads them again
    "report.html": "a page for people",
    ".lock": "says who works on the run; the lock is the system's",
    "weights.csv": "for other programs",
}
INPUT = ("site.toml", "rows.safetensors")  # nobody but their owner knows what is right
SMALL = 16_384  # bytes: of larger files places are drawn

_seen: set[str] | None = None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _seen is not None and isinstance(args[0], str | Path):
        _seen.add(str(Path(args[0]).resolve()))


def opened_by(use: Callable[[], Any]) -> set[str]:
    """Files that are opened meanwhile."""
    global _seen
    if not hasattr(sys, "_fedtailor_hook"):
        sys.addaudithook(_hook)
        sys._fedtailor_hook = True  # type: ignore[attr-defined]
    _seen = set()
    try:
        use()
        return _seen
    finally:
        _seen = None


def places(length: int, most: int) -> list[int]:
    """All, or evenly spread ones with both ends."""
    return list(range(length)) if length <= most else sorted({i * length // most for i in range(most)} | {length - 1})


def changed(content: bytes, most: int) -> Iterator[tuple[str, bytes | None]]:
    """Another byte at these places, in turn by one bit, by another and zero, and the file cut short; and no file."""
    for i in places(len(content), most):
        value = (content[i] ^ 1, content[i] ^ 32, 0 if content[i] else 255)[i % 3]
        yield f"byte {i} is {value}", content[:i] + bytes([value]) + content[i + 1 :]
        yield f"cut at {i}", content[:i]
    yield "no file", None


def outcome(use: Reader, path: Path) -> str:
    """What a reader gives, as text; an error for people is "named". Any other error is raised."""
    try:
        return json.dumps(use(path), default=str)
    except UserError:
        return "named"


@dataclass
class Swept:
    """What became of the damages to one folder."""

    count: Counter[str]  # files, bytes, outside; tries by readers: named, same
    wrong: list[str]  # what passed in silence or broke


def sweep(
    path: Path,
    readers: dict[str, Reader],
    most: int,
    commands: int | None = None,
    told: Callable[[str], None] = lambda text: None,
) -> Swept:
    """Damage every file; each reader of it must name that, or give what it gave before.

    At most so many places of a file are damaged; commands, which are slow, try so many where functions read it too.
    """
    wanted = {name: outcome(use, path) for name, use in readers.items()}
    assert "named" not in wanted.values(), [name for name, text in wanted.items() if text == "named"]
    reads = {name: opened_by(lambda use=use: use(path)) for name, use in readers.items()}  # type: ignore[misc]
    swept = Swept(Counter(), [])
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        content, where = file.read_bytes(), str(file.resolve())
        mine = [name for name in readers if where in reads[name]]
        if not mine and file.suffix == ".safetensors":  # some are opened by the library, which Python does not see
            mine = list(readers)
        if not mine or file.name in INPUT:
            if not mine and file.name not in OUTSIDE and file.suffix not in (".tex", ".csv"):
                swept.wrong.append(f"{file.relative_to(path)}: nothing reads it")
            swept.count["outside"] += 1
            continue
        swept.count["files"] += 1
        swept.count["bytes"] += len(content)
        told(f"{file.relative_to(path)}, {len(content)} bytes: {', '.join(mine)}")
        slow = [name for name in mine if readers[name] in COMMANDS]
        quick = [name for name in mine if name not in slow]
        few = most if commands is None or not quick else commands
        for name, what, damaged in [
            *((name, *one) for one in changed(content, most) for name in quick),
            *((name, *one) for one in changed(content, few) for name in slow),
        ]:
            file.unlink(missing_ok=True) if damaged is None else file.write_bytes(damaged)
            verdict = _verdict(readers[name], path, wanted[name])
            swept.count["tries"] += 1
            swept.count[verdict if verdict in ("named", "same") else "wrong"] += 1
            if verdict not in ("named", "same") and not (damaged is None and _is_missing(file)):
                swept.wrong.append(f"{file.relative_to(path)}, {what}, {name}: {verdict}")
        file.write_bytes(content)
    return swept


def _verdict(use: Reader, path: Path, wanted: str) -> str:
    """named, same, or what it was instead."""
    try:
        text = outcome(use, path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return text if text == "named" else "same" if text == wanted else f"silent: {_difference(text, wanted)}"


def _difference(text: str, wanted: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b), min(len(text), len(wanted)))
    return f"{text[at : at + 60]!r} for {wanted[at : at + 60]!r}"


def _is_missing(file: Path) -> bool:
    """Files without which a folder is one that has not come so far, and says so."""
    return file.name in (
        "results.json", "manifest.json", "metrics.jsonl", "shares.json", "preparation.json", "newcomer.json",
        "index.json", "tables.json", "table.json", "standing.json", "spent.json", "sums.json", "sites.json",
        "client.crt", "fit.json", SIZE,
    )  # fmt: skip
