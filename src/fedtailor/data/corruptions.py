"""Corruptions of images with the constants of CIFAR-10-C (Hendrycks, Dietterich, ICLR 2019), for feature shift.

Each function maps images [samples, channels, height, width] in [0, 1] to images of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, floor, pi
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.random import stream
from fedtailor.errors import DataError

Rng = np.random.Generator
MOST_SEVERE = 5


def corrupt_clients(
    data: FederatedData, kind: str, severity: int | None, seed: int, *, mean: float, sd: float
) -> FederatedData:
    """Corrupt each client's images with one kind and severity; x is `(pixels in [0, 1] - mean) / sd`."""
    chosen = _deal(len(data.clients), kind, severity, seed, is_colour=data.shape[0] == 3)

    def corrupt_rows(rows: Rows, split: str) -> Rows:
        x = rows.x.clone()
        for i, (client, own) in enumerate(zip(data.clients, chosen, strict=True)):
            span = slice(int(rows.starts[i]), int(rows.starts[i + 1]))
            pixels = (x[span] * sd + mean).clamp(0, 1)
            x[span] = (corrupt(pixels, *own, stream(seed, client, "corruption", split)) - mean) / sd
        return replace(rows, x=x)

    named = ", ".join(f"{c} {kind} {severity}" for c, (kind, severity) in zip(data.clients, chosen, strict=True))
    return replace(
        data,
        train=corrupt_rows(data.train, "train"),
        val=corrupt_rows(data.val, "val"),
        test=corrupt_rows(data.test, "test"),
        notes=(*data.notes, f"images corrupted, with severity: {named}"),
    )


def corrupt(x: Tensor, kind: str, severity: int, rng: Rng) -> Tensor:
    """Corrupt images in [0, 1] with severity 1 to 5."""
    apply, constants = KINDS[kind]
    return apply(x, constants[severity - 1], rng).clamp(0, 1) if len(x) else x


def _deal(clients: int, kind: str, severity: int | None, seed: int, *, is_colour: bool) -> list[tuple[str, int]]:
    """Kind and severity of each client; every kind is used about equally often."""
    if kind == "saturate" and not is_colour:
        raise DataError('data.corruption = "saturate": these images are grey; choose another corruption')
    known = [k for k in KINDS if is_colour or k != "saturate"] if kind == "mixed" else [kind]
    rng = stream(seed, "corruption")
    deck: list[str] = []
    while len(deck) < clients:
        deck += [known[i] for i in rng.permutation(len(known))]
    drawn = rng.integers(1, MOST_SEVERE, endpoint=True, size=clients).tolist()
    return [(k, s if severity is None else severity) for k, s in zip(deck[:clients], drawn, strict=True)]


def _gaussian_noise(x: Tensor, sd: float, rng: Rng) -> Tensor:
    return x + sd * _normal(x, rng)


def _shot_noise(x: Tensor, photons: float, rng: Rng) -> Tensor:
    return torch.from_numpy(rng.poisson((x * photons).numpy())).to(x) / photons


def _impulse_noise(x: Tensor, amount: float, rng: Rng) -> Tensor:
    """Replaces values by black or white with equal probability."""
    u = torch.from_numpy(rng.random(x.shape))
    return torch.where(u < amount, (u < amount / 2).to(x), x)


def _speckle_noise(x: Tensor, sd: float, rng: Rng) -> Tensor:
    return x + x * sd * _normal(x, rng)


def _normal(like: Tensor, rng: Rng) -> Tensor:
    return torch.from_numpy(rng.standard_normal(like.shape)).to(like)


def _gaussian_blur(x: Tensor, sd: float, rng: Rng) -> Tensor:
    """Beyond its edge, the image is continued with the last pixel."""
    radius = int(4 * sd + 0.5)

    def matrix_of(size: int) -> Tensor:
        weights = torch.zeros(size, size, dtype=torch.float64)
        for offset in range(-radius, radius + 1):
            at = (torch.arange(size) + offset).clamp(0, size - 1)
            weights[torch.arange(size), at] += exp(-0.5 * (offset / sd) ** 2)
        return weights / weights.sum(1, keepdim=True)

    return _apply_separably(x, matrix_of)


def _defocus(x: Tensor, constants: tuple[float, float], rng: Rng) -> Tensor:
    """Convolution with a disk that is itself blurred over three points; the image is mirrored at its edges."""
    radius, alias_blur = constants
    reach = floor(radius) + 1
    at = torch.arange(-reach, reach + 1)
    disk = (at[:, None] ** 2 + at**2 <= radius**2).to(torch.float64)
    three = torch.tensor([exp(-0.5 * (k / alias_blur) ** 2) for k in (-1, 0, 1)], dtype=torch.float64)
    kernel = F.conv2d(
        (disk / disk.sum())[None, None], (torch.outer(three, three) / three.sum() ** 2)[None, None], padding=1
    )
    channels = x.shape[1]
    padded = F.pad(x, (reach,) * 4, mode="reflect")
    return F.conv2d(padded, kernel.to(x).expand(channels, 1, -1, -1), groups=channels)


def _contrast(x: Tensor, factor: float, rng: Rng) -> Tensor:
    mean = x.mean((-2, -1), keepdim=True)
    return (x - mean) * factor + mean


def _brightness(x: Tensor, more: float, rng: Rng) -> Tensor:
    """Adds to the value (HSV); hue and saturation stay."""
    value = x.amax(1, keepdim=True)
    brighter = (value + more).clamp(max=1)
    return torch.where(value > 0, x / value.clamp(min=1e-12) * brighter, brighter)


