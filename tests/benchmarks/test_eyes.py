"""Differences image by image: those of a row from Local, by clinic."""

from __future__ import annotations

import numpy as np

from benchmarks.eyes import NAMES, dice, paired


def test_dice_is_of_the_marked_pixels_that_count() -> None:
    true = np.array([[1, 1, 0], [0, 255, 0]], np.uint8)
    assert dice(np.array([[1, 0, 1], [0, 1, 0]], np.uint8), true) == 0.5


def test_differences_are_paired_over_the_images_of_a_clinic() -> None:
    local = {name: np.linspace(0.4, 0.6, 8) for name in NAMES}
    row = {name: values + 0.01 * np.arange(1, 9) for name, values in local.items()} | {"hrf": local["hrf"]}
    cells = dict(zip(NAMES, paired(row, local), strict=True))
    assert cells["drive"] == "+4.5 (8/8, .008)"  # all eight of one sign: 2 / 2 ** 8
    assert cells["hrf"] == "+0.0 (0/8, 1.000)"
