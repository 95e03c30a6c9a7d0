"""The benchmark for devices runs, and prints a line for each task."""

import pytest

from benchmarks import gpu


def test_the_bench_runs_on_the_second_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FEDTAILOR_DATA", raising=False)
    for device, figures in (("sim", 3), ("cpu", 1)):
        monkeypatch.setattr("sys.argv", ["gpu", "--device", device, "--workload", "B", "--rounds", "1", "--small"])
        assert gpu.main() == 0
        head, line = capsys.readouterr().out.splitlines()
        assert device in head.split()[5]
        assert line.startswith("B: MLP")
        assert sum(word.replace(".", "").isdigit() and "." in word for word in line.split()) == figures
    assert line.endswith("vmap, vmap")


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 2
    assert "no device to measure" in capsys.readouterr().err
