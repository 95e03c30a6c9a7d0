"""The page on a run: what it says is what the run's files say, whatever they say and whatever is missing."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections import Counter
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fedtailor.errors import RunError
from fedtailor.experiments import runner
from fedtailor.experiments.store import CHECK, RunFolder, read_json, round_line, write_json
from fedtailor.metrics.summary import share_hurt
from fedtailor.report.page import embedded
from fedtailor.report.write import write
from fedtailor.studies.explain import weights
from tests.report.pages import Parsed, parsed, report
from tests.small import POLYNOMIAL, config, stop_after

EVIL = "</script><script>alert(1)</script>"


def left_out(page: Parsed) -> dict[str, str]:
    """Titles of the sections that are named at the end, with the reasons."""
    words = [word.strip() for word in page.words]
    end = words[len(words) - words[::-1].index("Left out") :]
    return {title: reason[2:] for title, reason in pairwise(end) if reason.startswith(": ")}


def test_a_page_stands_alone(runs: Path) -> None:
    page = report(runs / "fedrep-seed0")
    assert (runs / "fedrep-seed0/report.html").stat().st_size < 5e6
    for _, attributes in page.elements:
        assert not {"src", "srcset", "action", "poster", "background"} & set(attributes)
        assert str(attributes.get("href", "#")).startswith(("#", "data:,"))
    policy = next(str(a["content"]) for a in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert "unsafe" not in policy.split("script-src")[1].split(";")[0]


def test_every_chart_has_a_name_and_data(runs: Path) -> None:
    page = report(runs / "fedrep-seed0")
    plots = [a for a in page.of("div") if a.get("class") == "plot"]
    assert [a["data-chart"] for a in plots] == list(page.charts)
    assert all(a["role"] == "img" and len(str(a["aria-label"])) > 20 for a in plots)
    assert all(chart["rows"] for chart in page.charts.values())
    ids = Counter(a["id"] for _, a in page.elements if "id" in a)
    assert max(ids.values()) == 1
    for wanted in ("learning-accuracy", "clients", "gain-local", "gain-fedavg", "sharing", "bytes", "seconds"):
        assert wanted in page.charts


def test_data_is_that_of_the_run(runs: Path) -> None:
    page, folder = report(runs / "fedrep-seed0"), RunFolder(runs / "fedrep-seed0")
    lines, results, names = folder.metrics(), folder.results, folder.about["clients"]
    assert results is not None
    local = RunFolder(runs / "local-seed0").results
    assert local is not None
    curve = page.rows("learning-accuracy")
    assert [row["round"] for row in curve] == [1, 2, 3]
    for row, line in zip(curve, lines, strict=True):
        there = [v for v in line["val"]["accuracy"] if not math.isnan(v)]
        assert row["mean"] == pytest.approx(sum(there) / len(there), rel=1e-6)
    tested = dict(zip(names, results["last"]["clients"]["accuracy"], strict=True))
    alone = dict(zip(names, local["last"]["clients"]["accuracy"], strict=True))
    assert {r["client"]: r["accuracy"] for r in page.rows("clients")} == pytest.approx(tested, rel=1e-6)
    gain = {r["client"]: r["gain"] for r in page.rows("gain-local")}
    assert gain == pytest.approx({c: tested[c] - alone[c] for c in names}, rel=1e-5, abs=1e-9)
    assert [r["seconds"] for r in page.rows("seconds")] == [line["seconds"] for line in lines]
    own = [r["bytes"] for r in page.rows("bytes") if r["algorithm"] == "FedRep"]
    assert own == [line["up"] + line["down"] for line in lines]


def test_words_and_figures(runs: Path) -> None:
    text = report(runs / "fedrep-seed0").text
    results = {name: RunFolder(runs / f"{name}-seed0").results or {} for name in ("local", "fedrep")}
    mine, alone = (results[name]["last"]["clients"]["accuracy"] for name in ("fedrep", "local"))
    mean = results["fedrep"]["last"]["test"]["accuracy"]["mean"]
    assert "FedRep trained the model mlp" in text
    assert f"test accuracy is {100 * mean:.2f} % on average" in text
    assert f"Hurt {100 * share_hurt(mine, alone, higher_is_better=True):.0f} %" in text
    assert "Stays private head May be sent body, sample count" in text
    assert "@inproceedings{collins2021" in text
    assert 'source = "digits"' in text


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", EVIL, '"><img src=x onerror=alert(1)>', 'a,b\n"c"\'', "日本"]
)
def test_names_are_only_text(runs: Path, name: str) -> None:
    for run in runs.iterdir():
        about = read_json(run / "run.json")
        about["clients"][0] = name
        write_json(run / "run.json", about | {"data": name, "command": name})
    page = report(runs / "fedrep-seed0")
    plain = report(runs / "local-seed0")
    assert len(page.scripts) == len(plain.scripts) == 4
    assert not page.of("img")
    assert name in [row["client"] for row in page.rows("clients")]
    assert " ".join(name.split()) in page.text
    assert len(parsed(f"<script>{embedded([])}</script>").scripts) == 1


def test_a_run_alone_says_so(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "fedavg-seed0", tmp_path / "alone/fedavg-seed0")
    page = report(tmp_path / "alone/fedavg-seed0")
    assert "gain-local" not in page.charts
    assert {"Gain over Local", "What is shared"} <= left_out(page).keys()


def test_another_task_is_no_reference(runs: Path) -> None:
    shutil.rmtree(runs / "local-seed0")
    runner.start(config("rounds=4", "algorithm.name=local"), runs / "local-seed0")
    assert "gain-local" not in report(runs / "fedrep-seed0").charts


def test_an_unfinished_run(tmp_path: Path, runs: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        runner.start(config("rounds=3", "algorithm.name=fedrep"), runs / "half", listener=stop_after(2))
    page = report(runs / "half")
    assert "not finished: 2 of 3 rounds" in page.text
    assert [row["round"] for row in page.rows("learning-accuracy")] == [1, 2]
    assert {"Clients", "What is shared"} <= left_out(page).keys()
    (runs / "half/metrics.jsonl").unlink()
    with pytest.raises(RunError, match="shorter than at the checkpoint"):
        report(runs / "half")
    shutil.rmtree(runs / "half/checkpoint")  # as before the first round
    page = report(runs / "half")
    assert page.charts == {}
    assert {"Learning", "Traffic", "Time"} <= left_out(page).keys()


def test_numbers_that_are_none_and_lines_that_are_broken(runs: Path) -> None:
    path = runs / "fedrep-seed0/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["val"]["accuracy"] = [math.nan] * 4
    lines[1]["val"]["accuracy"][0] = math.nan
    lines[1]["report"] = {"odd thing": math.inf, "list": [1.0, math.nan], "text": "no"}
    broken = b'{"round": 4, "coh\n{"round": 5}\n{"rou'
    path.write_bytes(b"".join(round_line({k: v for k, v in line.items() if k != CHECK}) for line in lines) + broken)
    page = report(runs / "fedrep-seed0")
    assert next((row["round"], row["clients"]) for row in page.rows("learning-accuracy")) == (2, 3)
    assert re.search(r"\b2\b.*metrics\.jsonl", page.text)
    assert page.rows("reported-list") == [{"entry": 1, "value": 1.0}, {"entry": 2, "value": None}]
    assert "reported-odd thing" not in page.charts


def test_no_figures_at_all(runs: Path) -> None:
    results = read_json(runs / "fedrep-seed0/results.json")
    for kind in ("last", "selected"):
        results[kind]["clients"]["accuracy"] = [math.nan] * 4
        results[kind]["test"]["accuracy"] |= {"mean": math.nan, "std": math.nan, "worst_tenth": math.nan, "clients": 0}
    write_json(runs / "fedrep-seed0/results.json", results)
    page = report(runs / "fedrep-seed0")
    assert "No client has test samples." in page.text
    assert "Clients" in left_out(page)


def test_one_client_and_regression(tmp_path: Path) -> None:
    one = POLYNOMIAL | {"data": {"source": "polynomial", "clients": 1, "samples": 40}, "model": {"name": "linear"}}
    for name in ("local", "fedavg"):
        runner.start(config("rounds=2", f"algorithm.name={name}", task=one), tmp_path / name)
    page = report(tmp_path / "fedavg")
    assert "for 1 client on polynomial" in page.text
    assert "its test rmse is" in page.text
    assert "Clients" in left_out(page)


def test_a_test_curve_is_drawn_if_recorded(tmp_path: Path) -> None:
    runner.start(config("rounds=2", "evaluation.test_curve=true"), tmp_path / "run")
    rows = report(tmp_path / "run").rows("learning-accuracy")
    assert [(row["round"], row["data"]) for row in rows] == [
        (1, "validation"),
        (2, "validation"),
        (1, "test"),
        (2, "test"),
    ]


def test_masks_and_their_overlap(tmp_path: Path) -> None:
    runner.start(config("rounds=3", "algorithm.name=fedselect"), tmp_path / "run")
    page = report(tmp_path / "run")
    saved = read_json(tmp_path / "run/shares.json")["clients"]
    assert {(r["client"], r["part"]): r["share"] for r in page.rows("sharing")} == pytest.approx(
        {(client, part): share for client, row in saved.items() for part, share in row.items()}, rel=1e-6
    )
    overlaps = [id for id in page.charts if id.startswith("overlap-")]
    assert overlaps
    pairs = {(r["client"], r["other"]): r["overlap"] for r in page.rows(overlaps[0])}
    assert all(pairs[a, b] == pairs[b, a] for a, b in pairs)


def test_degrees_and_numbers_of_the_algorithm(tmp_path: Path) -> None:
    task = POLYNOMIAL | {"model": {"name": "linear", "bias": False, "dtype": "float64"}}
    runner.start(config("rounds=2", "algorithm.name=empiricalbayes", task=task), tmp_path / "run")
    page = report(tmp_path / "run")
    assert {"sharing", "degrees"} <= set(page.charts)
    assert {row["part"] for row in page.rows("degrees")} == {"1", "x", "x^2", "x^3"}
    assert any(id.startswith("reported-") for id in page.charts)


def test_weights_over_rounds(tmp_path: Path) -> None:
    runner.start(
        config("rounds=2", "algorithm.name=duw-fedavg", "algorithm.outer_iterations=1"),
        tmp_path / "run",
    )
    page = report(tmp_path / "run")
    found = {(r["round"], r["client"]): r["weight"] for r in page.rows("weights")}
    assert found == pytest.approx(
        {(r, c): w for r, row in weights(tmp_path / "run").items() for c, w in row.items()}, rel=1e-6
    )
    assert "Rounds up to 0 are the preparation" in page.text


def test_own_code_that_a_run_names_is_not_imported(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (runs / "fedrep-seed0/config.toml").read_text().replace('name = "fedrep"', 'name = "evil:Evil"')
    (runs / "fedrep-seed0/config.toml").write_text(text)
    about: dict[str, Any] = read_json(runs / "fedrep-seed0/run.json")
    write_json(runs / "fedrep-seed0/run.json", about | {"config_sha256": hashlib.sha256(text.encode()).hexdigest()})
    (runs / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(runs)
    page = report(runs / "fedrep-seed0")
    assert "evil:Evil on digits" in page.text
    assert {"What left the clients", "What is shared"} <= left_out(page).keys()


def test_runs_from_before_the_checksum_of_their_configuration(runs: Path) -> None:
    for run in runs.iterdir():
        about = read_json(run / "run.json")
        del about["config_sha256"]
        write_json(run / "run.json", about)
    page = report(runs / "fedrep-seed0")
    assert "gain-local" in page.charts
    assert '"config_sha256"' in left_out(page)["What is shared"]


def test_what_cannot_be_reported(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="neither a run nor a folder of runs"):
        write(tmp_path / "nowhere")
    with pytest.raises(RunError, match="is a folder; --out names the file"):
        write(runs / "fedrep-seed0", runs)
    results = runs / "fedrep-seed0/results.json"
    results.write_text(results.read_text().replace("0.", "1.", 1))
    with pytest.raises(RunError, match="changed since it was written"):
        write(runs / "fedrep-seed0")


def test_vendored_files_are_those_of_the_packages() -> None:
    sums = {
        "d3-7.9.2.min.js": "912111098ea99503a6f4967361d2bbdc9dbf58cf9c678c8e27e5b02d1a07f0c1",
        "plot-0.6.17.min.js": "4358086467740777dd788d6b27a95cebdbaefdd50c730a3060117073bd7134cb",
    }
    vendor = files("fedtailor.report") / "vendor"
    assert {f.name for f in vendor.iterdir()} == {*sums, "LICENSES.txt"}
    for name, digest in sums.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest
        assert b"</script" not in (vendor / name).read_bytes()
