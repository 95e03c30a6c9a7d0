"""What is said of a fit: numbers of sites by their intervals."""

from __future__ import annotations

import re

from fedtailor.tables.words import site_gain_sentence


def test_a_site_gains_or_loses_if_its_interval_excludes_0() -> None:
    intervals = [(0.1, 0.3), (-0.1, 0.2), (-0.3, -0.1), (-0.2, 0.1), (-0.4, 0.5), None]
    sites = {str(i): {"gain_ci": interval} for i, interval in enumerate(intervals)}
    better, worse, rest = map(int, re.findall(r"\d+", site_gain_sentence({"sites": sites})))
    assert (better, worse, rest) == (1, 1, 3)
    assert site_gain_sentence({"sites": {"a": {"gain_ci": None}}}) == ""
