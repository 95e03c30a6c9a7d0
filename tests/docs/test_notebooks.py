"""Notebooks are those of the pages, and run from top to bottom in a real kernel: that is how these pages are tried."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tools.notebooks import PAGES, texts

needs_kernel = pytest.mark.skipif(
    None in map(find_spec, ("nbclient", "ipykernel")), reason="needs a Jupyter kernel, of the extra notebooks"
)
without_warnings = pytest.mark.filterwarnings("ignore")  # of the packages that talk to the kernel
TUTORIAL = ROOT / "docs/tutorial.md"
# a comparison takes as many processes as there are cores: one shows as much as two
ONE_CORE = (
    'import os\nif hasattr(os, "sched_setaffinity"):\n    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})\n'
)


def test_notebooks_are_made_from_the_pages() -> None:
    assert len(texts()) == len(PAGES) == 3  # each has a test below
    for path, text in texts().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python tools/notebooks.py"


def printed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """All that a notebook prints, run in a folder; an error ends it."""
    import nbformat
    from nbclient import NotebookClient

    settings = folder / "ipython"
    (settings / "profile_default/startup").mkdir(parents=True)
    (settings / "profile_default/startup/one_core.py").write_text(ONE_CORE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(settings))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(folder / "jupyter"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": folder}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    said = "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs)
    assert "error:" not in said
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", said)


@needs_kernel
@without_warnings
def test_own_hospital_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = printed("own-hospital-data", tmp_path, monkeypatch)
    assert re.search(r'"outcome".*\b2\b', out)
    assert "west" in out
    assert "runs/folder" in out


@needs_kernel
@without_warnings
def test_method_with_the_tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = printed("method-with-the-tape", tmp_path, monkeypatch)
    accuracy = dict(re.findall(r"^(fedavg|learnedsteps): ([\d.]+) % test accuracy$", out, re.MULTILINE))
    assert accuracy["fedavg"] != accuracy["learnedsteps"]
    learned = [float(v) for v in re.findall(r"client-0\d: ([\d.]+) \(began", out)]
    assert len(learned) == 6
    assert len(set(learned)) > 1


@needs_kernel
@without_warnings
def test_first_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, text = printed("first-comparison", tmp_path, monkeypatch), TUTORIAL.read_text(encoding="utf-8")
    dealt = re.findall(r"client-\d+ has of the digits.*", text)
    assert dealt
    assert dealt == re.findall(r"client-\d+ has of the digits.*", out)
    table = {row["algorithm"]: row for row in json.loads((tmp_path / "runs/first/table.json").read_text())}
    shown = re.findall(r"^ (\S+) +([\d.]+) +([\d.]+) +([\d.]+) +(\d+) %", text, re.MULTILINE)
    for name, *figures in shown[-len(table) :]:  # within what another processor may round differently
        row = table[name]
        found = [100 * row[key] for key in ("mean", "selected_mean", "worst_tenth", "hurt")]
        assert [float(f) for f in figures] == pytest.approx(found, abs=13), name  # an image is up to 8 points
        assert float(figures[0]) == pytest.approx(found[0], abs=3), name
    alone, common = table["Local"], table["FedAvg"]
    assert common["mean"] < alone["mean"] - 0.1
    assert common["hurt"] > 0.5
    for name in ("FedAvg+FT", "FedRep", "Learn2pFed-Net"):
        assert table[name]["mean"] > alone["mean"]
        assert table[name]["worst_tenth"] > alone["worst_tenth"]
    even = {row["algorithm"]: row for row in json.loads((tmp_path / "runs/even/table.json").read_text())}
    assert even["FedAvg"]["mean"] > even["Local"]["mean"] + 0.05
    assert even["FedAvg"]["hurt"] == 0
    for page in ("runs/first/report.html", "runs/first/learn2pfed-net-seed0/report.html"):
        assert (tmp_path / page).stat().st_size > 100_000
