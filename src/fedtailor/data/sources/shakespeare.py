"""Shakespeare's plays by role: each role predicts the next character of its own lines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.random import stream
from fedtailor.data.configs import ShakespeareConfig
from fedtailor.data.download import data_root, locate
from fedtailor.data.files import read_bytes
from fedtailor.data.splits import split_in_time, split_note, starts
from fedtailor.errors import DataError

FILE = "shakespeare/playshakespeare_by_role.json.gz"
WINDOW = 80


def load(config: ShakespeareConfig, *, seed: int, root: Path | None = None) -> FederatedData:
    """Windows of 80 characters of each role's speeches, with the next character as target; split in time."""
    path = locate(data_root(root), FILE, config.source)
    texts = _parse(path)
    characters = sorted(set("".join(texts.values())))  # of all roles, so that ids do not depend on who is picked
    eligible = sorted(name for name, text in texts.items() if len(text) >= config.min_characters)
    if len(eligible) < config.clients:
        raise DataError(
            f"data.clients = {config.clients}: only {len(eligible)} of {len(texts)} roles have at least "
            f"{config.min_characters} characters; lower data.clients or data.min_characters"
        )
    drawn = stream(seed, "shakespeare", "roles").permutation(len(eligible))[: config.clients]
    chosen = [eligible[i] for i in np.sort(drawn)]
    ids = {character: i for i, character in enumerate(characters)}
    codes = [np.array([ids[c] for c in texts[name]], dtype=np.int64) for name in chosen]
    ends = [_ends(len(code), config.stride, config.max_samples) for code in codes]
    cuts = [split_in_time(len(end), config) for end in ends]
    sizes = [len(end) for end in ends]
    return FederatedData(
        name=config.source,
        task="classification",
        clients=tuple(chosen),
        train=_rows(codes, [end[cut.train] for end, cut in zip(ends, cuts, strict=True)]),
        val=_rows(codes, [end[cut.val] for end, cut in zip(ends, cuts, strict=True)]),
        test=_rows(codes, [end[cut.test] for end, cut in zip(ends, cuts, strict=True)]),
        outputs=len(characters),
        classes=tuple(characters),
        notes=(
            f"{len(chosen)} of the {len(eligible)} roles with at least {config.min_characters} characters",
            f"samples per role: min {min(sizes)}, median {np.median(sizes):g}, max {max(sizes)}",
            f"windows of {WINDOW}, {config.stride} or more from one to the next; {len(characters)} characters",
            f"{split_note(config)}; in the order of the lines: training, validation, test",
        ),
    )


def _parse(path: Path) -> dict[str, str]:
    """The speeches of each role, by "play: role"."""
    try:
        plays = json.loads(read_bytes(path))
        return {
            f"{play}: {role}": "\n".join(speeches) for play, roles in plays.items() for role, speeches in roles.items()
        }
    except (ValueError, AttributeError, TypeError):
        raise DataError(
            f"{path}: must be JSON of the form {{play: {{role: [speech, ...]}}}}; put it there again"
        ) from None


def _ends(characters: int, stride: int, most: int | None) -> NDArray[np.int64]:
    """Positions to predict, evenly spaced: every stride-th, or fewer if there are more than `most`."""
    ends = np.arange(WINDOW, characters, stride)
    if most is None or len(ends) <= most:
        return ends
    return ends[np.arange(most) * len(ends) // most]


def _rows(codes: list[NDArray[np.int64]], ends: list[NDArray[np.int64]]) -> Rows:
    x = [code[end[:, None] + np.arange(-WINDOW, 0)] for code, end in zip(codes, ends, strict=True)]
    y = [code[end] for code, end in zip(codes, ends, strict=True)]
    return Rows(
        torch.from_numpy(np.concatenate(x)), torch.from_numpy(np.concatenate(y)), starts([len(end) for end in ends])
    )
