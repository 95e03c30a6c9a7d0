"""A task, a metric and a loader of one's own, by name; and what is wrong, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import FederatedData, Rows
from fedtailor.api import Fit, Run
from fedtailor.errors import UserError
from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from tests.small import stop_after
from tests.world import own, plain

TABLES: dict[str, Any] = {
    "rounds": 2,
    "data": {"source": "tests.world.own:load", "clients": 4},
    "model": {"name": "tests.world.plain:Layered"},
    "algorithm": {"name": "fedavg"},
    "task": {"name": "tests.world.own:LogCosh", "sharpness": 0.5},
    "evaluation": {"metrics": ["mae", "tests.world.own:bias"], "decide": "mae"},
    "local": {"batch_size": 0, "lr": 0.1},
}


def test_all_three_by_name(tmp_path: Path) -> None:
    run = ft.run("fedavg", TABLES, out=tmp_path / "run", progress=False)
    data = own.load(0, 4).to(torch.float32)
    loss = own.LogCosh(0.5).loss
    wanted = plain.fedavg(plain.begun(plain.Layered, data.shape, 1), data, loss, rounds=2, lr=0.1)
    found = run.folder.personal("site-0", "last")
    assert all(torch.allclose(found[k], v, atol=1e-6) for k, v in wanted.items())
    assert run.results["metric"] == "mae"
    module = plain.begun(plain.Layered, data.shape, 1)
    module.load_state_dict(dict(found))
    x, y = data.test.of(0)
    assert run.results["last"]["clients"]["tests.world.own:bias"][0] == pytest.approx(
        own.bias(module(x).detach(), y), abs=1e-6
    )
    assert set(run.folder.about["code"]) >= {"task.name", "data.source", "evaluation.metrics.1"}
    assert Run(tmp_path / "run").clients == [f"site-{i}" for i in range(4)]
    assert runner.resume(tmp_path / "run").results == run.results


def test_classes_and_functions_stand_for_their_names(tmp_path: Path) -> None:
    settings = {
        "model.name": plain.Layered,
        "task.name": own.LogCosh,
        "data.source": own.load,
        "evaluation.metrics": ["mae", own.bias],
    }
    run = ft.run("fedavg", {"data": {}}, rounds=1, settings=settings, out=tmp_path / "run", progress=False)
    assert run.config.task.name == "tests.world.own:LogCosh"
    assert set(run.results["last"]["test"]) == {"mae", "tests.world.own:bias"}

    class Hidden(own.LogCosh):
        """Nobody else can import it."""

    with pytest.raises(UserError, match=r"task.name"):
        ft.run("fedavg", {"data": {}}, settings=settings | {"task.name": Hidden}, out=tmp_path / "other")


def pairs(x: Any, y: Any, **options: Any) -> FederatedData:
    return ft.federated({"ada": (x, y), "bo": (x, y)}, name="mine", **options)


X, Y = np.zeros((8, 4), dtype=np.float32), np.arange(8) % 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pairs(X, Y.astype(np.float32)), "labels must be whole numbers"),
        (lambda: pairs((X * 255).astype(np.uint8), Y), "scale images to floating point"),
        (lambda: pairs(X[:5], Y), "5 samples and 8 targets"),
        (lambda: pairs(X, Y, task="multlabel"), 'no task "multlabel"'),
        (lambda: pairs(X, Y - 1, outputs=2), "the label -1 is none of the 2 classes"),
        (lambda: pairs(X, np.full((8, 2), 0.5, dtype=np.float32), task="multilabel"), "neither 0 nor 1"),
        (lambda: pairs(X, np.full((8, 2), 2.0, dtype=np.float32), task="survival"), "an event, 0 or 1"),
        (lambda: pairs(X * np.nan, Y), "NaN or Inf"),
        (lambda: ft.federated({"ada": (X, Y), "bo": (X[:, :3], Y)}), "samples of shapes"),
        (lambda: ft.federated({"ada": ({"a": X}, Y), "bo": ({"b": X}, Y)}), "samples of ['a'] and of ['b']"),
        (lambda: FederatedData("mine", "classification", ("a", "a"), *(_rows(),) * 3, 2), 'called "a"'),
        (lambda: FederatedData("mine", "classification", ("a", "b"), *(_rows(9),) * 3, 2), "number of rows, 8"),
    ],
)
def test_data_that_is_wrong_is_one_clear_line(make: Any, words: str) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def _rows(last: int = 8) -> Rows:
    return Rows(torch.from_numpy(X), torch.from_numpy(Y), torch.tensor([0, 4, last]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"evaluation.metrics": ["auroc"]}, "which needs probabilities"),
        ({"evaluation.metrics": ["rmsee"]}, 'did you mean "rmse"?'),
        ({"evaluation.metrics": ["tests.world.own:undirected"]}, "higher_is_better = True or False"),
        ({"task.sharpnes": 1}, 'did you mean "sharpness"?'),
        ({"task.name": "survival"}, "is for targets of survival, and numbers has regression"),
        ({"task.name": "tests.world.own:load"}, "must be a class with kind, metrics and loss"),
        (
            {"task.name": "tests.world.own:Mean"},
            "must give one number per sample; of 2 it gave shape []",
        ),
        ({"data.client": 2}, 'did you mean "clients"?'),
        ({"model.name": "tests.world.own:Narrow"}, "shapes cannot be multiplied (2x4 and 7x1) (own.py, line "),
        ({"model.name": "tests.world.own:Both", "task.name": "regression"}, "of 2 rows it gave a tuple"),
        ({"model.name": "tests.world.own:Wide", "task.name": "regression"}, "tensor [rows, 1] for this task"),
        ({"model.name": "tests.world.own:LogCosh"}, "it is called as Class(shape, outputs, **options)"),
        ({"data.source": "tests.world.own:bias"}, "bias"),
    ],
)
def test_settings_that_are_wrong_are_one_clear_line(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    tables = {k: dict(v) if isinstance(v, dict) else v for k, v in TABLES.items()}
    if settings.get("task.name"):
        tables["task"] = {}
    with pytest.raises(UserError) as error:
        ft.run("fedavg", tables, settings=settings, out=tmp_path / "run", progress=False)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


class Columns:
    """As much of a Hugging Face Dataset as is used of it."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns, self.column_names = columns, list(columns)

    def with_format(self, kind: str) -> Columns:
        return self

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


