"""Bytes that nobody wrote on purpose: each parser refuses them in words, soon, and without much memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.trust.parsers import PARSERS, SEEDS, fresh, limited


def changed(content: bytes, draw: random.Random) -> bytes:
    """A few bytes replaced, removed or repeated."""
    out = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at, many = draw.randrange(len(out) + 1), draw.randint(1, 16)
        match draw.randrange(3):
            case 0 if at < len(out):
                out[at] = draw.randrange(256)
            case 1:
                del out[at : at + many]
            case _:
                out[at:at] = out[at : at + many]
    return bytes(out)


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_good_bad_and_once_fatal_inputs_end_in_words(name: str, tmp_path: Path) -> None:
    parser, draw = fresh(name, tmp_path), random.Random(name)
    kept = [file.read_bytes() for file in sorted((SEEDS / name).glob("*"))]
    for seed in parser.seeds:
        parser.feed(seed)
    for content in [*kept, b"", *(changed(seed, draw) for seed in parser.seeds * 3)]:
        with limited():
            parser.feed(content)


def test_the_limit_is_one(tmp_path: Path) -> None:
    """Or the tests above would say nothing."""
    import torch

    with limited(), pytest.raises(RuntimeError, match="allocate"):
        torch.zeros(2**25)
    torch.zeros(2**25)


def test_seeds_belong_to_parsers() -> None:
    assert {folder.name for folder in SEEDS.iterdir()} <= set(PARSERS)
