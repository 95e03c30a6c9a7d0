"""Your own images: a folder client/class/image, or a CSV of paths with their clients and labels."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.core.data import FederatedData
from fedtailor.data import partitions
from fedtailor.data.configs import ImageFolderConfig
from fedtailor.data.files import client_name, expand_home
from fedtailor.data.pools import ImagePool, split_pool
from fedtailor.errors import DataError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MODES = {"rgb": "RGB", "grey": "L"}


class ImageEntry(NamedTuple):
    client: str
    label: str
    path: Path


def load(
    config: ImageFolderConfig, *, seed: int, root: Path | None = None, dtype: torch.dtype = torch.float32
) -> FederatedData:
    """Read all images, scale them to one size, and split each client's."""
    images = list_images(config)
    clients, classes = sorted({e.client for e in images}), sorted({e.label for e in images})
    if len(classes) < 2:
        raise DataError(f'{config.path}: all images are of the class "{classes[0]}"; at least two classes are needed')
    number, owner = ({name: i for i, name in enumerate(names)} for names in (classes, clients))
    labels = np.array([number[e.label] for e in images], np.int64)
    parts = partitions.natural(np.array([owner[e.client] for e in images], np.int64))
    pool = ImagePool(np.stack([read_pixels(e.path, config) for e in images]), labels, tuple(classes), dtype=dtype)
    scaled = f"images scaled to {config.size} x {config.size}, {config.colours}"
    notes = ("partition: the clients of the folder", scaled, *partitions.describe(parts, labels))
    return split_pool(config.path.stem, pool, parts, tuple(clients), config, seed, notes)


def list_images(config: ImageFolderConfig) -> list[ImageEntry]:
    path = expand_home(config.path)
    if path.is_file() and client_name(path) is not None:
        return _read_listing(path)
    if not path.is_dir():
        raise DataError(f"{path}: no folder client/class/image, and no .csv or .parquet file with a column of paths")
    images = [
        ImageEntry(client.name, label.name, file)
        for client in _subfolders(path)
        for label in _subfolders(client)
        for file in sorted(label.iterdir())
        if file.suffix.lower() in ENDINGS and not file.name.startswith(".")
    ]
    if not images:
        raise DataError(f"{path}: has no images as client/class/image; known endings: {', '.join(ENDINGS)}")
    return images


def _subfolders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _read_listing(path: Path) -> list[ImageEntry]:
    """Images of a table of paths, which are relative to its folder."""
    from fedtailor.data.tabular.read import read_text_columns  # polars takes a while to import

    return [
        ImageEntry(c, label, path.parent / file)
        for c, label, file in read_text_columns(path, "client", "label", "path")
    ]


def read_pixels(path: Path, config: ImageFolderConfig) -> NDArray[np.uint8]:
    """The pixels of an image [channels, height, width], upright and scaled."""
    scaled = read_upright(path, MODES[config.colours], config.size)
    return np.ascontiguousarray(scaled[None] if scaled.ndim == 2 else scaled.transpose(2, 0, 1))


def read_upright(path: Path, mode: str, size: int) -> NDArray[Any]:
    """The pixels of an image as they are stored, upright; "" keeps its mode, such as that of a mask, and a size of 0
    its size."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise DataError("data.source: images need the package pillow; pip install 'fedtailor[images]'") from None
    try:
        with warnings.catch_warnings(), Image.open(path) as image:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            upright = ImageOps.exif_transpose(image)
            upright = upright.convert(mode) if mode else upright
            way = Image.Resampling.BILINEAR if mode else Image.Resampling.NEAREST
            return np.array(upright.resize((size, size), way) if size else upright)
    except FileNotFoundError:
        raise DataError(f"{path}: no such image") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{path}: not an image that can be read ({error})") from None
