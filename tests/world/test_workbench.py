"""Where a researcher stumbles who moves in from another library: every door has a handle."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import fedtailor as ft
from fedtailor.api import ComparisonRuns, Run, RunWarning
from fedtailor.core.model import Model
from fedtailor.errors import ConfigError, RetryableError, UserError
from fedtailor.experiments import runner, sampling
from fedtailor.experiments.store import hold
from fedtailor.plugins import import_object
from fedtailor.testing import check_algorithm, make_data, make_model
from fedtailor.training import optimizers
from fedtailor.training.solver import Solver
from fedtailor.training.specification import PartOptions
from tests.helpers import FULL_BATCH, assert_equal, federate, make_me, run
from tests.small import one_after_the_other, stop_after
from tests.world import workbench

TABLES: dict[str, Any] = {
    "rounds": 2,
    "data": {"source": "digits", "clients": 4, "max_samples": 40, "val": 0.2},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"lr": 0.1, "batch_size": 8},
    "checkpoint": {"seconds": 0},
}
QUIET: dict[str, Any] = {"engine": "loop", "progress": False}


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a comparison are in a thread."""
    one_after_the_other(monkeypatch)


# optimizers


def test_an_optimizer_of_another_form_is_refused_with_the_form_it_should_have(tmp_path: Path) -> None:
    settings = {"local.optimizer": "tests.world.workbench:make"}
    with pytest.raises(ConfigError, match=r"make\(options, param, gradient, memory, number\)"):
        ft.run("fedavg", TABLES, settings=settings, out=tmp_path / "run", **QUIET)
    with pytest.raises(ConfigError, match=r"torch.optim.RMSprop"):
        ft.run("fedavg", TABLES, settings={"local.optimizer": "rmsprop"}, out=tmp_path / "run", **QUIET)
    with pytest.raises(ConfigError, match="proportional to lr"):
        ft.run("fedavg", TABLES, settings={"local.optimizer": "torch.optim.LBFGS"}, out=tmp_path / "run", **QUIET)


@pytest.mark.parametrize("kind", sorted(optimizers.REMEMBERED))
def test_classes_of_torch_take_torch_s_steps(kind: str) -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    given: dict[str, Any] = {"momentum": 0.5} if kind in ("SGD", "RMSprop") else {}
    solver = Solver(optimizer=f"torch.optim.{kind}", lr=0.03, batch_size=0, weight_decay=0.01, **given)
    trained = make_me(data, model, 2, solver).sgd(model.params, epochs=4)
    params = {k: v.clone().requires_grad_() for k, v in model.params.items()}
    stepper = getattr(torch.optim, kind)(params.values(), lr=0.03, weight_decay=0.01, **given)
    x, y = data.train.of(2)
    for _ in range(4):
        stepper.zero_grad()
        (torch.func.functional_call(model.module, params, (x,)) - y).square().mean().backward()
        stepper.step()
    assert_equal(trained, {k: v.detach() for k, v in params.items()})


