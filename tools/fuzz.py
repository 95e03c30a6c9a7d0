"""Fuzz a parser, guided by what it covers (atheris, libFuzzer): python tools/fuzz.py NAME [--seconds 600]

An input is at most a kilobyte, or as long as the longest good one. What ends it: an error that is not for people, ten
seconds of the processor (or ten minutes of any clock) for one input, or 100 MB of memory asked for. The
input then lies in build/fuzz/NAME; keep it under tests/trust/seeds/NAME and mend the parser. --seconds are seconds of
the processor too, so that a busy machine does not shorten a run.
Without atheris (pip install atheris) inputs are changed at random, which finds less.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

os.environ |= {"POLARS_MAX_THREADS": "1", "MALLOC_ARENA_MAX": "1", "RUST_BACKTRACE": "0"}  # threads set memory aside
sys.path.insert(0, str(Path(__file__).parent.parent))
MOST, SLOW, STUCK = 1024, 10, 600  # bytes; seconds of the processor; seconds of any clock, for a busy machine

try:
    import atheris
except ImportError:
    atheris = None


def main() -> None:
    from tests.trust.parsers import PARSERS

    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("name", choices=sorted(PARSERS))
    given.add_argument("--seconds", type=int, default=600)
    given.add_argument("--seed", type=int, default=0)
    options = given.parse_args()
    from tests.trust.parsers import SEEDS, fresh, limited

    parser = fresh(options.name, Path(tempfile.mkdtemp()))
    kept = Path("build/fuzz", options.name)
    (kept / "corpus").mkdir(parents=True, exist_ok=True)
    seeds = [*parser.seeds, *(file.read_bytes() for file in sorted((SEEDS / options.name).glob("*")))]
    for i, seed in enumerate(seeds):
        parser.feed(seed)
        (kept / "corpus" / f"seed{i}").write_bytes(seed)
    most = max(MOST, *map(len, seeds))

    start, count = time.process_time(), 0

    def one(content: bytes) -> None:
        nonlocal count
        begun = time.process_time()
        with limited():
            parser.feed(content)
        if (took := time.process_time() - begun) > SLOW:
            raise TimeoutError(f"{took:.0f} s for one input")
        count += 1
        if (used := time.process_time() - start) > options.seconds:
            print(f"{options.name}: {count} inputs in {used:.0f} s of the processor, no finding", flush=True)
            os._exit(0)  # libFuzzer has no other end but a finding or its own clock

    if atheris is None:
        return at_random(one, seeds, kept, options.seed)
    limits = [f"-max_len={most}", f"-timeout={STUCK}", "-rss_limit_mb=0"]
    rest = [f"-seed={options.seed + 1}", f"-artifact_prefix={kept}/", "-print_final_stats=1", str(kept / "corpus")]
    atheris.Setup([sys.argv[0], *limits, *rest], one)
    return atheris.Fuzz()


def at_random(one, seeds: list[bytes], kept: Path, seed: int) -> NoReturn:
    """Bytes replaced, removed and repeated."""
    draw = random.Random(seed)
    while True:
        content = bytearray(draw.choice(seeds))
        for _ in range(draw.randint(1, 8)):
            at = draw.randrange(len(content) + 1)
            what = draw.random()
            if what < 0.5 and at < len(content):
                content[at] = draw.randrange(256)
            elif what < 0.75:
                del content[at : at + draw.randint(1, 16)]
            else:
                content[at:at] = content[at : at + draw.randint(1, 16)]
        try:
            one(bytes(content))
        except BaseException:
            (kept / "crash").write_bytes(content)
            raise


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        from tests.trust.parsers import PARSERS

        print(*PARSERS)
        sys.exit()
    if atheris is not None:
        with atheris.instrument_imports(include=["fedtailor"]):
            import tests.trust.parsers  # noqa: F401
    main()
