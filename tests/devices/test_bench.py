"""The benchmark for devices runs, and prints a line for each task."""

import pytest

from benchmarks import gpu


def test_the_bench_runs_on_the_second_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--device", "sim", "--workload", "B", "--rounds", "1", "--small"])
    monkeypatch.delenv("FEDTAILOR_DATA", raising=False)
    assert gpu.main() == 0
    head, line = capsys.readouterr().out.splitlines()
    assert "sim:0" in head
    assert line.startswith("B: MLP")
    assert line.endswith("vmap, vmap")


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 2
    assert "no device to measure" in capsys.readouterr().err
