"""How a participant is: its version, clock, disk and certificate. For operators; nothing is computed from it."""

from __future__ import annotations

import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedtailor.version import __version__

CERTIFICATES = ("client.crt", "server.crt")
SOON = 30  # days
FULL = 2**30  # bytes free


def condition(folder: Path, kit: Path) -> dict[str, Any]:
    """What a site tells of itself when a run begins, and `federation health` of any participant."""
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    return {"version": __version__, "now": time.time(), "free": free, "certificate_ends": certificate_end(kit)}


def certificate_end(kit: Path) -> float | None:
    """When the certificate in a kit ends, as seconds since 1970; None without one."""
    for name in CERTIFICATES:
        if (file := kit / "startup" / name).is_file():
            from fedtailor.aggregation.identity import read_certificate  # needs a package that FLARE needs too

            return read_certificate(file)[0].not_valid_after_utc.timestamp()
    return None


def words(about: dict[str, Any], now: float) -> list[str]:
    """A condition in words, as far as it is known; `now` is the reader's clock when it was told."""
    parts = [f"version {about['version']}"] if isinstance(about.get("version"), str) else []
    if isinstance(about.get("now"), int | float):
        skew = about["now"] - now
        parts += [f"clock {skew:+.0f} s"] if abs(skew) >= 0.5 else []
    if isinstance(about.get("free"), int | float):
        parts.append(f"{about['free'] / 2**30:.1f} GB free")
    if isinstance(about.get("certificate_ends"), int | float):
        parts.append(f"certificate until {datetime.fromtimestamp(about['certificate_ends'], UTC):%Y-%m-%d}")
    return parts


def problems(about: dict[str, Any], now: float) -> list[str]:
    """What an operator has to do something about."""
    messages = []
    ends = about.get("certificate_ends")
    if isinstance(ends, int | float) and ends - now < SOON * 86400:
        days = f"its certificate ends in {(ends - now) / 86400:.0f} days"
        messages.append("its certificate has ended" if ends < now else days)
    if isinstance(about.get("free"), int | float) and about["free"] < FULL:
        messages.append(f"only {about['free'] / 2**20:.0f} MB of disk are free")
    return messages
