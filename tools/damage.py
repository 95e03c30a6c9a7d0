"""Damage every byte of the folders that fedtailor writes: python tools/damage.py [NAMES] [--most 16384]

Of each file of a run, a comparison, a fit and a site every byte is changed, and the file is cut short
there; of files beyond --most bytes at that many places. Each of fedtailor's own readers of the file then must name it
in an error for people, or give what it gave before. What does neither is printed, and the command ends with 1.
Commands read files by the same functions, and are slower; where both do, commands try --commands places.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
KEYS = ("files", "bytes", "outside", "tries", "named", "same")


def quiet(text: str) -> None:
    pass


def main() -> int:
    from tests.trust.folders import MAKERS
    from tests.trust.sweep import SMALL, sweep

    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("names", nargs="*", choices=[*MAKERS, []], default=[])
    given.add_argument("--most", type=int, default=SMALL)
    given.add_argument("--commands", type=int, default=SMALL)
    given.add_argument("--verbose", action="store_true", help="name every file, and who reads it")
    options = given.parse_args()
    wrong, told = 0, print if options.verbose else quiet
    print(f"| folder | {' | '.join(KEYS)} | silent or broken | s |\n|{'---|' * (len(KEYS) + 3)}", flush=True)
    for name in options.names or MAKERS:
        begun = time.process_time()
        swept = sweep(*MAKERS[name](Path(tempfile.mkdtemp())), options.most, options.commands, told)
        counts = " | ".join(f"{swept.count[key]:,}" for key in KEYS)
        print(f"| {name} | {counts} | {len(swept.wrong)} | {time.process_time() - begun:.0f} |", flush=True)
        for line in swept.wrong[:40]:
            print("  ", line, flush=True)
        wrong += len(swept.wrong)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
