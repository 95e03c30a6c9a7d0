"""Eyes, image by image: Dice of every method against Local on the same test images, and pictures of them.

FEDTAILOR_DATA=... python benchmarks/eyes.py [--runs runs/eyes-cpu]    after fedtailor reproduce eyes; prints the table
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import wilcoxon  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.evidence import data_root  # noqa: E402
from fedtailor.core.data import FederatedData  # noqa: E402
from fedtailor.core.segmentation import VOID  # noqa: E402
from fedtailor.experiments.building import load  # noqa: E402
from fedtailor.experiments.store import RESULTS  # noqa: E402
from fedtailor.report.mask_pictures import first_test_image, side_by_side  # noqa: E402
from fedtailor.studies import reproduce  # noqa: E402
from fedtailor.studies.grid import Cell  # noqa: E402
from fedtailor.tables.serve import personal  # noqa: E402

NAMES = {"drive": "DRIVE", "stare": "STARE", "chase": "CHASE_DB1", "hrf": "HRF"}
SHOWN = ("Local", "FedAvg", "FedAvg+FT", "Tailor")  # in the pictures
FREE = {"chase": "Fraz et al. 2012", "hrf": "Budai et al. 2013"}  # CC BY 4.0; the others may not be shown here
PICTURES = ROOT / "docs" / "results" / "eyes"
Scores = dict[str, NDArray[np.float64]]  # of every test image, by clinic


def dice(found: NDArray[np.uint8], true: NDArray[np.uint8]) -> float:
    counts = true != VOID
    p, t = (found > 0) & counts, (true > 0) & counts
    return float(2 * (p & t).sum() / (p.sum() + t.sum()))


def scores_of(cell: Cell, data: FederatedData) -> Scores:
    """Dice of every test image by the clinic's model of the last round."""
    out: Scores = {}
    for i, clinic in enumerate(data.clients):
        x, y = data.test.of(i)
        assert isinstance(x, torch.Tensor)
        masks = personal(cell.folder, clinic, data_root()).predict(x)
        out[clinic] = np.array([dice(m, t) for m, t in zip(masks, y.numpy(), strict=True)])
    return out


def mean_over(each: Sequence[Scores]) -> Scores:
    return {name: np.mean([scores[name] for scores in each], axis=0) for name in NAMES}


def paired(row: Scores, local: Scores) -> list[str]:
    """Mean difference over a clinic's images in percentage points, how many are better, and Wilcoxon's p."""
    cells = []
    for name in NAMES:
        difference = row[name] - local[name]
        p = wilcoxon(difference).pvalue if np.any(difference) else 1.0
        shown = "< .001" if p < 0.001 else f"{p:.3f}".lstrip("0")
        cells.append(f"{100 * difference.mean():+.1f} ({(difference > 0).sum()}/{len(difference)}, {shown})")
    return cells


def draw(runs: Mapping[str, Cell], data: FederatedData) -> None:
    """A PNG for each clinic whose images are free: image, truth, and the masks of some methods."""
    PICTURES.mkdir(exist_ok=True)
    for clinic in FREE:
        x, y = first_test_image(data, clinic)
        masks = [personal(cell.folder, clinic, data_root()).predict(x)[0] for cell in runs.values()]
        (PICTURES / f"{clinic}.png").write_bytes(side_by_side(x, y[0].numpy(), *masks))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "eyes-cpu")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    published = reproduce.load(ROOT / "configs", "eyes")
    grid = reproduce.grid(published, asked.runs, "cpu", published.seeds, [])
    rows = {row: [c for c in cells if (c.folder / RESULTS).exists()] for (row, _), cells in grid.items()}
    one = {row: cells for row, cells in rows.items() if cells and cells[0].config.evaluation.unseen is None}
    data = load(one["Local"][0].config, data_root())
    scores = {row: {cell.seed: scores_of(cell, data) for cell in cells} for row, cells in one.items()}
    images = {name: len(next(iter(scores["Local"].values()))[name]) for name in NAMES}
    print("| against Local | seeds | " + " | ".join(f"{NAMES[c]}, {n} images" for c, n in images.items()) + " |")
    print("|---|---:|" + "---:|" * len(images))
    for row in one:
        if row != "Local":
            seeds = sorted(scores[row].keys() & scores["Local"].keys())
            means = (mean_over([scores[of][seed] for seed in seeds]) for of in (row, "Local"))
            print(f"| {row} | {len(seeds)} | " + " | ".join(paired(*means)) + " |")
    print(
        "\nDice in percentage points: of each image the mean over seeds, then over the images (images that are better, "
    )
    print("p of Wilcoxon's signed-rank test).")
    shown = {row: one[row][0] for row in SHOWN if row in one}
    draw(shown, data)
    print(f"\nImage, truth, {', '.join(shown)}:\n")
    for clinic, source in FREE.items():
        print(f"![{NAMES[clinic]}: image, true mask, {', '.join(shown)}](eyes/{clinic}.png)\n")
        print(f"{NAMES[clinic]}, {source}, CC BY 4.0\n")


if __name__ == "__main__":
    main()
