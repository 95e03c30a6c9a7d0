"""The pages on runs, comparisons and models work as they stand."""

import json
import re
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedtailor.algorithms import algorithms
from fedtailor.core.algorithm import KEEPS, LEARNS
from fedtailor.core.task import HIGHER_IS_BETTER, TASKS
from fedtailor.experiments.sections import FederationSection, SearchSection
from fedtailor.experiments.store import RunFolder
from fedtailor.experiments.tracking import of_results, of_round
from fedtailor.metrics.library import known_metrics
from tests.docs.pages import ROOT, run_page


def test_resume(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/how-to/resume.md", monkeypatch)
    assert re.search(r"\b3\b.*\b6\b.*runs/interrupted", capsys.readouterr().out)


def test_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs/how-to/architectures.md", monkeypatch)


def test_from_lme4(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = run_page(ROOT / "docs/how-to/from-lme4.md", monkeypatch)
    there, ours = page.there, page.by_name
    for ours_is, name in (("dose", "dose"), ("armplacebo", "C(arm)[T.placebo]")):
        assert ours[ours_is].estimate == pytest.approx(there.params[name], abs=1e-4)
        assert ours[ours_is].error == pytest.approx(there.bse[name], abs=1e-4)
    table = Path("paper/model.tex").read_text()
    assert table.count(r"\\") >= 5
    assert "Odds ratio" in table
    assert json.loads(Path("paper/model.json").read_text())["family"] == "binomial"
    out = capsys.readouterr().out
    assert 'formula = "score ~ dose * arm + (1 + dose | site)"' in out
    assert out.rstrip().endswith(r"\end{table}")


def test_advise(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/how-to/advise.md", monkeypatch)
    advice = json.loads(Path("advice/advice.json").read_text())
    assert list(advice["sites"]) == ["aachen", "bern", "cork", "delft", "essen", "faro"]
    assert advice["worth"]["worth"]["aachen"]["essen"] > 0
    assert len(Path("bern.csv").read_text().splitlines()) == 21
    assert not Path("runs/clinics/fit.json").exists()
    assert "departures/0001.json (checksum)" in capsys.readouterr().out


def test_images_and_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra images")
    run_page(ROOT / "docs/how-to/images-and-text.md", monkeypatch)
    results = [RunFolder(Path("runs") / name).results for name in ("scans", "listed")]
    assert results[0] is not None
    assert results[1] is not None
    assert results[0]["last"]["clients"] == results[1]["last"]["clients"]  # the same images


def test_segmentation(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra images")
    pytest.importorskip("monai", reason="needs MONAI, of the extra segmentation")
    page = run_page(ROOT / "docs/how-to/segmentation.md", monkeypatch)
    results = RunFolder(Path("runs/scans")).results
    assert results is not None
    assert results["last"]["test"]["dice"]["mean"] > 0.8
    assert "data:image/png;base64," in Path("runs/scans/report.html").read_text()
    assert len(list(Path("north-masks").glob("*.png"))) == 16
    assert Path("3-mask.png").is_file()
    assert page.run.results["metric"] == "dice"


LIBRARIES = ("transformers", "timm", "monai", "torch_geometric")


@pytest.mark.parametrize("package", ["", *LIBRARIES])
def test_bring_your_model(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(Exception), warnings.catch_warnings(action="ignore"):  # as of a torchvision for another torch
        import_module(package or "fedtailor")
    if package and package not in sys.modules:
        pytest.skip(f"needs {package}")
    page = run_page(ROOT / "docs/how-to/bring-your-model.md", monkeypatch, without=set(LIBRARIES) - {package})
    metric = "accuracy" if package else "rmse"
    assert page.run.results["last"]["test"][metric]["mean"] >= 0
    assert page.run.results["faults"] == 0
    assert RunFolder(Path("runs/forecast")).about["engine"] in ("loop", "pool")


def test_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/how-to/devices.md", monkeypatch)
    assert re.search(r"^device     cpu \(torch .* finds no accelerator\)$", capsys.readouterr().out, re.MULTILINE)


def test_messages_of_the_page_on_runs_are_in_the_code() -> None:
    page = (ROOT / "docs/how-to/resume.md").read_text(encoding="utf-8")
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src/fedtailor").rglob("*.py"))
    code = code.replace("{CONFIG}", "config.toml")
    messages = [line.split("`")[1] for line in page.split("exit code 2:\n")[1].splitlines() if line.startswith("| `")]
    assert len(messages) == 7
    for message in [*messages, "no space left on the disk; the last checkpoint is intact. Free some, then "]:
        assert message in code
        assert message in page


def test_every_method_is_in_the_guide_where_it_says_itself() -> None:
    page = (ROOT / "docs/how-to/choose.md").read_text(encoding="utf-8")
    ours = [kind for kind in algorithms().values() if kind.__module__.startswith("fedtailor.")]
    for learns, words in LEARNS.items():
        by_part = {keeps: [k.title for k in ours if (k.learns, k.keeps) == (learns, keeps)] for keeps in KEEPS}
        row = "; ".join(f"*{keeps}*: {', '.join(titles)}" for keeps, titles in by_part.items() if titles)
        assert f"| {learns}: {words} | {row} |" in page


def test_tasks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/how-to/tasks.md", monkeypatch)
    assert "c_index" in capsys.readouterr().out
    assert (RunFolder(Path("runs/clinics")).results or {})["metric"] == "macro_f1"


def test_every_metric_of_every_task_is_listed() -> None:
    page = (ROOT / "docs/how-to/tasks.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", page, re.MULTILINE))
    assert rows.keys() == TASKS.keys()
    for name, kind in TASKS.items():
        listed = {metric.strip() for metric in re.sub(r"\(.*?\)", "", rows[name]).split(",")}
        assert listed - {"top_3"} == known_metrics(kind()).keys()
        assert rows[name].startswith(kind.metrics[0])


def test_data_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs/how-to/data-from-python.md", monkeypatch)


def test_compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/how-to/compare.md", monkeypatch)
    out = capsys.readouterr().out
    assert re.search(r"search/ditto_local\.lr_0\.3__lam_1\.0-seed1000.*6/6", out)
    assert re.search(r"\b4\b.*\b1000\b", out)
    assert re.search(r"FedAvg.*local\.lr.*0\.3.*\b2\b.*\b4\b", out)


def test_all_keys_of_a_search_are_listed_with_their_defaults() -> None:
    section = (ROOT / "docs/how-to/compare.md").read_text(encoding="utf-8").split("## Search settings\n")[1]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    listed = {key.strip(" `"): default.strip(" `") for key, default in rows}
    defaults = SearchSection().model_dump()
    assert listed == {key: str(value) if value != {} else "none" for key, value in defaults.items()}


def test_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/how-to/report.md", monkeypatch)
    out = capsys.readouterr().out
    for file in ("runs/small/fedrep-seed0/report.html", "small.html"):
        assert f"wrote {file}\n" in out
        assert 'id="charts"' in Path(file).read_text(encoding="utf-8")


def test_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs/how-to/several-machines.md"
    run_page(page, monkeypatch)
    assert RunFolder(Path("runs/two")).results is not None
    text = page.read_text(encoding="utf-8")
    assert f"`federation.timeout` seconds ({FederationSection().timeout:g})" in text


def test_adapters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/how-to/adapters.md", monkeypatch)
    assert "last round" in capsys.readouterr().out


def test_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs/how-to/own-model.md", monkeypatch)


def test_choose(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/how-to/choose.md", monkeypatch)
    assert "Learn2pFed-Net" in capsys.readouterr().out


def test_reproduce(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("configs").symlink_to(ROOT / "configs")
    page = ROOT / "docs/how-to/reproduce.md"
    run_page(page, monkeypatch)
    out = capsys.readouterr().out
    assert "learn2pfed/table1\n" in out
    assert "(paper's), 2" in out
    shown = re.findall(
        r"^\| (?:oracle|EmpiricalBayes) \| ([\d.e-]+).*? \| ([\d.e-]+).*? \| ([\d.e-]+)",
        page.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    figures = [figure["mean"] for figure in json.loads(Path("figures.json").read_text())]
    assert [float(v) for row in shown for v in row] == pytest.approx(figures, rel=0.01)


@pytest.mark.skipif(None in map(find_spec, ("tensorboard", "mlflow")), reason="trackers are not installed")
def test_track(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs/how-to/track.md", monkeypatch)
    assert list(Path("runs/tracked/tensorboard").iterdir())
    assert list(Path("mlflow-store").rglob("metrics/val/accuracy"))


def test_names_of_what_trackers_are_told_are_listed() -> None:
    page = (ROOT / "docs/how-to/track.md").read_text(encoding="utf-8")
    line = {"round": 1, "cohort": [0], "val": {"accuracy": [0.5], "loss": [1.0]}, "up": 1, "down": 1, "trips": 1}
    told = of_round(line | {"seconds": 1.0}, HIGHER_IS_BETTER)
    ended = of_results(
        {k: {"round": 1, "test": {"accuracy": {"mean": 1, "worst_tenth": 1}}} for k in ("last", "selected")}
    )
    names = [*told, *(name for _, values in ended for name in values)]
    assert [n for n in names if "worst tenth" not in n and f"`{n}`" not in page] == []


@pytest.mark.skipif(None in map(find_spec, ("optuna", "matplotlib")), reason="extras are not installed")
def test_paper(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/how-to/paper.md", monkeypatch)
    out = capsys.readouterr().out
    assert "by Optuna (TPE), seed 1000" in out
    assert re.search(r"^FedAdam +\d+ +\d+ ", out, re.MULTILINE)  # its test against the first row


def test_the_method_of_the_page_on_papers_is_that_of_its_configuration() -> None:
    page = (ROOT / "docs/how-to/paper.md").read_text(encoding="utf-8")
    file = (ROOT / "configs/paper/head_blend.py").read_text(encoding="utf-8")
    start = "    share: float"
    assert page.split(start)[1].split("```")[0].strip() == file.split(start)[1].strip()


@pytest.mark.skipif(find_spec("optuna") is None, reason="optuna is not installed")
def test_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs/how-to/callbacks.md", monkeypatch)


def test_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs/how-to/optimizers.md", monkeypatch)


def test_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs/how-to/sampling.md", monkeypatch)


def test_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs/how-to/frames.md", monkeypatch)


def test_short_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs/how-to/short-methods.md", monkeypatch)


def test_algorithm_members(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs/how-to/algorithm-members.md", monkeypatch)
