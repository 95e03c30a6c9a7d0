"""Configurations: every mistake names its key, settings are TOML, defaults are written and read back the same."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedtailor.errors import ConfigError, UserError
from fedtailor.experiments.building import build_experiment
from fedtailor.experiments.config import CompareConfig, RunConfig, parse, read_toml, with_settings
from fedtailor.studies.schema import template
from tests.small import config


def mistake(*settings: str, kind: type[RunConfig] = RunConfig) -> str:
    """The error of a default configuration with these settings, found before anything is written."""
    with pytest.raises(UserError) as caught:
        build_experiment(parse(with_settings({}, settings), kind, "my.toml"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("loacl.lr=1", 'my.toml: unknown key "loacl"; did you mean "local"?'),
        ("ronuds=3", 'my.toml: unknown key "ronuds"; did you mean "rounds"?'),
        ("data.clinets=3", 'my.toml: unknown key "data.clinets"; did you mean "clients"?'),
        (
            "local.learning_rate=3",
            'my.toml: unknown key "local.learning_rate"; known: accumulate, augment, batch_size, clip',
        ),
        ("federation.engin='loop'", 'my.toml: unknown key "federation.engin"; did you mean "engine"?'),
        ("checkpoint.evrey=2", 'my.toml: unknown key "checkpoint.evrey"; did you mean "every"?'),
        ("evaluation.testcurve=true", 'my.toml: unknown key "evaluation.testcurve"; did you mean "test_curve"?'),
        ("algorithm.head_epohcs=3", 'algorithm.head_epohcs: FedRep has no option "head_epohcs"; did you mean'),
        ("algorithm.nmae=ditto", 'algorithm.nmae: FedRep has no option "nmae"; did you mean "name"?'),
        ("algorithm.name=fedrepp", 'algorithm.name: no algorithm "fedrepp"; did you mean "fedrep"?'),
        ("model.hiden=[3]", 'model.hiden: mlp has no option "hiden"; did you mean "hidden"?'),
        ("model.name=mpl", 'model.name: no model "mpl"; did you mean "mlp"?'),
        ("model.name=no.such:Net", 'model.name: cannot import "no.such:Net"'),
        ("data.source=mnits", 'my.toml: data.source: no data source "mnits"; did you mean "mnist"?'),
    ],
)
def test_misspelt_name_points_to_the_nearest(setting: str, message: str) -> None:
    assert mistake(setting).startswith(message)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rounds=0", "my.toml: rounds = 0: Input should be greater than or equal to 1"),
        ("rounds=many", "my.toml: rounds = 'many': Input should be a valid integer"),
        ("local.lr=-0.1", "my.toml: local.lr = -0.1: Input should be greater than 0"),
        ("local.lr=", "my.toml: local.lr = '': Input should be a valid number"),
        ("local.clip=inf", "my.toml: local.clip = inf: must be a finite number"),
        ("algorithm.head_epochs=-inf", "my.toml: algorithm.head_epochs = -inf: must be a finite number"),
        ("environment.speed=[1.0, nan]", "my.toml: environment.speed = nan: must be a finite number"),
        (
            "model.head=[out]",
            "my.toml: model.head = '[out]': Input should be a valid list such as [\"out\"]; from a shell: "
            "--set 'model.head=[\"out\"]'",
        ),
        ("environment.epochs=3", "my.toml: environment.epochs = 3: Input should be a valid list such as [3]; "),
        ("local=3", "my.toml: local = 3: Input should be a valid dictionary"),
        ("data=digits", "my.toml: data = 'digits': Input should be a valid dictionary"),
        ("data.partition=dirichelt", "my.toml: data.partition = 'dirichelt': Input should be 'iid', 'dirichlet'"),
        ("data.max_samples=0", "my.toml: data.max_samples = 0: Input should be greater than or equal to 1"),
        ("model.dtype=float16", "my.toml: model.dtype = 'float16': Input should be 'float32' or 'float64'"),
        ("model.head=out", "my.toml: model.head = 'out': Input should be a valid list such as [\"out\"]; "),
        ("data.source=folder", "my.toml: data.path: not given; Folder with one .csv"),
        ("federation.engine=gpu", "my.toml: federation.engine = 'gpu': Input should be 'auto', 'loop', 'vmap'"),
        ("data.alpha=0", "data.alpha = 0.0: must be above 0"),
        ("data.test=0.99", "data.test = 0.99 and data.val = 0.1 leave nothing to train on"),
        ("algorithm.head_epochs=few", "algorithm.head_epochs: 'few': Input should be a valid integer"),
        ("federation.clients_per_round=11", "federation.clients_per_round = 11: there are only 10 clients"),
        ("federation.min_replies=11", "federation.min_replies = 11: more than the clients of a round"),
    ],
)
def test_wrong_value_names_its_key(setting: str, message: str) -> None:
    assert mistake(setting).startswith(message)


def test_min_replies_counts_the_drawn_clients() -> None:
    assert "min_replies = 4" in mistake("federation.clients_per_round=3", "federation.min_replies=4")
    assert build_experiment(config("federation.clients_per_round=3", "federation.min_replies=3")).seed == 0


def test_compare_keys_are_checked() -> None:
    assert mistake("compare.seedz=[1]", kind=CompareConfig).endswith('"compare.seedz"; did you mean "seeds"?')
    assert "compare.algorithms = []" in mistake("compare.algorithms=[]", kind=CompareConfig)
    assert mistake("compare.seeds=[1]").startswith('my.toml: unknown key "compare"')


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("rounds=7", {"rounds": 7}),
        ("local.lr=1e-3", {"local": {"lr": 0.001}}),
        ("a.b.c=true", {"a": {"b": {"c": True}}}),
        ("model.hidden=[3, 4]", {"model": {"hidden": [3, 4]}}),
        ('model.head=["out"]', {"model": {"head": ["out"]}}),
        ("algorithm.name=fedavg+ft", {"algorithm": {"name": "fedavg+ft"}}),
        ("data.path=/some where/x=y", {"data": {"path": "/some where/x=y"}}),
        (' rounds ="7"', {"rounds": "7"}),
    ],
)
def test_setting_is_toml_or_else_text(setting: str, wanted: dict[str, Any]) -> None:
    assert with_settings({}, [setting]) == wanted


def test_settings_change_a_copy_and_the_last_one_counts() -> None:
    tables = {"local": {"lr": 1.0, "clip": 2.0}}
    assert with_settings(tables, ["local.lr=3", "local.lr=4"]) == {"local": {"lr": 4, "clip": 2.0}}
    assert tables == {"local": {"lr": 1.0, "clip": 2.0}}


@pytest.mark.parametrize("setting", ["rounds", "=3", "", " =3"])
def test_setting_of_the_wrong_form(setting: str) -> None:
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        with_settings({}, [setting])


def test_setting_below_a_value_that_is_no_table() -> None:
    with pytest.raises(ConfigError, match=r'--set.*rounds.x=3.*"rounds"'):
        with_settings({"rounds": 3}, ["rounds.x=3"])


def test_template_is_the_defaults() -> None:
    for kind in (RunConfig, CompareConfig):
        text = template(kind)
        assert parse(tomllib.loads(text), kind) == kind()
        assert "None" not in text  # every key has its sentence
    lines = template().splitlines()
    assert lines[lines.index(next(x for x in lines if x.startswith("[data]"))) + 1].startswith('source = "digits"')


def test_template_has_the_options_of_the_default_model_and_algorithm_as_comments() -> None:
    lines = [line.split("  #")[0] for line in template().splitlines()]
    assert lines[lines.index("[algorithm]") + 1 :][:3] == ['name = "fedrep"', "# head_epochs = 10", "# body_epochs = 1"]
    assert "# hidden = [128, 128]" in lines[lines.index("[model]") : lines.index("[algorithm]")]
    parse(tomllib.loads(template().replace('"fedrep"', '"ditto"').replace('"mlp"', '"linear"')))


def test_plain_form_reads_back() -> None:
    made = config("algorithm.name=ditto", "algorithm.lam=0.5", "data.samples_per_client=3", "model.head=['out']")
    assert parse(made.plain()) == made
    assert "max_samples" not in config("data.source=digits", task={}).plain()["data"]  # what is not given is left out


def test_folder_path_does_not_depend_on_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = config("data.source=folder", "data.path=sites", "data.target=y", task={})
    assert made.plain()["data"]["path"] == str(tmp_path / "sites")


@pytest.mark.parametrize(
    "setting",
    [
        "algorithm.name=ditto",
        "algorithm.head_epochs=3",
        "federation.engine=loop",
        "checkpoint.every=3",
    ],
)
def test_same_task(setting: str) -> None:
    assert config(setting).task_id == config().task_id


@pytest.mark.parametrize(
    "setting",
    ["seed=1", "rounds=6", "data.clients=5", "model.hidden=[9]", "local.lr=0.2", "federation.clients_per_round=2"],
)
def test_another_task(setting: str) -> None:
    assert config(setting).task_id != config().task_id


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_toml(tmp_path)
    bad = tmp_path / "bad.toml"
    bad.write_text("rounds = \n")
    with pytest.raises(ConfigError, match=r"bad.toml.*\b1\b.*\b10\b"):
        read_toml(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bad.toml: .*can't decode"):
        read_toml(bad)
