"""Damage every byte of the folders that fedtailor writes: python tools/damage.py [NAMES] [--most 16384]

Of each file of a run, a comparison, a fit and a site every byte is changed in two ways and the file is cut short
there; of files beyond --most bytes at that many places. Each of fedtailor's own readers of the file then must name it
in an error for people, or give what it gave before. What does neither is printed, and the command ends with 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def main() -> int:
    from tests.trust.folders import MAKERS, SMALL, sweep

    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("names", nargs="*", default=list(MAKERS), choices=[*MAKERS, []])
    given.add_argument("--most", type=int, default=SMALL)
    options = given.parse_args()
    wrong = 0
    for name in options.names:
        begun = time.monotonic()
        path, readers = MAKERS[name](Path(tempfile.mkdtemp()))
        count, silent = sweep(path, readers, options.most)
        print(name, dict(count), f"{len(silent)} silent or broken, {time.monotonic() - begun:.0f} s", flush=True)
        for line in silent[:40]:
            print("  ", line, flush=True)
        wrong += len(silent)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
