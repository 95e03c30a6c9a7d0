"""Exports say what the run says, on real rows, or there is no file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtailor.errors import RunError
from fedtailor.experiments import runner
from fedtailor.experiments.store import RunFolder
from fedtailor.serving import export as exporting
from fedtailor.serving.export import ENDINGS, Format, export, read_safetensors
from fedtailor.tables.serve import personal
from tests.small import DIGITS, POLYNOMIAL, config

RUNS = {
    "fedrep": config("rounds=1"),
    "fedselect with a prior": config("rounds=1", "algorithm.name=fedselect", "model.prior=label"),
    "knn-per": config("rounds=1", "algorithm.name=knn-per", "algorithm.capacity=50"),
    "learn2pfed": config("rounds=1", "algorithm.name=learn2pfed", task=POLYNOMIAL | {"model": {"name": "linear"}}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, made in RUNS.items():
        runner.start(made, folder / name)
    return folder


def rows(run: Path) -> Tensor:
    return runner.reload_experiment(RunFolder(run)).data.test.of(1)[0]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_exports_predict_as_the_run_does(runs: Path, tmp_path: Path, name: str, to: Format) -> None:
    file = tmp_path / f"model{ENDINGS[to]}"
    assert export(runs / name, "client-01", to, file) == [file]
    own, x = personal(runs / name, "client-01"), rows(runs / name)
    wanted = own.readable(own.outputs(x))
    if to == "torch":
        found = torch.export.load(file).module()(x)
    else:
        again = read_safetensors(file)
        found = again.readable(again.outputs(x))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", ["fedrep", "knn-per"])
def test_onnx_predicts_as_the_run_does(
    runs: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = tmp_path / "model.onnx"
    export(runs / name, "client-01", "onnx", file)
    own, x = personal(runs / name, "client-01"), rows(runs / name)
    assert len(x) != len(runner.reload_experiment(RunFolder(runs / name)).data.train.of(1)[0])  # any number of rows
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    (found,) = session.run(["prediction"], {"features": x.numpy()})
    assert np.abs(found - own.readable(own.outputs(x)).numpy()).max() < 1e-5
    assert capfd.readouterr() == ("", "")


def test_what_prepares_rows_stands_beside_it(tmp_path: Path) -> None:
    from fedtailor.experiments.config import parse
    from tests.made_sites import make_sites

    sites = make_sites(tmp_path / "sites", sites=2)
    data = {"source": "folder", "path": str(sites), "target": "outcome"}
    runner.start(parse({"rounds": 1, "data": data, "model": {"name": "linear"}}), tmp_path / "run")
    files = export(tmp_path / "run", "s1", "torch", tmp_path / "model.pt2")
    assert files == [tmp_path / "model.pt2", tmp_path / "model.preparation.json"]
    about = json.loads(files[1].read_text())
    assert about["features"] == ["a", "b", "ward=north", "ward=south"]
    assert about["target"]["classes"] == ["ill", "well"]
    again = read_safetensors(export(tmp_path / "run", "s1", "safetensors", tmp_path / "model.safetensors")[0])
    row = {"a": [1.0], "b": [0.5], "ward": ["north"]}
    assert np.array_equal(again.predict_proba(row), personal(tmp_path / "run", "s1").predict_proba(row))


def test_one_that_differs_is_refused(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: exporting.Served, x: Tensor) -> Tensor:
        return self.network(x).softmax(1) + 1e-3

    monkeypatch.setattr(exporting.Served, "forward", wrong)
    with pytest.raises(RunError, match=r"0\.001.*1e-05"):
        export(runs / "fedrep", "client-01", "torch", tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["torch", "onnx"])
def test_an_equilibrium_is_written_with_all_its_iterations(tmp_path: Path, to: Format) -> None:
    if to == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    model = {"name": "deq-mlp", "hidden": 4, "width": 6, "max_iterations": 4, "tolerance": 1e-6}
    runner.start(config("rounds=1", "algorithm.name=fedeq", task=DIGITS | {"model": model}), tmp_path / "run")
    (file,) = export(tmp_path / "run", "client-00", to, tmp_path / f"model{ENDINGS[to]}")
    own, x = personal(tmp_path / "run", "client-00"), rows(tmp_path / "run")[:7]
    if to == "torch":
        found = torch.export.load(file).module()(x)
    else:
        found = exporting._run_onnx(file, {"features": x.numpy()}, ["prediction"])["prediction"]
    torch.testing.assert_close(found, own.readable(own.outputs(x)), rtol=0, atol=1e-5)


def test_mistakes(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"a file for torch ends in \.pt2"):
        export(runs / "fedrep", "client-00", "torch", tmp_path / "model.onnx")
    with pytest.raises(RunError, match='no site "nobody"'):
        export(runs / "fedrep", "nobody", "torch")
    (tmp_path / "x.safetensors").write_bytes(b"no")
    with pytest.raises(RunError, match="not a model"):
        read_safetensors(tmp_path / "x.safetensors")
