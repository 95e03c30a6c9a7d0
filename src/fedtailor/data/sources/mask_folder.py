"""Images with masks: a folder site/images and site/masks, in which an image and its mask have the same name."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.core.data import SPLITS, FederatedData, Rows
from fedtailor.core.trees import Tree
from fedtailor.data.configs import EyesConfig, ImageMasksConfig
from fedtailor.data.download import data_root
from fedtailor.data.federated import federated
from fedtailor.data.files import expand_home, read_npz
from fedtailor.data.image_masks import pad_images
from fedtailor.data.sources.image_folder import ENDINGS, MODES, read_upright
from fedtailor.data.splits import split, split_note
from fedtailor.errors import DataError

EYES, EYES_SUBJECT = "eyes", "^(.*?)[LR]?$"  # CHASE_DB1 has both eyes of a child, such as Image_01L and Image_01R
VOLUMES = (".npz", ".nii", ".nii.gz")


class Pair(NamedTuple):
    image: Path
    mask: Path


def load(
    config: ImageMasksConfig | EyesConfig, *, seed: int, root: Path | None = None, dtype: torch.dtype = torch.float32
) -> FederatedData:
    """Read all images and masks, and split each site's."""
    if isinstance(config, EyesConfig):
        shares = config.model_dump(include={"test", "val", "max_samples", "max_train"})
        folder = ImageMasksConfig(path=data_root(root) / EYES, subject=EYES_SUBJECT, **shares)
        eyes = load(folder, seed=seed, dtype=dtype)
        return replace(eyes, train=_at_first(eyes.train)) if config.pooled else eyes
    found = list_pairs(config)
    read = {site: [_read_pair(pair, config, dtype) for pair in pairs] for site, pairs in found.items()}
    kinds = sorted({f"{x.shape[0]} channels in {x.dim() - 1} dimensions" for each in read.values() for x, _ in each})
    if len(kinds) > 1:
        raise DataError(f"{config.path}: all images must be alike; there are some of {' and of '.join(kinds)}")
    clients: dict[str, dict[str, Any]] = {}
    for site, pairs in found.items():
        cuts = split_subjects([_subject(p.image, config.subject) for p in pairs], config, seed, site)
        parts = {s: [read[site][i] for i in getattr(cuts, s)] for s in SPLITS}
        clients[site] = {s: _stack_pairs(part) for s, part in parts.items() if part}
    data = federated(clients, task="segmentation", name=config.path.stem, classes=config.classes)
    pixels = "each image scaled to mean 0, deviation 1" if config.standardise else "pixels scaled to [-1, 1]"
    whose = f'; images of one subject, "{config.subject}", together' if config.subject else ""
    size = f"images of {' x '.join(map(str, data.shape[1:]))}, {pixels}"
    return replace(data, notes=(*data.notes, split_note(config) + whose, size))


def _at_first(rows: Rows) -> Rows:
    """All rows at the first client."""
    return replace(rows, starts=torch.where(rows.starts > 0, rows.starts[-1], rows.starts))


def list_pairs(config: ImageMasksConfig) -> dict[str, list[Pair]]:
    """Images with their masks, by site."""
    path = expand_home(config.path)
    sites = sorted(p for p in path.iterdir() if (p / "images").is_dir()) if path.is_dir() else []
    if not sites:
        raise DataError(f"{config.path}: no folder with SITE/images and SITE/masks")
    return {site.name: _pairs_of(site) for site in sites}


def _pairs_of(site: Path) -> list[Pair]:
    masks = {stem_of(f): f for f in _files(site / "masks")}
    images = _files(site / "images")
    if not images:
        raise DataError(f"{site / 'images'}: has no image; known endings: {', '.join((*ENDINGS, *VOLUMES))}")
    for image in images:
        if stem_of(image) not in masks:
            raise DataError(f'{site / "masks"}: no mask for {image.name}; it must be called "{stem_of(image)}", too')
    return [Pair(image, masks[stem_of(image)]) for image in images]


