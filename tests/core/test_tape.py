"""The tape alone: what a loss does not depend on has a gradient of 0."""

from __future__ import annotations

import torch

from fedtailor.core.tape import Tape


def test_what_is_watched_and_not_used_has_a_gradient_of_0() -> None:
    watched = {k: torch.ones(2, dtype=torch.float64, requires_grad=True) for k in ("used", "unused")}
    tape = Tape(watched, watched["used"], lambda call: None, lambda call, cotangent: ())
    gradient = tape.backward((3 * watched["used"]).sum())
    assert {k: v.tolist() for k, v in gradient.items()} == {"used": [3.0, 3.0], "unused": [0.0, 0.0]}
