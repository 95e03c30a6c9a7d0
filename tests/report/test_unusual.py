"""The section on replies far from a robust mean."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from fedtailor.experiments import runner
from fedtailor.experiments.store import RunFolder
from fedtailor.report.run_page import run_page
from tests.small import config

TASK = ("rounds=2", "data.clients=6", "algorithm.name=fedavg", "attack.name=sign-flip", "aggregation.liars=0.2")


@pytest.mark.parametrize("name", ["krum", "median"])
def test_clients_by_distance_and_how_often_they_were_left_out(name: str, tmp_path: Path) -> None:
    folder: RunFolder = runner.start(config(*TASK, f"aggregation.mean={name}"), tmp_path / name)
    (section,) = (section for section in run_page(folder.path).sections if section.id == "unusual")
    rows = [[cell.text for cell in row] for row in section.tables[0].rows]
    lines, clients = folder.metrics(), folder.about["clients"]
    means = {c: mean(line["report"]["distance"][i] for line in lines) for i, c in enumerate(clients)}
    assert [row[0] for row in rows] == sorted(clients, key=lambda c: -means[c])
    assert [row[1] for row in rows] == [f"{means[row[0]]:.2f}" for row in rows]
    assert folder.results is not None
    (liar,) = folder.results["attackers"]
    assert rows[0][0] == liar
    assert rows[0][3:] == (["2", "2"] if name == "krum" else ["2"])
    assert f"the robust mean ({name})" in section.text[0]


def test_no_section_without_scores(tmp_path: Path) -> None:
    folder = runner.start(config("rounds=1"), tmp_path / "run")
    assert all(section.id != "unusual" for section in run_page(folder.path).sections)
