"""What programs read: `--json` on every command that prints a table, the schema, and completion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from fedtailor.algorithms import algorithms
from fedtailor.experiments.store import RESULTS, read_json
from tests.cli.conftest import Call
from tests.made_sites import make_sites
from tests.small import one_after_the_other


def parsed(call: Call, *arguments: str | Path) -> Any:
    """Standard output, which is JSON and nothing else."""
    code, out, err = call(*arguments)
    assert code == 0, err
    return json.loads(out)


def test_a_run_and_what_it_did(call: Call) -> None:
    ran = parsed(call, "run", "small.toml", "--out", "one", "--json")
    assert (ran["what"], ran["finished"], ran["rounds"]) == ("run", True, 2)
    assert ran["results"] == read_json(Path("one") / RESULTS)
    assert ran["config"]["algorithm"]["name"] == "fedrep"
    assert parsed(call, "show", "one", "--json") == ran
    assert parsed(call, "resume", "one", "--json") == ran


def test_a_comparison(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    one_after_the_other(monkeypatch)
    said = call("compare", "small.toml", "--out", "grid", "--json")
    compared = json.loads(said.out)
    assert "2/2 rounds" in said.err
    assert [row["algorithm"] for row in compared["table"]] == ["Local", "FedAvg"]
    shown = parsed(call, "show", "grid", "--json")
    assert shown["finished"]
    for row, again in zip(compared["table"], shown["table"], strict=True):
        assert row.items() <= again.items()


def test_lists(call: Call) -> None:
    lists = parsed(call, "list", "--json")
    assert list(lists) == ["algorithms", "data", "models", "engines"]
    assert {entry["name"] for entry in lists["algorithms"]} == set(algorithms())
    ditto = next(entry for entry in lists["algorithms"] if entry["name"] == "ditto")
    assert ditto["options"]["lam"] == algorithms()["ditto"]().lam  # type: ignore[attr-defined]
    assert parsed(call, "reproduce", "list", "--json", "-") == call("reproduce", "list").out.split()


def test_sharing(call: Call) -> None:
    parsed(call, "run", "small.toml", "--out", "net", "--set", "algorithm.name=learn2pfed-net", "--json")
    shares = parsed(call, "explain", "net", "--json")["shares"]
    assert all(0 <= share <= 1 for client in shares.values() for share in client.values())


def test_a_fit_and_a_newcomer(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    one_after_the_other(monkeypatch)
    make_sites(Path("sites"), sites=3, rows=40)
    small = ("--rounds", "2", "--algorithm", "fedper", "--set", "model.name=mlp", "--set", "model.hidden=[4]")
    fitted = parsed(call, "fit", "sites", "--target", "outcome", "--out", "fit", *small, "--json")
    assert Path(fitted["report"]).exists()
    shown = parsed(call, "show", "fit", "--json")
    assert (shown["what"], shown["sites"], shown["means"]) == ("fit", fitted["sites"], fitted["means"])
    newcomer = next(Path("sites").iterdir())
    joined = parsed(call, "onboard", "fit", "--data", newcomer, "--name", "late", "--json")
    assert joined["name"] == "late"
    assert Path(joined["model"]).exists()


def test_a_published_table(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    one_after_the_other(monkeypatch)
    row = ("--rows", "oracle", "--seeds", "1", "--out", "table")
    figures = parsed(call, "reproduce", "learn2pfed/table1", *row, "--json", "-")
    assert {figure["row"] for figure in figures} == {"oracle"}
    assert not Path("-").exists()


def test_the_schema_has_every_key_with_its_sentence(call: Call) -> None:
    schema = parsed(call, "schema")
    Draft202012Validator.check_schema(schema)
    local = schema["else"]["properties"]["local"]["properties"]
    assert (local["lr"]["default"], local["lr"]["description"]) == (0.05, "Learning rate.")


def test_completion_is_offered(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--install-completion" in call("--help").out
    monkeypatch.setenv("_FEDTAILOR_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "fedtailor re")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert sorted(call().out.split()) == ["report", "reproduce", "resume"]
