"""Images, their true masks and predicted ones, side by side as small PNG files."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.data import FederatedData, between
from fedtailor.core.segmentation import VOID
from fedtailor.errors import RunError, UserError
from fedtailor.experiments.runner import reload_experiment
from fedtailor.experiments.store import RunFolder
from fedtailor.report.page import PageSection, Picture
from fedtailor.report.recorded_run import RecordedRun
from fedtailor.tables.serve import ServedModels

CLIENTS = 6  # with a picture
WIDTH = 176  # of a tile, in pixels
GAP = 4
COLOURS = np.array(  # of the classes, and grey where the mask is void
    [(0, 0, 0), (255, 255, 255), (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (204, 121, 167)],
    np.uint8,
)


def mask_section(run: RecordedRun, data_root: Path | None) -> tuple[PageSection, ...]:
    """The first test image of some clients; nothing of other tasks."""
    if run.about["task"] != "segmentation":
        return ()
    section = PageSection("masks", "Masks", ("Image, true mask and prediction: the first test image of a client.",))
    if run.results is None:
        return (section.without("the run is not finished"),)
    try:
        return (PageSection(section.id, section.title, section.text, pictures=tuple(_pictures(run, data_root))),)
    except UserError as error:
        return (section.without(str(error)),)


def _pictures(run: RecordedRun, data_root: Path | None) -> list[Picture]:
    data = reload_experiment(RunFolder.open(run.path), data_root, serves=True).data
    served, out = ServedModels(run.path, data_root), list[Picture]()
    for name in [c for c, n in zip(data.clients, data.test.sizes.tolist(), strict=True) if n][:CLIENTS]:
        x, y = first_test_image(data, name)
        png = side_by_side(x, y[0].numpy(), served.personal(name).predict(x)[0])
        uri = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        out.append(Picture(name, uri, f"Image, true mask and predicted mask of {name}"))
    return out


def first_test_image(data: FederatedData, client: str) -> tuple[Tensor, Tensor]:
    """[1, channels, ...] and [1, ...]"""
    start = int(data.test.starts[data.clients.index(client)])
    x = between(data.test.x, start, start + 1)
    if not isinstance(x, Tensor):
        raise RunError("samples have several parts")
    return x, data.test.y[start : start + 1]


def side_by_side(x: Tensor, *masks: NDArray[np.uint8]) -> bytes:
    """A PNG of an image [1, channels, ...] and masks of it; of a volume, the slice with most of the first mask."""
    try:
        from PIL import Image
    except ImportError:
        raise RunError("pictures need the package pillow; pip install 'fedtailor[images]'") from None
    image, at = x[0].double(), slice(None)
    if image.dim() == 4:
        at = int(((masks[0] > 0) & (masks[0] != VOID)).sum((1, 2)).argmax())  # type: ignore[assignment]
        image = image[:, at]
    low, high = torch.aminmax(image)
    grey = ((image - low) / (high - low).clamp(min=1e-12) * 255).to(torch.uint8).numpy()
    tiles: list[Any] = [(grey if len(grey) == 3 else grey[:1].repeat(3, 0)).transpose(1, 2, 0)]
    tiles += [_coloured(mask[at] if mask.ndim == 3 else mask) for mask in masks]
    height = max(1, round(WIDTH * tiles[0].shape[0] / tiles[0].shape[1]))
    whole = Image.new("RGB", (len(tiles) * (WIDTH + GAP) - GAP, height), "white")
    for i, tile in enumerate(tiles):
        way = Image.Resampling.NEAREST if i and tile.shape[1] < WIDTH else Image.Resampling.BOX
        whole.paste(Image.fromarray(np.ascontiguousarray(tile)).resize((WIDTH, height), way), (i * (WIDTH + GAP), 0))
    out = io.BytesIO()
    whole.save(out, "PNG", optimize=True)
    return out.getvalue()


def _coloured(mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
    known = COLOURS[np.where(mask == 0, 0, 1 + (mask.astype(int) - 1) % (len(COLOURS) - 1))]
    known[mask == VOID] = 128
    return known
