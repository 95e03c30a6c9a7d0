"""`fedtailor advise`: what a site gains by sharing, from one exchange of sums, before anything is trained.

The gain is the expected squared error of new rows of a site by its own ridge regression, less that by the mixed model
of all. Given the sums, a site's true coefficients are normal, and the gain is linear in them: its distribution is exact
but for the variances, whose doubt a parametric bootstrap from sums adds (Laird, Louis, J. Am. Stat. Assoc. 82, 1987).
An interval is for the expected gain; a mean over some test rows varies around that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from fedtailor import engines
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.federation import Federation
from fedtailor.errors import DataError
from fedtailor.experiments.building import assemble, load
from fedtailor.experiments.config import RunConfig, parse, with_settings
from fedtailor.numerics.site_sums import (
    SharedFit,
    SiteSums,
    explains_exactly,
    fit_shared,
    moments_of_new_rows,
    own_models,
    pooled_within,
    refit,
    simulate,
    with_coefficients,
)
from fedtailor.tables.fit_sources import source_of

Verdict = Literal["share", "alone", "no matter", "do not know"]
DRAWS = 100  # of the bootstrap
POINTS = 41  # of a normal distribution
NEGLIGIBLE = 0.02  # of a site's error


@dataclass(frozen=True)
class SharingGains:
    """Expected gains of sites, in squared units of the sums."""

    mean: Tensor
    low: Tensor
    high: Tensor
    error: Tensor  # expected squared error of a site's own model

    @property
    def verdicts(self) -> list[Verdict]:
        out: list[Verdict] = []
        for low, high, error in zip(self.low.tolist(), self.high.tolist(), self.error.tolist(), strict=True):
            if max(abs(low), abs(high)) < NEGLIGIBLE * error:
                out.append("no matter")
            else:
                out.append("share" if low > 0 else "alone" if high < 0 else "do not know")
        return out


def numbers_only(data: FederatedData) -> FederatedData:
    """A target of two classes as 0 and 1, whose squared error is Brier's score; of more there is no advice."""
    wanted = 2 if data.task == "classification" else 1
    if data.task not in ("classification", "regression", "count") or data.outputs != wanted or len(data.shape) != 1:
        raise DataError("advise: for a table with a number, a count or one of two classes to predict")

    def as_number(rows: Rows) -> Rows:
        y = rows.y.double()
        return Rows(rows.x, y[:, None] if y.dim() == 1 else y, rows.starts)

    train, val, test = (as_number(rows) for rows in (data.train, data.val, data.test))
    return replace(data, task="regression", outputs=1, classes=(), train=train, val=val, test=test)


def exchange_sums(data: FederatedData, engine: str = "vmap") -> SiteSums:
    """Ask every site once for the cross products of its training rows."""
    tables = {"rounds": 1, "data": {"source": "sites"}, "model": {"name": "linear", "dtype": "float64"}}
    config: RunConfig = parse(tables | {"algorithm": {"name": "sitemoments"}}, RunConfig, "advise")
    experiment = assemble(config, data)
    opener: Any = engine
    with engines.open_engine(opener, experiment) as opened:
        fed = Federation(opened, config.federation.limits)
        start = experiment.algorithm.server_init(experiment.model)
        server = fed.run_round(1, range(len(data.clients)), start)
    a, b, c, n = (server[name].double().cpu() for name in "abcn")
    sums = SiteSums(a, b[:, :, 0], c, n)
    if explains_exactly(sums):
        raise DataError(
            "advise: the other columns give the target exactly, so that there is nothing to gain; leave out the one "
            "that repeats it, as by --set 'data.ignore=[\"COLUMN\"]'"
        )
    return sums


def bootstrap(sums: SiteSums, shared: SharedFit, draws: int = DRAWS, seed: int = 0) -> list[SharedFit]:
    """Fits with the doubt about variances: those of simulated sums, with the coefficients of the sums themselves."""
    draw = torch.Generator().manual_seed(seed)
    fits = []
    for _ in range(draws):
        drawn = refit(simulate(sums, shared, draw), shared, is_draft=True)
        fits.append(with_coefficients(sums, drawn))
    return fits


def quadratic(at: Tensor, square: Tensor) -> Tensor:
    return (at[:, None, :] @ square @ at[:, :, None])[:, 0, 0]


