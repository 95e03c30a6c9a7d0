"""Evaluation keeps sums: the same numbers as of all outputs at once, and memory that does not grow with the samples."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedtailor as ft
from fedtailor import FederatedData, Model
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.experiment import Experiment
from fedtailor.core.task import IGNORED, Classification, Regression, Tokens, make
from fedtailor.metrics.evaluation import evaluate
from fedtailor.metrics.library import metrics_of
from fedtailor.metrics.memory import Live
from fedtailor.training.solver import Solver


class Bigram(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x))


def texts(vocabulary: int, sequences: int, length: int) -> FederatedData:
    rng = np.random.default_rng(0)
    x = rng.integers(vocabulary, size=(sequences, length))
    y = np.roll(x, -1, axis=1)
    y[:, -1] = IGNORED
    y[0, 2:] = IGNORED
    each = {"train": (x[:2], y[:2]), "val": (x, y), "test": (x[:1], y[:1])}
    other = {"train": (x[:2], y[:2]), "val": (x[: len(x) // 2], y[: len(x) // 2]), "test": (x[:1], y[:1] * 0 + IGNORED)}
    return ft.federated({"ada": each, "bo": other}, task="tokens", outputs=vocabulary)


def experiment(module: nn.Module, data: FederatedData, task: Any, names: tuple[str, ...], batch: int = 0) -> Experiment:
    return Experiment(
        FedAvg(), Model(module), data, Solver(), 0, task=task, metrics=metrics_of(task, names), evaluation_batch=batch
    )


@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize("stacked", [False, True])
def test_metrics_of_tokens_are_those_of_all_outputs(batch: int, stacked: bool) -> None:
    data = texts(11, 9, 6)
    made = experiment(Bigram(11), data, Tokens(), ("perplexity", "accuracy", "loss"), batch)
    params = made.model.params
    if stacked:
        pair = {k: torch.stack([v, v]) for k, v in params.items()}
        both = evaluate(made, [0, 1], pair, ["val", "test"], is_stacked=True)
        found = [{s: {k: float(v[i]) for k, v in of.items()} for s, of in both.items()} for i in range(2)]
    else:
        each = [evaluate(made, [i], params, ["val", "test"], is_stacked=False) for i in range(2)]
        found = [{s: {k: float(v[0]) for k, v in of.items()} for s, of in one.items()} for one in each]
    for i in range(2):
        x, y = data.val.of(i)
        outputs = made.model.module(x).detach()
        counts = y != IGNORED
        losses = F.cross_entropy(outputs.double().movedim(-1, 1), y, ignore_index=IGNORED, reduction="none")
        assert found[i]["val"]["perplexity"] == pytest.approx(float((losses.sum() / counts.sum()).exp()), rel=1e-6)
        right = (outputs.argmax(-1) == y)[counts].double().mean()
        assert found[i]["val"]["accuracy"] == pytest.approx(float(right), rel=1e-6)
        by_row = losses.sum(1) / counts.sum(1).clamp(min=1)
        assert found[i]["val"]["loss"] == pytest.approx(float(by_row.mean()), rel=1e-6)
    assert np.isnan(found[1]["test"]["perplexity"])  # none of its tokens counts
    assert np.isnan(found[1]["test"]["accuracy"])


def test_other_metrics_do_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(40, 3))
    classes = ft.federated({"a": (x, (x[:, 0] > 0).astype(int))}, test=0.5)
    numbers = ft.federated({"a": (x, x[:, :1] ** 2)}, task="regression", test=0.5)
    known = ("accuracy", "balanced_accuracy", "macro_f1", "auroc", "log_loss", "brier", "calibration_error")
    for data, task, names in ((classes, Classification(), known), (numbers, Regression(), ("rmse", "mae", "r2"))):
        made = experiment(nn.Linear(3, data.outputs), data.to(torch.float32), task, names)
        at_once, by_three = (
            evaluate(replace(made, evaluation_batch=n), [0], made.model.params, ["test"], is_stacked=False)["test"]
            for n in (0, 3)
        )
        for name in names:
            assert float(at_once[name]) == pytest.approx(float(by_three[name]), rel=1e-6), name


def spread(outputs: Tensor, target: Tensor) -> Tensor:
    return outputs.amax(1) - outputs.amin(1)


spread.higher_is_better = False  # type: ignore[attr-defined]
spread.per_sample = True  # type: ignore[attr-defined]


def test_an_own_metric_may_be_per_sample() -> None:
    x = torch.arange(12.0).reshape(4, 3)
    data = ft.federated({"a": {"train": (x, [0, 1, 0, 1]), "test": (x, [0, 1, 0, 1])}})
    name = "tests.metrics.test_streaming:spread"
    made = experiment(nn.Linear(3, 2), data, make("classification", {}), (name,), batch=1)
    found = evaluate(made, [0], made.model.params, ["test"], is_stacked=False)["test"][name]
    outputs = made.model.module(x).detach()
    assert float(found) == pytest.approx(float((outputs.amax(1) - outputs.amin(1)).mean()), rel=1e-6)


PROGRAM = """
import resource, sys, json, torch
import numpy as np
from torch.nn import functional as F
sys.path.insert(0, ".")
from tests.metrics.test_streaming import Bigram, experiment, texts
from fedtailor.core.task import Tokens
from fedtailor.metrics.evaluation import evaluate
torch.set_num_threads(1)