def _saturate(x: Tensor, constants: tuple[float, float], rng: Rng) -> Tensor:
    """Scales and shifts the saturation (HSV); hue and value stay. Grey has the hue of red."""
    scale, shift = constants
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    saturation = chroma / value.clamp(min=1e-12) * scale + shift
    red = torch.tensor([0.0, 1.0, 1.0]).to(x).reshape(3, 1, 1)
    hue = torch.where(chroma > 0, (value - x) / chroma.clamp(min=1e-12), red)
    return value * (1 - saturation.clamp(0, 1) * hue)


def _pixelate(x: Tensor, factor: float, rng: Rng) -> Tensor:
    """Reduces the resolution by means over areas, and enlarges the image again."""

    def matrix_of(size: int) -> Tensor:
        fewer = max(1, int(size * factor))
        centres = (torch.arange(fewer, dtype=torch.float64)[:, None] + 0.5) * (size / fewer)
        distance = (torch.arange(size) + 0.5 - centres) / (size / fewer)
        covered = ((distance > -0.5) & (distance <= 0.5)).to(torch.float64)
        source = ((torch.arange(size) + 0.5) * (fewer / size)).floor().long()
        return (covered / covered.sum(1, keepdim=True))[source]

    return _apply_separably(x, matrix_of)


def _apply_separably(x: Tensor, matrix_of: Callable[[int], Tensor]) -> Tensor:
    """Apply the same linear map to rows and to columns."""
    return matrix_of(x.shape[-2]).to(x) @ x @ matrix_of(x.shape[-1]).to(x).mT


def _jpeg(x: Tensor, quality: int, rng: Rng) -> Tensor:
    """JPEG compression: rounded cosine transforms of 8x8 blocks, chrominance at half the resolution."""
    channels, height, width = x.shape[1:]
    block = 16 if channels == 3 else 8
    whole = F.pad(_round(x.double() * 255), (0, -width % block, 0, -height % block), mode="replicate")
    if channels == 3:
        middle = torch.tensor([0.0, 128.0, 128.0]).to(whole).reshape(3, 1, 1)
        light, *colours = _round(torch.einsum("yc,nchw->nyhw", TO_YCC, whole) + middle).split(1, dim=1)
        small = _code_blocks(_round(F.avg_pool2d(torch.cat(colours, dim=1), 2)), CHROMINANCE, quality)
        large = F.interpolate(small, scale_factor=2, mode="bilinear", align_corners=False)
        decoded = torch.cat([_code_blocks(light, LUMINANCE, quality), large], dim=1) - middle
        whole = _round(torch.einsum("cy,nyhw->nchw", torch.linalg.inv(TO_YCC), decoded))
    else:
        whole = _code_blocks(whole, LUMINANCE, quality)
    return (whole[..., :height, :width] / 255).to(x)


def _code_blocks(planes: Tensor, table: Tensor, quality: int) -> Tensor:
    """Quantise the cosine transform of each block of planes in 0..255."""
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    steps = ((table * percent + 50) // 100).clamp(1, 255)
    blocks = (planes - 128).unflatten(-2, (-1, 8)).unflatten(-1, (-1, 8)).transpose(-3, -2)
    rounded = _round(COSINES @ blocks @ COSINES.mT / steps) * steps
    decoded = (COSINES.mT @ rounded @ COSINES).transpose(-3, -2).flatten(-4, -3).flatten(-2)
    return _round(decoded + 128).clamp(0, 255)


def _round(values: Tensor) -> Tensor:
    """To the nearest integer, halves away from 0, with a tolerance so that all machines agree on halves."""
    return (values.abs() + (0.5 + 1e-6)).floor() * values.sign()


def _cosines() -> Tensor:
    """The orthonormal cosine transform of 8 values."""
    k = torch.arange(8, dtype=torch.float64)
    rows = torch.cos((2 * k + 1) * k[:, None] * pi / 16) / 2
    rows[0] /= 2**0.5
    return rows


COSINES = _cosines()
TO_YCC = torch.tensor(
    [[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]], dtype=torch.float64
)
# tables K.1 and K.2 of the JPEG standard (ITU T.81)
LUMINANCE = torch.tensor(
    [
        [16, 11, 10, 16, 24, 40, 51, 61],
        [12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56],
        [14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77],
        [24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101],
        [72, 92, 95, 98, 112, 100, 103, 99],
    ]
)
CHROMINANCE = torch.full((8, 8), 99)
CHROMINANCE[:4, :4] = torch.tensor([[17, 18, 24, 47], [18, 21, 26, 66], [24, 26, 56, 99], [47, 66, 99, 99]])

# constants of severity 1 to 5
KINDS: dict[str, tuple[Callable[[Tensor, Any, Rng], Tensor], tuple[Any, ...]]] = {
    "gaussian-noise": (_gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot-noise": (_shot_noise, (500, 250, 100, 75, 50)),
    "impulse-noise": (_impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "speckle-noise": (_speckle_noise, (0.06, 0.1, 0.12, 0.16, 0.2)),
    "gaussian-blur": (_gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),
    "defocus-blur": (_defocus, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "contrast": (_contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "brightness": (_brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "saturate": (_saturate, ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))),
    "jpeg": (_jpeg, (80, 65, 58, 50, 40)),
    "pixelate": (_pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
}
