"""What benchmarks/tailor.py says of runs: figures, tests, hurt clients."""

import json
from pathlib import Path

from benchmarks import tailor


def write(folder: Path, title: str, seed: int, losses: list[list[float]]) -> None:
    made = {"losses": losses, "seconds": 2.0 if title == "Tailor" else 1.0}
    (folder / f"FMNIST 0.5-{title}-{seed}.json").write_text(json.dumps(made))


def test_a_column_compares_the_seeds_that_all_methods_have(tmp_path: Path) -> None:
    right, half, wrong = [0.0] * 20, [0.0, 1.0] * 10, [1.0] * 20
    clients = 8
    for seed in (0, 1):
        write(tmp_path, "Local", seed, [half] * clients)
        write(tmp_path, "FedAvg", seed, [half] * clients)
        write(tmp_path, "FedAvg+FT", seed, [wrong] * clients)
    write(tmp_path, "Tailor", 0, [right] * (clients - 1) + [wrong])
    column = tailor.Column(tmp_path, "FMNIST 0.5", list(tailor.METHODS), 2)
    assert column.seeds == [0]  # Tailor has no other
    assert column.titles == ["Tailor", "Local", "FedAvg", "FedAvg+FT"]
    assert (column.figure("Tailor"), column.figure("Local"), column.best) == (87.5, 50.0, "Tailor")
    assert column.hurt() == (1, clients)
    p, apart = column.against()["FedAvg+FT"]
    assert p < 0.05
    assert apart < 0
    (_, _, line) = tailor.verdicts([column])
    assert "| ahead |" in line
    assert line.endswith(f"| 1 of {clients} | 2.0 |")


def test_what_learning_gains_is_told_for_each_beginning(tmp_path: Path) -> None:
    right, half = [0.0] * 20, [0.0, 1.0] * 10
    for title in ("Tailor", "nothing learned", "begins wrong"):
        write(tmp_path, title, 0, [right] * 8)
    write(tmp_path, "begins wrong, nothing learned", 0, [half] * 8)
    columns = tailor.ablated(tmp_path, 1)
    lines = tailor.learning(columns)
    assert lines[0] == "| | FMNIST 0.5 |"
    assert lines[2] == "| as it is | +0.0 (1.000) |"
    assert (
        lines[3] == "| begins wrong | +50.0 (0.009) |"
    )  # eight ties of one sign: z = 18 / sqrt(51 - 10.5), p twice by Holm
    assert lines[4] == "| no mixture |  |"
    assert "| begins wrong, nothing learned | 50.0 |" in tailor.ablations(columns)


def test_every_column_and_row_can_be_configured() -> None:
    for column in tailor.COLUMNS:
        for title in (*tailor.METHODS, *tailor.ABLATIONS):
            assert tailor.configured(column, title, 0).seed == 0