def _files(folder: Path) -> list[Path]:
    every = sorted(folder.iterdir()) if folder.is_dir() else []
    return [f for f in every if f.name.lower().endswith((*ENDINGS, *VOLUMES)) and not f.name.startswith(".")]


def stem_of(file: Path) -> str:
    """The name without its ending, of which .nii.gz is one."""
    return file.name[: -len(".nii.gz")] if file.name.lower().endswith(".nii.gz") else file.stem


def _subject(image: Path, pattern: str) -> str:
    if not pattern:
        return image.name
    match = re.search(pattern, stem_of(image))
    if match is None:
        raise DataError(f'{image}: data.subject = "{pattern}" does not match its name')
    return match[1] if match.re.groups else match[0]


def split_subjects(subjects: list[str], config: ImageMasksConfig, seed: int, site: str) -> Any:
    """As `split`, but with all images of a subject in one part."""
    known = sorted(set(subjects))
    cuts = split(len(known), None, config, seed=seed, client=site)
    parts = {s: {known[i] for i in getattr(cuts, s)} for s in SPLITS}
    return replace(
        cuts, **{s: np.array([i for i, v in enumerate(subjects) if v in parts[s]], np.int64) for s in SPLITS}
    )


def _stack_pairs(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tree, Tensor]:
    padded = pad_images([(x[None], y[None]) for x, y in pairs])
    return torch.cat([x for x, _ in padded if isinstance(x, Tensor)]), torch.cat([y for _, y in padded])


def _read_pair(pair: Pair, config: ImageMasksConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    mask = read_array(pair.mask, "mask", config)
    mask = mask[0] if mask.ndim == 4 or (mask.ndim == 3 and len(mask) == 1) else mask
    image = read_image(pair.image, config, mask.ndim)
    if image.shape[1:] != mask.shape:
        raise DataError(f"{pair.mask}: is {list(mask.shape)}, and its image {list(image.shape[1:])}")
    return torch.from_numpy(image).to(dtype), torch.from_numpy(np.ascontiguousarray(mask))


def read_image(path: Path, config: ImageMasksConfig, dimensions: int) -> NDArray[np.float32]:
    """An image [channels, (depth,) height, width]."""
    image = read_array(path, "image", config)
    if image.ndim == dimensions:
        image = image[None]
    values: NDArray[np.float32] = image.astype(np.float32)
    if config.standardise:
        return (values - values.mean()) / max(float(values.std()), 1e-8)
    return values / 127.5 - 1 if path.name.lower().endswith(ENDINGS) else values


def read_array(path: Path, what: str, config: ImageMasksConfig) -> NDArray[Any]:
    """Pixels or voxels with channels first; of an .npz file the array `image` or `mask`."""
    name = path.name.lower()
    if name.endswith(".npz"):
        return read_npz(path, [what], equal=False)[what]
    if name.endswith(VOLUMES):
        return _read_nifti(path)
    return _read_pixels(path, what, config)


def _read_nifti(path: Path) -> NDArray[Any]:
    try:
        nibabel: Any = import_module("nibabel")
    except ImportError:
        raise DataError(f"{path}: NIfTI needs the package nibabel; pip install 'fedtailor[segmentation]'") from None
    try:
        values: NDArray[Any] = np.asarray(nibabel.load(path).dataobj)
    except (OSError, ValueError, EOFError, nibabel.filebasedimages.ImageFileError) as error:
        raise DataError(f"{path}: not a NIfTI file that can be read ({error})") from None
    return np.moveaxis(values, -1, 0) if values.ndim == 4 else values


def _read_pixels(path: Path, what: str, config: ImageMasksConfig) -> NDArray[Any]:
    if what == "image":
        pixels = read_upright(path, MODES[config.colours], config.size)
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    pixels = read_upright(path, "", config.size)
    if pixels.ndim != 2:
        raise DataError(f"{path}: a mask has one number for each pixel, and this has colours; make it grey")
    return pixels.astype(np.uint8)
