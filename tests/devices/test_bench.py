"""The benchmark for devices runs, and prints a line for each task."""

import pytest

from benchmarks import gpu


def test_the_bench_runs_on_the_second_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FEDTAILOR_DATA", raising=False)
    for device, figures, engines in (("sim", 3, "vmap, vmap"), ("cpu", 1, "vmap")):
        monkeypatch.setattr("sys.argv", ["gpu", "--device", device, "--workload", "B", "--rounds", "1", "--small"])
        assert gpu.main() == 0
        head, line = capsys.readouterr().out.splitlines()
        assert device in head.split()[5]
        assert line.startswith("B: MLP")
        assert sum(word.replace(".", "").isdigit() and "." in word for word in line.split()) == figures
        assert line.endswith(f"  {engines}")


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", "--device", "cuda:70"])
    assert gpu.main() == 2
    assert capsys.readouterr().err.startswith('error: federation.device = "cuda:70"')
