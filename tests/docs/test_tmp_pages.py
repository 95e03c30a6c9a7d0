import sys

import pytest

from tests.docs.pages import ROOT, run_page


@pytest.mark.parametrize("page", sys.argv and __import__("os").environ["PAGES"].split())
def test_page(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run_page(ROOT / page, monkeypatch)
