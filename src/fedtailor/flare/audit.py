"""A site's audit log: one JSON line for every request, written before the reply leaves; and what it says, in words."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedtailor.core import codec
from fedtailor.core.trees import items
from fedtailor.errors import RunError
from fedtailor.experiments.store import read_rounds, round_line
from fedtailor.flare.policy import account_text

SIZE = "audit.size"  # beside the log: its length, so that missing lines are noticed
CONTROLS = ("hello", "start", "restore", "begin", "keep", "finish", "evaluate")


class AuditLog:
    """Appends to the site's own file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write_message(self, request: bytes, reply: bytes, places: int = 0, because: str = "", **about: Any) -> None:
        """Log a request and its reply: what was asked for, which keys and how many bytes came and left.

        `because` is why a request was refused, where the reply does not say it.
        """
        answer, out = codec.decode(reply, sys.maxsize)  # this site wrote it
        if because and "refused" in answer:
            answer["refused"] = because
        try:
            header, tree = codec.decode(request, places)
            op = header.get("op")
        except codec.BrokenMessage:
            about |= {k: answer[k] for k in ("refused", "error") if k in answer}
            self.write_line(about | {"asked": "nothing that can be read", "came": {"bytes": len(request)}})
            return
        op = op or header.get("function") or ("secure sum" if "sum" in header else "gradients")
        line = about | {"asked": op, "round": header.get("round")} | {k: header[k] for k in ("step",) if k in header}
        line["came"] = {"bytes": len(request), "keys": _shapes(tree)}
        line["left"] = {"bytes": len(reply), "keys": _shapes(out)}
        line |= {k: answer[k] for k in ("refused", "error") if k in answer}
        self.write_line(line)

    def write_line(self, content: dict[str, Any]) -> None:
        stamped = {"time": datetime.now(UTC).isoformat(timespec="milliseconds")} | content
        with self.path.open("ab") as file:
            file.write(round_line(stamped))
            size = file.tell()
        self.path.with_name(SIZE).write_text(str(size))


def _shapes(tree: Any) -> dict[str, list[int]]:
    return {path or "number": list(leaf.shape) for path, leaf in items(tree)}


@dataclass(frozen=True)
class MessageKind:
    """The answered requests of one kind in a run."""

    name: str
    times: int
    came: int  # bytes
    left: int
    keys: dict[str, list[int]]  # shapes in the last reply

    @property
    def shapes(self) -> str:
        return ", ".join(f"{key} {shape}" for key, shape in self.keys.items()) or "no tensors"


@dataclass(frozen=True)
class RunRecord:
    run: str
    first: str  # time
    last: str
    messages: int
    rounds: int
    kinds: list[MessageKind]
    refused: list[tuple[str, int]]  # why, how often
    limited: list[tuple[str, int]]  # replies that left within the bounds of the run, and not as they were

    @property
    def left(self) -> int:
        """Bytes that left."""
        return sum(kind.left for kind in self.kinds)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines of an audit log; a `RunError` if one was changed or removed."""
    try:
        size = int(path.with_name(SIZE).read_text()) if path.with_name(SIZE).exists() else 0
    except (OSError, ValueError):
        raise RunError(f"{path.with_name(SIZE)}: damaged; it holds the length of {path.name}") from None
    content = path.read_bytes() if path.exists() else b""
    if size > len(content):
        raise RunError(f"{path}: shorter than it was: lines were removed")
    if size > 0 and content[size - 1 : size] != b"\n":
        raise RunError(f"{path}: changed since it was written: a line has no end")
    return read_rounds(path, are_checked=True)


def read_runs(path: Path) -> list[RunRecord]:
    if not (lines := read_lines(path)):
        raise RunError(f"{path}: no audit log yet; it begins with the first request")
    runs: dict[str, list[dict[str, Any]]] = {}
    try:
        for line in lines:
            runs.setdefault(line.get("run") or "before any run", []).append(line)
        return [_summarize_run(run, its) for run, its in runs.items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: has a line that is not from a site ({type(error).__name__})") from None


def _summarize_run(run: str, lines: list[dict[str, Any]]) -> RunRecord:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if "refused" not in line and "left" in line:
            kinds.setdefault(" ".join(filter(None, (line["asked"], line.get("step")))), []).append(line)
    summaries = []
    for name, messages in kinds.items():
        received, sent = (sum(line[way]["bytes"] for line in messages) for way in ("came", "left"))
        summaries.append(MessageKind(name, len(messages), received, sent, messages[-1]["left"]["keys"]))
    rounds = {line["round"] for line in lines if line.get("round") is not None}
    refused = Counter(line["refused"] for line in lines if "refused" in line).most_common()
    limited = Counter(line["limited"] for line in lines if "limited" in line).most_common()
    return RunRecord(run, lines[0]["time"], lines[-1]["time"], len(lines), len(rounds), summaries, refused, limited)


def inferences(record: RunRecord) -> list[str]:
    """What could be concluded from what left, in words; see docs/explanation/privacy.md."""
    words = []
    names = {kind.name for kind in record.kinds}
    calls = [kind for kind in record.kinds if kind.name not in CONTROLS and not kind.name.startswith("secure sum")]
    is_sealed = any(name.startswith("secure sum") for name in names)
    if any(name in ("hello", "start") for name in names):
        words.append("the number of training rows, and the names of features and classes")
    if any(kind.keys for kind in calls if kind.name != "gradients"):
        times = sum(kind.times for kind in calls)
        replies = f"{times} single {'reply' if times == 1 else 'replies'}"
        words.append(
            f"{replies}: which classes the data has, whether a known row was used, and with few rows per step "
            "some of the rows themselves"
        )
    if is_sealed:
        words.append("sums with the partners of this site: of its own reply only what the sum over all of them reveals")
    if "gradients" in names:
        words.append("gradients with respect to the messages, from which moments of the features follow")
    count = sum(kind.times for kind in record.kinds if kind.name == "evaluate")
    metrics = f"{count} set{'' if count == 1 else 's'} of metrics: how well models predict validation and test rows"
    return [*words, *([metrics] if count else [])]


def times_in_words(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def audit_lines(path: Path) -> list[str]:
    """The audit log in words: per run the requests, what left, what could be concluded, what was refused."""
    spent = account_text(path.parent)
    text = [f"privacy budget: {spent}"] if spent else []
    for record in read_runs(path):
        times = f"{record.first[:16]} to {record.last[:16]}"
        counts = f"{record.messages} messages, {record.rounds} rounds, {record.left:,} bytes left"
        text.append(f"{record.run}: {times}, {counts}")
        text += [
            f"  {kind.name}: {times_in_words(kind.times)}, {kind.left:,} bytes left; last: {kind.shapes}"
            for kind in record.kinds
        ]
        text += [f"  could be inferred: {conclusion}" for conclusion in inferences(record)]
        text += [f"  refused {times_in_words(times)}: {why}" for why, times in record.refused]
        text += [f"  limited {times_in_words(times)}: {why}" for why, times in record.limited]
    return text
