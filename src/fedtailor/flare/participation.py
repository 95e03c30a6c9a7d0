"""Which sites take part in a run, round by round, and why others do not: a file of the run that its operators read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor.core import border
from fedtailor.experiments.store import read_json, write_json

SITES = "sites.json"  # in the folder of a run
CONDITION = ("version", "torch", "now", "free", "certificate_ends")  # what a site reports of itself
WRITE_EVERY = 5.0  # seconds between two writes of SITES
TOOK_PART = "took part"
PAUSED, LEFT, WAITING, REFUSED = "paused", "left", "waiting", "refused"  # what a site says of itself
SILENT, LATE, EXPELLED = "silent", "late", "revoked"
REJECTED, ABANDONED, NOT_ASKED = "rejected", "abandoned", "not asked"
SAID = (PAUSED, LEFT, WAITING)  # by a site, in a refusal
PRESENT = (TOOK_PART, LATE, NOT_ASKED)  # states in which a site has not missed a round
LONGEST = 200  # characters of a reason

SiteRecord = dict[str, Any]


@dataclass(frozen=True)
class Attended:
    """What a site did in a round, and why if it took no part."""

    state: str
    why: str = ""


class Participation:
    """What is known of each site of a run: its condition, when it answered last, and what it did in each round."""

    def __init__(self, path: Path, named: Iterable[str] = ()) -> None:
        self.path = path
        self.sites: dict[str, SiteRecord] = {site: dict(its) for site, its in read_sites(path).items()}
        for site in named:
            self.sites.setdefault(site, {})
        self._written = 0.0

    def note_hello(self, greetings: Mapping[str, dict[str, Any]]) -> None:
        """Record what sites report of themselves as a job begins; unknown keys are dropped."""
        now = time.time()
        for site, about in greetings.items():
            condition = about.pop("condition", None)
            known = condition if isinstance(condition, dict) else {}
            known = {k: v for k in CONDITION if isinstance(v := known.get(k), str | int | float)}
            known = {k: border.plain_text(v) if isinstance(v, str) else v for k, v in known.items() if _is_usual(v)}
            before = {k: v for k, v in self.sites.get(site, {}).items() if k not in (*CONDITION, "away")}
            self.sites[site] = before | known | {"asked": now, "seen": now}

    def torch_versions(self) -> dict[str, str]:
        return {site: its["torch"] for site, its in self.sites.items() if isinstance(its.get("torch"), str)}

    def note_seen(self, away: Mapping[str, str]) -> None:
        """Record which sites answer as a round begins, and why others do not (`away`: site -> why, or nothing)."""
        now = time.time()
        for site, why in away.items():
            about = self.sites.setdefault(site, {})
            about["away"] = why[:LONGEST]
            if not why:
                about["seen"] = now
        self._write_now_and_then()

    def note_round(self, round: int, attended: Mapping[str, Attended]) -> None:
        """Record what each site did in a round; what was recorded of this and later rounds is forgotten."""
        for site, its in attended.items():
            about = self.sites.setdefault(site, {})
            history = [entry for entry in about.get("history", []) if entry[0] < round]
            if not history or history[-1][1:3] != [its.state, its.why[:LONGEST]]:
                history.append([round, its.state, its.why[:LONGEST], time.time()])
            about |= {"history": history, "round": round}
        self._write_now_and_then()

    def _write_now_and_then(self) -> None:
        if time.monotonic() - self._written > WRITE_EVERY:
            self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        write_json(self.path, self.sites)


def _is_usual(value: Any) -> bool:
    """Whether a number may be written and shown; any text may, once it is short and plain."""
    return isinstance(value, str) or abs(value) < 2**63


def read_sites(path: Path) -> dict[str, SiteRecord]:
    """The sites of a run by name, from its file; none if there is no such file."""
    return dict(read_json(path)) if path.exists() else {}


def spans(record: SiteRecord) -> list[tuple[int, int, Attended]]:
    """First and last round of each stretch in which a site did the same; rounds of preparation are left out."""
    history, last = record.get("history", []), record.get("round", 0)
    ends = [*(entry[0] - 1 for entry in history[1:]), last]
    found = [(max(1, h[0]), end, Attended(h[1], h[2])) for h, end in zip(history, ends, strict=False)]
    return [span for span in found if span[0] <= span[1]]


def rounds_taken(record: SiteRecord) -> int:
    return sum(last - first + 1 for first, last, its in spans(record) if its.state == TOOK_PART)


def has_missed(record: SiteRecord) -> bool:
    """Whether a site took no part in some round, or in none."""
    stretches = spans(record)
    return not stretches or any(its.state not in PRESENT for _, _, its in stretches)


def attendance_words(record: SiteRecord) -> str:
    """What a site did in its rounds, such as `took part in rounds 1 to 4; silent since round 5 (does not answer)`."""
    stretches = spans(record)
    if [its.state for *_, its in stretches] == [TOOK_PART] and stretches[0][0] == 1:
        last = stretches[0][1]
        return f"took part in all {last} rounds" if last > 1 else "took part in the round"
    words = []
    for first, last, its in stretches:
        where = f"in rounds {first} to {last}" if first < last else f"in round {first}"
        if (first, last, its) == stretches[-1] and its.state not in PRESENT:
            where = f"since round {first}"
        words.append(f"{its.state} {where}" + (f" ({its.why})" if its.why else ""))
    if not words and record.get("history"):
        _, state, why, _ = record["history"][-1]
        words = [f"{state} ({why})" if why else state]
    return "; ".join(words) or "took no part"


def participation_lines(sites: Mapping[str, SiteRecord]) -> list[str]:
    """A line for each site: in which rounds it took part, and what it did in the others."""
    return [f"{site}: {attendance_words(record)}" for site, record in sorted(sites.items())]


def missing(sites: Mapping[str, SiteRecord]) -> list[str]:
    """Names of the sites that missed a round."""
    return sorted(site for site, record in sites.items() if has_missed(record))