@pytest.mark.parametrize("kind", ["RMSprop", "Adagrad", "RAdam"])
def test_classes_of_torch_in_a_stack_and_under_a_tape(kind: str) -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    solver = Solver(optimizer=f"torch.optim.{kind}", lr=0.01, batch_size=4)
    one, other = (run(federate(workbench.Average(), data, model, engine, solver)) for engine in ("loop", "vmap"))
    assert_equal(one, other)
    lr = torch.tensor(0.01, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        end = sum(v.square().sum() for v in make_me(data, model, 2, solver).sgd(model.params, lr=lr).values())
    assert isinstance(end, torch.Tensor)
    (slope,) = torch.autograd.grad(end, lr)

    def at(step: float) -> float:
        trained = make_me(data, model, 2, solver).sgd(model.params, lr=step)
        return float(sum(v.square().sum() for v in trained.values()))

    assert float(slope) == pytest.approx((at(0.01 + 1e-6) - at(0.01 - 1e-6)) / 2e-6, rel=1e-4)


def test_two_optimizers_by_part(tmp_path: Path) -> None:
    data = make_data("regression")
    model = make_model("mlp", data)
    parts = (PartOptions("head", "adam", factor=0.5), PartOptions("hidden.0", momentum=0.9))
    solver = replace(FULL_BATCH, parts=parts)
    together = make_me(data, model, 2, solver).sgd(model.params, epochs=3)
    params = {k: v.clone().requires_grad_() for k, v in model.params.items()}
    x, y = data.train.of(2)
    head = torch.optim.Adam([params[k] for k in model.head], lr=0.5 * solver.lr, eps=1e-8)
    body = torch.optim.SGD([params[k] for k in model.body], lr=solver.lr, momentum=0.9)
    for _ in range(3):
        for stepper in (head, body):
            stepper.zero_grad()
        (torch.func.functional_call(model.module, params, (x,)) - y).square().mean().backward()
        for stepper in (head, body):
            stepper.step()
    assert_equal({k: together[k] for k in model.body}, {k: params[k].detach() for k in model.body}, 1e-6)
    assert_equal({k: together[k] for k in model.head}, {k: params[k].detach() for k in model.head}, 1e-6)
    tables = TABLES | {"local": TABLES["local"] | {"parts": {"head": {"optimizer": "adam", "lr": 0.01}}}}
    made = ft.run("fedavg", tables, out=tmp_path / "run", **QUIET)
    (part,) = made.config.local.build(2).parts
    assert (part.name, part.optimizer) == ("head", "adam")
    assert part.factor == pytest.approx(0.1)
    again = ft.run("fedavg", tables, out=tmp_path / "stack", engine="vmap", progress=False)
    assert_equal(made.folder.personal("client-00"), again.folder.personal("client-00"), 1e-5)
    with pytest.raises(ConfigError, match='no part "haed"'):
        ft.run("fedavg", tables, settings={"local.parts": {"haed": {"lr": 0.1}}}, out=tmp_path / "no", **QUIET)
    with pytest.raises(ConfigError, match="SCAFFOLD"):
        ft.run("scaffold", tables, out=tmp_path / "no", **QUIET)


# features and newcomers


def test_features_of_a_split_and_of_samples() -> None:
    data = make_data()
    model = make_model("mlp", data)
    me = make_me(data, model, 2)
    x, _ = data.train.of(2)
    wanted = torch.relu(x @ model.params["hidden.0.weight"].T + model.params["hidden.0.bias"])
    assert_equal(me.features(model.params), wanted)
    assert_equal(me.features(model.params, "val"), model.features(model.params, data.val.of(2)[0]))
    assert_equal(me.features(model.params, x[:2]), wanted[:2])
    nobody = make_me(make_data(sizes={"ada": (3, 0, 2)}), model)
    assert nobody.features(model.params, "val").shape == (0, wanted.shape[1])
    with pytest.raises(ConfigError, match="has none"):
        Model(torch.nn.Linear(4, 3)).features(dict(torch.nn.Linear(4, 3).named_parameters()), x)


def test_newcomers_of_a_method_that_predicts_with_more_than_the_model() -> None:
    findings = check_algorithm(workbench.BesideTheModel(), raises=False)
    assert next(f for f in findings if f.promise == "newcomers are served").verdict == "holds"


@pytest.mark.parametrize("name", ["fedproto", "fedtgp"])
def test_prototypes_of_clients_with_different_models(name: str, tmp_path: Path) -> None:
    model = {"name": "mlp", "hidden": [8], "by_client": {"client-0[01]": {"hidden": [12, 8]}}}
    made = ft.run(name, TABLES | {"model": model}, out=tmp_path / "run", **QUIET)
    found = {client: made.folder.personal(client) for client in made.clients}
    assert found["client-00"]["hidden.0.weight"].shape[0] == 12
    assert found["client-02"]["hidden.0.weight"].shape[0] == 8
    assert torch.equal(found["client-00"]["prototypes"], found["client-02"]["prototypes"])
    assert made.results["faults"] == 0


# samplers


@pytest.mark.parametrize("name", [*sampling.SAMPLERS, "tests.world.workbench:power_of_choice"])
def test_samplers(name: str, tmp_path: Path) -> None:
    settings = {"federation.sampler": name, "federation.clients_per_round": 2, "rounds": 5}
    straight = ft.run("fedavg", TABLES, settings=settings, out=tmp_path / "straight", **QUIET)
    cohorts = [line["cohort"] for line in straight.metrics()]
    assert all(len(set(c)) == 2 for c in cohorts)
    if name == "cycle":
        assert cohorts == [[0, 1], [2, 3]] * 2 + [[0, 1]]
    with pytest.raises(KeyboardInterrupt):
        runner.start(straight.config, tmp_path / "resumed", None, stop_after(3))
    runner.resume(tmp_path / "resumed")
    assert [line["cohort"] for line in Run(tmp_path / "resumed").metrics()] == cohorts


def test_samplers_by_what_they_know() -> None:
    samples, random = np.array([1, 1, 1, 997]), np.random.default_rng(0)
    among = sampling.SamplingCandidates(1, ("a", "b", "c", "d"), 2, samples, random, {"loss": [0.1, 9.0, 0.2, 0.3]})
    assert all(3 in sampling.by_size(among) for _ in range(50))
    everybody = sampling.SamplingCandidates(1, ("a", "b", "c", "d"), 2, np.ones(4), random, among.validation)
    assert sorted(workbench.power_of_choice(everybody)) == [1, 3]  # the largest losses of all four
    times = np.zeros(4)
    for _ in range(400):
        times[list(sampling.uniform(among))] += 1
    assert times.min() > 150


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sizes", '"size"'),
        ("tests.world.workbench:make", r"make\(candidates\)"),
        ("tests.world.workbench:twice_the_first", "2 different positions"),
    ],
)
def test_samplers_that_are_wrong(name: str, words: str, tmp_path: Path) -> None:
    settings = {"federation.sampler": name, "federation.clients_per_round": 2}
    with pytest.raises(UserError, match=words):
        ft.run("fedavg", TABLES, settings=settings, out=tmp_path / "run", **QUIET)


