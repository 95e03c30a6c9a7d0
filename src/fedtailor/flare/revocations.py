"""Lists of revoked certificates on their way: with a run from the coordinator to the server, from it to the sites.

The authority signs them, so it does not matter who hands them on. A list only ever grows: an older one is not taken.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedtailor.errors import RunError
from fedtailor.experiments.store import write_atomically
from fedtailor.flare.kits import REVOKED

LARGEST = 2**20  # bytes of a list


def read_list(folder: Path) -> dict[str, Any]:
    """The signed list in a folder, as it is handed on; empty without one."""
    path = folder / REVOKED
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise RunError(f"{path}: damaged; ask the coordinator for it") from None


def accept_list(folder: Path, kit: Path, content: dict[str, Any]) -> bool:
    """Keep a list in a folder if the authority of the kit signed it and it revokes more; whether it was kept."""
    from fedtailor.aggregation.identity import AUTHORITY, read_revocations

    text = json.dumps(content, indent=1)
    authority = kit / "startup" / AUTHORITY
    if not content or len(text) > LARGEST or not authority.exists():
        return False
    known = revoked_in(folder, kit)
    draft = folder / f"{REVOKED}.new"
    try:
        draft.write_text(text, encoding="utf-8")
        more = set(read_revocations(draft, authority.read_bytes())["certificates"])
    except RunError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    if not more > set(known["certificates"]):
        return False
    write_atomically(folder / REVOKED, text.encode())
    return True


def revoked_in(folder: Path, kit: Path) -> dict[str, list[str]]:
    """Names and certificates of the list in a folder. FLARE has no such list, so these can still connect."""
    from fedtailor.aggregation.identity import AUTHORITY, read_revocations

    authority = kit / "startup" / AUTHORITY
    if not (folder / REVOKED).exists():
        return {"names": [], "certificates": []}
    return read_revocations(folder / REVOKED, authority.read_bytes() if authority.exists() else b"")