def test_columns_of_tokens_are_padded_with_a_mask() -> None:
    each = {
        "ada": Columns(input_ids=[[5, 6, 7], [8]] * 4, label=[0, 1] * 4),
        "bo": Columns(input_ids=[[5, 6, 7, 8, 9], [8]] * 4, label=[0, 1] * 4),
    }
    data = ft.federated(each, test=0.0, val=0.0)
    assert data.shape == {"input_ids": (5,), "attention_mask": (5,)}
    x, y = data.train.of(0)
    assert x["attention_mask"].sum(1).tolist() == [3 if label == 0 else 1 for label in y.tolist()]
    assert bool((x["input_ids"][x["attention_mask"] == 0] == 0).all())
    with pytest.raises(UserError, match='no column "lable"'):
        ft.federated(each, target="lable")


def test_a_part_that_the_model_does_not_take_is_named(tmp_path: Path) -> None:
    data = pairs({"left": X[:, :2], "right": X, "middle": X}, Y)
    with pytest.raises(UserError, match="middle"):
        ft.run("fedavg", data, settings={"model.name": "tests.world.plain:TwoInputs"}, out=tmp_path, progress=False)


def test_a_source_without_a_colon_is_not_taken_for_a_function() -> None:
    with pytest.raises(UserError, match="no data source"):
        parse({"data": {"source": "my_loader"}})


LOADER = """
import numpy as np
import fedtailor as ft

def load(seed):
    x = np.arange(40.0).reshape(20, 2) / 40
    return ft.federated({"ada": (x, x[:, :1] * FACTOR), "bo": (x, x[:, 1:])}, task="regression", name="lines")
"""


def test_a_loader_that_changed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a_loader_that_changes.py"
    file.write_text(LOADER.replace("FACTOR", "2"))
    tables = {"rounds": 4, "data": {"source": "a_loader_that_changes:load"}, "checkpoint": {"seconds": 0}}
    with pytest.raises(KeyboardInterrupt):
        runner.start(parse(tables), tmp_path / "run", listener=stop_after(2))
    file.write_text(LOADER.replace("FACTOR", "3"))
    with pytest.raises(UserError, match=r"data.source.*a_loader_that_changes:load"):
        runner.resume(tmp_path / "run")
    file.write_text(LOADER.replace("FACTOR", "2"))
    assert runner.resume(tmp_path / "run").results is not None


def test_a_fit_of_what_a_loader_makes_notices_that_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a_loader_to_fit.py"
    file.write_text(LOADER.replace("FACTOR", "2"))

    def fitted() -> Fit:
        return ft.fit("a_loader_to_fit:load", algorithm="ditto", rounds=1, out=tmp_path / "fit", progress=False)

    made = fitted()
    assert made.sites == ["ada", "bo"]
    assert made.personal("ada").predict(np.ones((3, 2), np.float32)).shape == (3,)
    assert fitted().record == made.record
    file.write_text(LOADER.replace("FACTOR", "3"))
    with pytest.raises(UserError, match=r"data.source.*a_loader_to_fit:load"):
        fitted()
    with pytest.raises(UserError, match="the source knows what to predict"):
        ft.fit("a_loader_to_fit:load", "y", out=tmp_path / "other")
