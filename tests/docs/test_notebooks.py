"""Notebooks are those of the pages, and run from top to bottom in a real kernel."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tools.notebooks import PAGES, texts


def test_notebooks_are_made_from_the_pages() -> None:
    for path, text in texts().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python tools/notebooks.py"


@pytest.mark.skipif(
    None in map(find_spec, ("nbclient", "ipykernel")), reason="needs a Jupyter kernel, of the extra notebooks"
)
@pytest.mark.filterwarnings("ignore")  # of the packages that talk to the kernel
@pytest.mark.parametrize("name", PAGES)
def test_a_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    said = "".join(str(output.get("text", "")) + str(output.get("data", "")) for output in outputs)
    assert "error:" not in said
    expected = {"first-comparison": "FedAvg", "own-hospital-data": "runs/folder", "method-with-the-tape": "client-05"}
    assert expected[name] in said