# check


def test_check_says_what_to_define() -> None:
    broken = [f for f in check_algorithm(workbench.ForClasses(), raises=False) if f.verdict == "broken"]
    assert broken
    assert all("check(self, model, task)" in f.words for f in broken if f.where.startswith("regression"))
    assert not any("check(self" in f.words for f in broken if f.where.startswith(("classification", "adam")))


def test_check_tells_rounding_from_padding() -> None:
    findings = check_algorithm(workbench.ByRounding(), raises=False)
    words = [f.words for f in findings if f.promise == "engines agree" and f.verdict == "broken"]
    assert words
    assert all("rounding" in w and "padded" not in w for w in words)


# frames, warnings


def test_a_run_as_frames(tmp_path: Path) -> None:
    made = ft.run("ifca", TABLES, out=tmp_path / "run", **QUIET)
    assert made.rounds["round"].to_list() == [1, 2]
    line = made.metrics()[1]
    assert made.rounds["val_accuracy"][1] == pytest.approx(np.nanmean(line["val"]["accuracy"]))
    assert made.rounds["report_samples_of_cluster_0"][1] == line["report"]["samples_of_cluster_0"]
    assert made.rounds["up"].to_list() == [each["up"] for each in made.metrics()]
    assert made.client_rounds.filter(pl.col("round") == 2)["val_loss"].to_list() == line["val"]["loss"]
    assert made.faults.shape == (0, 4)
    assert made.rounds.to_dicts()[0]["faults"] == 0


def test_a_run_that_went_wrong_does_not_look_like_any_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = {"ada": 20, "bo": 40, "cy": 20}
    data = ft.federated({k: (rng.normal(size=(n, 3)), np.arange(n) % 2) for k, n in sizes.items()}, name="numbers")
    with pytest.warns(RunWarning, match=r"2 replies were not used .*round 1, bo: "):
        made = ft.run(workbench.ExplodesWithMany(), data, rounds=2, out=tmp_path / "run", **QUIET)
    assert made.faults.drop("reason").rows() == [(1, "bo", "local"), (2, "bo", "local")]


@pytest.mark.usefixtures("in_this_process")
def test_a_comparison_as_frames(tmp_path: Path) -> None:
    tables = TABLES | {"compare": {"name": "two", "algorithms": ["local", "fedavg"], "seeds": [0, 1], "workers": 1}}
    made = ft.compare(tables, out=tmp_path / "two", progress=False)
    opened = ft.load(tmp_path / "two")
    assert isinstance(opened, ComparisonRuns)
    assert opened.table["algorithm"].to_list() == ["Local", "FedAvg"]
    assert opened.clients.shape[0] == 2 * 2 * 4
    one = made.runs["FedAvg", 1]
    found = opened.clients.filter((pl.col("algorithm") == "FedAvg") & (pl.col("seed") == 1))
    assert found["last_accuracy"].to_list() == one.results["last"]["clients"]["accuracy"]
    means = [r.results["last"]["test"]["loss"]["mean"] for (label, _), r in made.runs.items() if label == "Local"]
    assert opened.table["loss"][0] == pytest.approx(np.mean(means))
    assert opened.rounds.shape[0] == 2 * 2 * 2
    assert "test loss" in (tmp_path / "two" / "table.md").read_text()


@pytest.mark.usefixtures("in_this_process")
def test_a_second_comparison_in_the_same_folder_says_who_is_there(tmp_path: Path) -> None:
    tables = TABLES | {"compare": {"name": "two", "algorithms": ["local"], "workers": 1}}
    with hold(tmp_path / "two", "comparison"), pytest.raises(RetryableError) as error:
        ft.compare(tables, out=tmp_path / "two", progress=False)
    assert f"process {os.getpid()} of " in str(error.value)
    assert " on " in str(error.value)


# names of files


def test_a_file_that_python_hides_is_named(tmp_path: Path) -> None:
    (tmp_path / "sched.py").write_text("def make():\n    return 1\n")
    code = "from fedtailor.plugins import import_object; import_object('local.optimizer', 'sched:make')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    # with -c the current folder comes first: there the user's file is the one that is found
    assert done.returncode == 0
    (tmp_path / "program.py").write_text(code)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "sched.py").write_text("def make():\n    return 1\n")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")], cwd=tmp_path / "elsewhere", capture_output=True, text=True
    )
    assert "which hides" in done.stderr
    assert str(tmp_path / "elsewhere" / "sched.py") in done.stderr


def test_what_a_file_lacks_is_said_with_the_file() -> None:
    with pytest.raises(ConfigError, match=r"no attribute 'nothing' \(.*workbench\.py\)"):
        import_object("local.optimizer", "tests.world.workbench:nothing")
