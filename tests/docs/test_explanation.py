"""The pages that explain: their code runs, and the numbers worked out in words are those of the program."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hypergradients
from fedtailor.algorithms import algorithms
from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from tests.docs.pages import ROOT, blocks, run_page
from tests.small import ADAPTED, CLASSES, COUNTS


def test_federation(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_page(ROOT / "docs/explanation/federation.md", monkeypatch).found
    text = " ".join((ROOT / "docs/explanation/federation.md").read_text(encoding="utf-8").split())
    for value in ("`w` = 1.5", "The sum is 0.5", "adds them up: -0.5", "4 and 8 stay"):
        assert value in text
    assert [found["w"].item(), found["loss"].item(), found["by first w"].item(), *found["by lr"].tolist()] == [
        1.5,
        0.5,
        -0.5,
        4,
        8,
    ]


def test_secure_aggregation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs/explanation/secure-aggregation.md"
    run_page(page, monkeypatch)
    out = capsys.readouterr().out
    printed = next(b.text for b in blocks(page) if b.language == "text")
    assert printed in out
    assert re.search(r"\b1\b.*\b4\b", out)


def test_evaluation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/explanation/evaluation.md", monkeypatch)
    out = capsys.readouterr().out
    assert "hurt       unknown" not in out
    assert "worst tenth" in out


ROW = re.compile(r"^\| ([\w-]+) \| (\d+) \| ([\d-]+) \| ([\d.e-]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def test_hypergradients(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/explanation/hypergradients.md").read_text(encoding="utf-8")
    assert "```sh\npython benchmarks/hypergradients.py\n```" in page
    hypergradients.main()
    shown, found = ROW.findall(page), ROW.findall(capsys.readouterr().out)
    assert len(shown) == 15
    assert [row[:3] + row[4:] for row in shown] == [row[:3] + row[4:] for row in found]
    assert [float(row[3]) for row in shown] == pytest.approx([float(row[3]) for row in found], rel=0.1)


def test_personalization(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs/explanation/personalization.md", monkeypatch)


def test_privacy(monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / "docs/explanation/privacy.md", monkeypatch)


def who_sees() -> dict[str, set[str]]:
    """The algorithms in the table of the page on privacy, by what the server sees."""
    text = (ROOT / "docs/explanation/privacy.md").read_text(encoding="utf-8")
    rows = text.split("| the server sees | algorithms |\n|---|---|\n")[1].split("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in rows.splitlines()]
    return {seen: set(re.split(r"[,;] ", re.sub(r" \([^)]*\)", "", names))) for seen, names in cells}


def test_every_algorithm_is_in_the_table_of_what_the_server_sees() -> None:
    ours = [kind.title for kind in algorithms().values() if kind.__module__.startswith("fedtailor.")]
    assert sorted(name for names in who_sees().values() for name in names) == sorted(ours)


@pytest.mark.parametrize("name", sorted(n for n, k in algorithms().items() if k.__module__.startswith("fedtailor.")))
def test_what_the_server_sees_is_what_the_page_says(name: str, tmp_path: Path) -> None:
    is_linear = name in ("learn2pfed", "empiricalbayes", "jointls", "mocha", "mixedmodel", "linearalone")
    data = {"source": "polynomial", "samples": 40} if is_linear else {"source": "digits", "max_samples": 20}
    model: dict[str, Any] = {"name": "linear", "bias": False} if is_linear else {"hidden": [4]}
    if name == "fedbn":
        model = {"name": "resnet8", "width": 8}
    if name in ("fedalt", "feddpa", "fedsa-lora"):
        model = ADAPTED["model"]
    options: dict[str, Any] = {"outer_iterations": 1, "horizon": 2} if name.startswith("duw") else {}
    made = {"rounds": 2, "data": data | {"clients": 3}, "model": model, "algorithm": {"name": name, **options}}
    if name in ("mixedlogit", "mixedpoisson"):
        task = CLASSES if name == "mixedlogit" else COUNTS
        made = task | {"rounds": 1, "algorithm": {"name": name, "effects": "intercept"}}
    folder = runner.start(parse(made), tmp_path / "run")
    assert folder.results is not None
    assert bool(folder.results["gathered"]) == (algorithms()[name].title in who_sees()["individual clients' replies"])