how, sequences, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
data = texts(8000, sequences, length)
torch.manual_seed(0)
made = experiment(Bigram(8000), data, Tokens(), ("perplexity", "accuracy", "loss"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if how == "ours":
    value = float(evaluate(made, [0], made.model.params, ["val"], is_stacked=False)["val"]["perplexity"])
else:
    x, y = data.val.of(0)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for i in range(0, len(x), 16):
            outputs, target = made.model.module(x[i : i + 16]), y[i : i + 16].flatten()
            total += float(F.cross_entropy(outputs.flatten(0, 1), target, ignore_index=-100, reduction="sum"))
            tokens += int((target != -100).sum())
    value = float(np.exp(total / tokens))
print(json.dumps([value, before / 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def peak(how: str, sequences: int, length: int) -> tuple[float, float, float]:
    """Perplexity, and megabytes of the process before and at the peak, which importing everything has, too."""
    command = [sys.executable, "-c", PROGRAM, how, str(sequences), str(length)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    value, before, most = json.loads(done.stdout)
    return value, before, most


def test_memory_of_evaluation_does_not_grow_with_the_samples() -> None:
    few, many = peak("ours", 256, 16), peak("ours", 2048, 16)
    assert many[2] <= 1.1 * few[2]
    ours, plain = peak("ours", 128, 128), peak("plain", 128, 128)
    assert ours[0] == pytest.approx(plain[0], rel=1e-6)
    assert ours[2] <= 2 * plain[2]


def peak_of_tensors(made: Experiment) -> int:
    with Live() as live:
        evaluate(made, [0], made.model.params, ["val"], is_stacked=False)
    return live.peak


def test_tensors_of_evaluation_are_those_of_a_batch() -> None:
    names = ("perplexity", "accuracy", "loss")
    few, many = (experiment(Bigram(8000), texts(8000, n, 64), Tokens(), names, batch=4) for n in (8, 32))
    assert peak_of_tensors(many) <= 1.1 * peak_of_tensors(few)
    x, y = few.data.val.of(0)
    with Live() as live, torch.no_grad():
        for i in range(0, len(x), 4):
            outputs = few.model.module(x[i : i + 4])
            F.cross_entropy(outputs.flatten(0, 1), y[i : i + 4].flatten(), ignore_index=IGNORED, reduction="sum")
            del outputs
    assert peak_of_tensors(few) <= 2 * live.peak
    assert experiment(Bigram(8000), texts(8000, 8, 64), Tokens(), names).output_size == 64 * 8000 * 4
