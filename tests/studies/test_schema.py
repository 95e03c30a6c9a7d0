"""The JSON schema of a configuration says what the program says: it takes every file of ours, and no misspelt key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedtailor.experiments.config import CONFIGS, CompareConfig, parse, read_toml
from fedtailor.studies.schema import configuration_schema, template
from tools.check_configs import checked, files_of, mistakes


@pytest.fixture(scope="module")
def schema() -> Any:
    return checked(json.loads(json.dumps(configuration_schema(), default=str)))


def test_it_takes_every_configuration_of_ours(schema: Any, tmp_path: Path) -> None:
    (tmp_path / "init.toml").write_text(template())
    files = files_of([CONFIGS, tmp_path])
    assert len(files) > 30
    assert list(mistakes(schema, files)) == []


WRONG = [
    "roundz = 3",
    "local = { lrr = 0.1 }",
    "local = { lr = 0.0 }",
    "local = { lr = 'fast' }",
    "data = { source = 'digits', clientz = 3 }",
    "data = { source = 'digitz' }",
    "data = { clientz = 3 }",
    "data = { source = 'folder' }",
    "model = { name = 'mlp', hiden = [3] }",
    "model = { name = 'mpl' }",
    "model = { hiden = [3] }",
    "algorithm = { name = 'ditto', lamb = 1.0 }",
    "algorithm = { name = 'ditto', lam = 'much' }",
    "algorithm = { name = 'dito' }",
    "compare = { algorithms = ['dito'] }",
    "compare = { algorithms = [{ name = 'ditto', lamb = 1 }] }",
    "search = { space = { 'local.lrr' = [1] } }",
]


@pytest.mark.parametrize("text", WRONG)
def test_it_refuses_what_the_program_refuses(schema: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text(text)
    assert len(list(mistakes(schema, [tmp_path / "wrong.toml"]))) == 1


RIGHT = [
    "",
    "algorithm = { name = 'my.module:Mine', anything = 1 }",
    "algorithm = { name = 'Ditto', lam = 1 }",
    "model = { name = 'my.module:Net', width = 3, buffers = 'mean' }",
    "compare = { algorithms = ['local', { name = 'ditto', lam = 1.0, label = 'Ditto, strong' }] }",
    "[search.space.local]\nlr = [0.1, 1.0]",
]


@pytest.mark.parametrize("text", RIGHT)
def test_it_takes_what_the_program_takes(schema: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "right.toml").write_text(text)
    parse(read_toml(tmp_path / "right.toml"), CompareConfig)
    assert list(mistakes(schema, [tmp_path / "right.toml"])) == []


def test_a_published_table_with_a_misspelt_key_is_refused(schema: Any, tmp_path: Path) -> None:
    text = (CONFIGS / "learn2pfed/table1.toml").read_text()
    for right, wrong in (("metric =", "metrik ="), ('"algorithm.name"', '"algorithm.nome"'), ("rounds", "roundz")):
        assert right in text
        (tmp_path / "wrong.toml").write_text(text.replace(right, wrong, 1))
        assert len(list(mistakes(schema, [tmp_path / "wrong.toml"]))) == 1, wrong
