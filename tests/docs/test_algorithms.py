"""The pages on algorithms: their commands run, and every option they name exists."""

from pathlib import Path

import pytest

from fedtailor.algorithms import algorithms
from tests.docs.pages import ROOT, run_page


def test_learn2pfed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("configs").symlink_to(ROOT / "configs")
    run_page(ROOT / "docs/algorithms/learn2pfed.md", monkeypatch)
    out = capsys.readouterr().out
    assert "| oracle |" in out
    assert "share of the common model" in out


PAGES = [
    "apfl",
    "cfl",
    "ditto",
    "dr-fedavg",
    "duw",
    "empiricalbayes",
    "fedadp",
    "fedala",
    "fedalt",
    "fedamp",
    "fedas",
    "fedavg",
    "fedavg-ft",
    "fedbabu",
    "fedbn",
    "fedcac",
    "fedcp",
    "feddbe",
    "feddpa",
    "feddyn",
    "fedem",
    "fedeq",
    "fedfa",
    "fedfomo",
    "fedkd",
    "fedl2p",
    "fedlaw",
    "fednova",
    "fedpac",
    "fedper",
    "fedproto",
    "fedprox",
    "fedrep",
    "fedrod",
    "fedsa-lora",
    "fedselect",
    "fedtgp",
    "fml",
    "gpfl",
    "ifca",
    "jointls",
    "knn-per",
    "lg-fedavg",
    "linearalone",
    "local",
    "lp-proj",
    "mixedlogit",
    "mixedmodel",
    "mixedpoisson",
    "mocha",
    "moon",
    "mr-mtl",
    "pefll",
    "per-fedavg",
    "pfedbayes",
    "pfedgate",
    "pfedhn",
    "pfedla",
    "pfedme",
    "scaffold",
    "tailor",
]  # learn2pfed has a test of its own


@pytest.mark.parametrize("page", PAGES)
def test_page(page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / f"docs/algorithms/{page}.md", monkeypatch)
    assert "last round" in capsys.readouterr().out


def test_every_page_is_run() -> None:
    assert {p.stem for p in (ROOT / "docs/algorithms").glob("*.md")} == {"learn2pfed", *PAGES}


def test_every_algorithm_is_named() -> None:
    """As the title of a page, or by its name in a configuration, in backticks."""
    pages = [p.read_text(encoding="utf-8") for p in (ROOT / "docs/algorithms").glob("*.md")]
    titles = {page.partition("\n")[0].removeprefix("# ").lower() for page in pages}
    ours = {name for name, kind in algorithms().items() if kind.__module__.startswith("fedtailor.")}
    missing = {name for name in ours - titles if not any(f"`{name}`" in page for page in pages)}
    assert not missing, f"without a page: {', '.join(sorted(missing))}"


def test_every_page_ends_with_figures() -> None:
    for page in (ROOT / "docs/algorithms").glob("*.md"):
        last = page.read_text(encoding="utf-8").rpartition("\n## ")[2]
        assert last.startswith("Our figures\n\n<!-- figures -->\n"), page.name
        assert "<!-- /figures -->\n" in last, page.name
