"""Eigenvalues and eigenvectors of symmetric matrices."""

from __future__ import annotations

import torch
from torch import Tensor

SHIFT = 1e-9  # of the mean diagonal


def eigen(a: Tensor) -> tuple[Tensor, Tensor]:
    """As `torch.linalg.eigh`, also where LAPACK's divide and conquer does not converge, as on many equal blocks."""
    try:
        s, q = torch.linalg.eigh(a)
    except torch.linalg.LinAlgError:
        shift = SHIFT * a.diagonal(dim1=-2, dim2=-1).mean(-1)
        eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        s, q = torch.linalg.eigh(a + shift[..., None, None] * eye)
        s = s - shift[..., None]
    return s, q
