"""When Python collects what refers to itself, in a process that lives for many rounds.

Every message of FLARE 2.9 leaves such cycles, with a buffer of half a megabyte in them. Those that grow old wait for a
full collection, which comes when as many objects are new as a quarter of all; with torch loaded there are 380,000.
"""

from __future__ import annotations

import gc


class Collector:
    """After its first round a process has what it keeps: that is set aside, and the rest collected in every round."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._is_settled = False

    def note(self, round: int | None) -> None:
        """The round that is at work, if one is."""
        if round is None or round == self._last:
            return
        if self._last is not None:
            gc.collect()
            if not self._is_settled:
                gc.freeze()
                self._is_settled = True
        self._last = round