def gains_of(
    sums: SiteSums, shared: SharedFit, fits: Sequence[SharedFit], pooled: Tensor, level: float = 0.9
) -> SharingGains:
    """Of sites with these sums, which may be new, by the models that they would have."""
    square = moments_of_new_rows(sums, pooled)
    own, (ours, covariance) = own_models(sums), shared.models(sums)
    turned = (square @ (own - ours)[:, :, None])[:, :, 0]  # the gain falls by twice this per unit of coefficients
    level_part = quadratic(own, square) - quadratic(ours, square)
    points = torch.from_numpy(stats.norm.ppf((torch.arange(POINTS).double() + 0.5).numpy() / POINTS))
    drawn = []
    for each in fits or [shared]:
        mean, spread = each.models(sums)
        center = level_part - 2 * (turned * mean).sum(1)
        width = 2 * quadratic(turned, spread).clamp(min=0).sqrt()
        drawn.append(center[:, None] + width[:, None] * points)
    values = torch.cat(drawn, dim=1)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=values.dtype)
    low, high = values.quantile(tails, dim=1)
    doubt = (square @ covariance).diagonal(dim1=-2, dim2=-1).sum(-1)
    error = shared.noise + quadratic(own - ours, square) + doubt
    return SharingGains(level_part - 2 * (turned * ours).sum(1), low, high, error)


def as_newcomer(sums: SiteSums, site: int, shared: SharedFit, draws: int = DRAWS, seed: int = 0) -> SharingGains:
    """Of one site that is not in yet: by the others' fit, and its own sums."""
    others = sums.without(site)
    without = refit(others, shared)
    return gains_of(sums.only([site]), without, bootstrap(others, without, draws, seed), pooled_within(others))


def advise(
    data: FederatedData, *, newcomer: str = "", engine: str = "vmap", level: float = 0.9, seed: int = 0
) -> dict[str, Any]:
    """The record: for each site, or for the one that considers joining, its expected gain and what to do."""
    if newcomer and newcomer not in data.clients:
        raise DataError(f"--newcomer {newcomer}: no such site; there are: {', '.join(data.clients)}")
    if len(data.clients) < (4 if newcomer else 3):
        raise DataError(f"advise: {len(data.clients)} sites are too few to see how sites differ; three are needed")
    unit, of_target = unit_of(data)
    sums = exchange_sums(numbers_only(data), engine)
    names, inside = list(data.clients), sums
    if newcomer:
        inside = sums.without(names.index(newcomer))
    shared = fit_shared(inside)
    asked = sums.only([names.index(newcomer)]) if newcomer else sums
    gains = gains_of(asked, shared, bootstrap(inside, shared, seed=seed), pooled_within(inside), level)
    return {
        "data": data.name,
        "target": of_target,
        "level": level,
        "random": structure_words(shared),
        "noise_sd": float(shared.noise.sqrt()) * unit,
        "sites": {
            name: site_record(gains, i, unit, int(asked.n[i]))
            for i, name in enumerate([newcomer] if newcomer else names)
        },
        **({"newcomer": newcomer} if newcomer else {}),
    }


def site_record(gains: SharingGains, i: int, unit: float, rows: int) -> Mapping[str, Any]:
    mean, low, high = (float(part[i]) * unit**2 for part in (gains.mean, gains.low, gains.high))
    error = float(gains.error[i]) * unit**2
    percent = {key: 100 * value / error for key, value in (("gain", mean), ("low", low), ("high", high))}
    named = {"rows": rows, "own_error": error, "gain": mean, "low": low, "high": high}
    return named | {"percent": percent, "verdict": gains.verdicts[i]}


def unit_of(data: FederatedData) -> tuple[float, str]:
    """The standard deviation by which the target was divided, and its name."""
    target = None if data.preparation is None else data.preparation.target
    if target is None:
        return 1.0, ""
    name = f"log {target.name}" if target.is_log else target.name
    return (target.sd if target.task == "regression" else 1.0), name


def structure_words(shared: SharedFit) -> str:
    """What differs between sites."""
    rows, columns = shared.at
    if not len(rows):
        return "nothing"
    if len(rows) == 1:
        return "level"
    return "level and effects" if (rows == columns).all() else "level and effects, together"


def read_sites(
    data: Any, target: str, column: str | None = None, root: Path | None = None, settings: Sequence[str] = ()
) -> FederatedData:
    """All rows of all sites, for one exchange of sums; nothing is held out."""
    table = source_of(data, target, column) | {"val": 0.0, "test": 0.0}
    config: RunConfig = parse(with_settings({"rounds": 1, "data": table}, settings), origin="advise")
    return load(config, root)
