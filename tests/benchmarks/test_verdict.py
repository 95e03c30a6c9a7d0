"""What benchmarks/verdict.py says of results: who is level with the first, ranks, tables of other pages."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import verdict


def columns() -> dict[str, dict[str, dict[str, list[float]]]]:
    rng = np.random.default_rng(0)
    base = rng.uniform(0.2, 0.4, 40)
    clients = {
        "FedAvg": list(base + 0.2),
        "Tailor": list(base + rng.normal(0, 0.01, 40)),
        "FedPer": list(base + rng.normal(0, 0.01, 40)),
    }
    seconds, up = {"FedAvg": 1.0, "Tailor": 4.0, "FedPer": 1.5}, {"FedAvg": 100, "Tailor": 200, "FedPer": 50}
    return {"half permuted": {"clients": clients, "seconds": seconds, "up": up}}  # type: ignore[dict-item]


def test_who_is_far_behind_is_not_level_with_the_first() -> None:
    (kind,) = verdict.kinds_of(columns())
    assert kind.name == "concept shift"
    assert sorted(kind.level()) == ["FedPer", "Tailor"]
    rank, low, high = kind.interval("FedAvg")
    assert (rank, low, high) == (3, 3, 3)
    assert kind.ranks.sum() == pytest.approx(6 * 40)


def test_costs_are_over_those_of_fedavg() -> None:
    (kind,) = verdict.kinds_of(columns())
    lines = verdict.ranks_table([kind], columns())  # type: ignore[arg-type]
    (line,) = [x for x in lines if x.startswith("| Tailor")]
    assert line.endswith("| 4.00 | 2.00 |")
    assert "**" in line
    (_, _, advice) = verdict.advice([kind], columns())  # type: ignore[arg-type]
    assert advice.endswith("| FedAvg |")


def test_tables_of_other_pages_are_read_by_their_headings(tmp_path: Path) -> None:
    one = "## one\n\n| a | b |\n|---|---:|\n| X | **91.2 ± 1.0** |\n| Y | 90 |\n"
    one += "\nTests:\n\n| a | better |\n|---|---:|\n| X | 3 |\n"  # another table, below the one that is read
    text = f"# Page\n\n{one}\n## two\n\n| a | b |\n|---|---|\n| X | 1 |\n"
    (tmp_path / "page.md").write_text(text)
    assert verdict.read_table(tmp_path / "page.md", "one") == {"X": 91.2, "Y": 90.0}
    assert verdict.read_table(tmp_path / "page.md", "three") == {}
    (tmp_path / "habits.md").write_text(
        "### a\n\n| m | best | selected on validation |\n|---|---|---|\n| X | 9 | 7.5 |\n"
    )
    assert verdict.read_table(tmp_path / "habits.md", "a") == {"X": 7.5}  # not the round that is best on test data
    assert verdict.read_table(tmp_path / "none.md", "one") == {}
