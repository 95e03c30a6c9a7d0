"""`fedtailor report`: the page of a run or of a comparison."""

from __future__ import annotations

from pathlib import Path

from fedtailor.errors import RunError
from fedtailor.experiments.store import FIT, read_json, write_atomically
from fedtailor.report.page import Page, render_html
from fedtailor.report.recorded_run import is_comparison
from fedtailor.report.run_page import run_page

FILE = "report.html"


def page_of(path: Path, data_root: Path | None = None) -> Page:
    """The page of a run, a comparison or a fit."""
    if (path / FIT).is_file() and "sites" in read_json(path / FIT):  # an unfinished fit is a comparison
        from fedtailor.report.fit_page import fit_page

        return fit_page(path)
    if is_comparison(path):
        from fedtailor.report.compare_page import compare_page

        return compare_page(path)
    return run_page(path, data_root)


def write(path: Path, out: Path | None = None, data_root: Path | None = None) -> Path:
    """Write the page to `out`, by default report.html in the folder; returns its path."""
    target = out or path / FILE
    if target.is_dir():
        raise RunError(f"{target}: is a folder; --out names the file to write, such as {target / FILE}")
    write_atomically(target, render_html(page_of(path, data_root)).encode())
    return target
