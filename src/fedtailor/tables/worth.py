"""What each site's rows are worth to every other one: refits from sums without it.

Entry (i, j) is the expected rise of the squared error of new rows of site i if site j leaves: by all that is known, the
coefficients of site i are those of the fit of all sites up to a covariance that does not depend on j, so that the rise
is the square of the distance that the refit moves them, weighed by the moments of new rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedtailor.core.data import FederatedData
from fedtailor.errors import DataError
from fedtailor.numerics.site_sums import SiteSums, fit_shared, moments_of_new_rows, pooled_within, refit
from fedtailor.tables.advice import exchange_sums, numbers_only, quadratic, unit_of


def worth_of(sums: SiteSums) -> Tensor:
    """[site, the one that leaves], in squared units of the sums; 0 on the diagonal."""
    shared, sites = fit_shared(sums), len(sums.n)
    before, square = shared.models(sums)[0], moments_of_new_rows(sums, pooled_within(sums))
    columns = []
    for j in range(sites):
        moved = refit(sums.without(j), shared).models(sums)[0] - before
        columns.append(quadratic(moved, square))
    return torch.stack(columns, dim=1) * (1 - torch.eye(sites, dtype=sums.b.dtype))


def worth(data: FederatedData, engine: str = "vmap") -> dict[str, Any]:
    """The record: by site what each other one's rows spare it, in squared units of the target."""
    if len(data.clients) < 3:
        raise DataError("advise --worth: at least three sites are needed, so that two are left to compare")
    unit, target = unit_of(data)
    matrix = worth_of(exchange_sums(numbers_only(data), engine)) * unit**2
    names = list(data.clients)
    given = matrix.sum(0).tolist()
    return {
        "data": data.name,
        "target": target,
        "worth": {to: dict(zip(names, row, strict=True)) for to, row in zip(names, matrix.tolist(), strict=True)},
        "given": dict(zip(names, given, strict=True)),
    }
