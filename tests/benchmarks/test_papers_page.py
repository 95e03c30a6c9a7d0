"""The papers item by item: no item without a row, no row without a verdict; figures and tests that it names exist."""

import re

import pytest

from benchmarks import papers_page
from tests.docs.pages import ROOT

NUMBERED = {  # of the journal text, and of the conference text in brackets
    "learn2pfed": [
        *(f"Table {n}" for n in ("I", "II", "III", "IV", "V", "VI")),
        *(f"Figure {n}" for n in (1, 2, 3, 4, 5, 7)),
        *("C: Table 2", "C: Table 3", "C: Table 4", "C: Figure 5", "Lemma 1", "Theorem 1", "Algorithm 1"),
        *("(9)", "(13)", "(14)"),
    ],
    "duw": [
        *(f"Table {n}" for n in (1, 2, 3)),
        *(f"Figure {n}" for n in (1, 2, 3, 4, 5)),
        *(f"Algorithm {n}" for n in (1, 2, 3, 4, 5)),
        *("Theorem 1", "(28)", *(f"Figure 3 ({letter})" for letter in "abcdefgh")),
    ],
    "fedeq": [
        *(f"Table {n}" for n in (1, 2)),
        *(f"Figure {n}" for n in (1, 2, 3, 4, 5, 6)),
        *("Figure 6 (a)", "Figure 6 (b)", "Lemma 4.2", "Lemma 4.4", "Theorem 4.5", "Theorem 4.6", "Algorithm 1"),
    ],
    "fedselect": [
        *(f"Table {n}" for n in (1, 2, 3)),
        *(f"Figure {n}" for n in (1, 2, 3, 4)),
        *(f"Algorithm {n}" for n in (1, 2, 3)),
    ],
}


def named(text: str) -> str:
    """With what "Figures 4 and 5" and "Algorithms 1 and 2" stand for."""
    pairs = re.findall(r"(Figure|Algorithm|Table)s (\d) and (\d)", text)
    spans = re.findall(r"\((\d+)\)-\((\d+)\)", text)
    pairs_text = [f"{kind} {n}" for kind, *each in pairs for n in each]
    return " ".join([text, *pairs_text, *(f"({n})" for a, b in spans for n in range(int(a), int(b) + 1))])


@pytest.mark.parametrize("paper", list(papers_page.PAPERS))
def test_every_numbered_item_has_a_row(paper: str) -> None:
    rows = [named(item["item"]) for item in papers_page.items()[paper]]
    missing = [name for name in NUMBERED[paper] if not any(re.search(rf"{re.escape(name)}(?![.\w])", r) for r in rows)]
    assert not missing


def test_every_row_has_a_verdict_and_where_it_needs_one_a_reason() -> None:
    every = [item for group in papers_page.items().values() for item in group]
    assert len(every) >= 60
    for item in every:
        assert item["verdict"] in papers_page.VERDICTS, item
        assert item["verdict"] == "reproduced" or item["why"], item
        assert {"item", "place", "theirs", "ours"} <= item.keys(), item
        assert item["verdict"] != "reproduced" or {"page", "tests"} & item.keys() or "`" in item["ours"], item


def test_tests_and_pages_that_rows_name_are_there() -> None:
    for group in papers_page.items().values():
        for item in group:
            assert "page" not in item or (ROOT / "docs" / "results" / f"{item['page']}.md").exists(), item
            for test in item.get("tests", ()):
                path, _, name = test.partition("::")
                assert (ROOT / path).exists(), test
                assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test


def test_the_page_is_that_of_the_records() -> None:
    assert (ROOT / "docs/results/papers.md").read_text(encoding="utf-8") == papers_page.page()
