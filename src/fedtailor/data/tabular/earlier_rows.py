"""Rows that a fit knows already: their side of the split, and which sites changed.

A row is identified by a hash of its features and target, prepared as in the earlier fit. Test rows stay test rows; new
rows are split by the same rule.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.core.data import FederatedData
from fedtailor.data.configs import SplitConfig
from fedtailor.data.splits import Indices, Split, split
from fedtailor.data.tabular.preparation import CategoryColumn, Floats, NumberColumn, Preparation
from fedtailor.errors import DataError

Keys = dict[str, dict[str, list[str]]]  # site -> train or test -> the hash of each row


def row_keys(data: FederatedData) -> Keys:
    """Hashes of all rows of a federation; validation rows count as training rows."""
    keys: Keys = {}
    for i, site in enumerate(data.clients):
        parts = {name: getattr(data, name).of(i) for name in ("train", "val", "test")}
        features = slice(None) if data.preparation is None else ~data.preparation.is_statistic
        hashes = {
            n: _hash_rows(x.numpy()[:, features], _target_bytes(y.numpy(), data.classes)) for n, (x, y) in parts.items()
        }
        keys[site] = {"train": hashes["train"] + hashes["val"], "test": hashes["test"]}
    return keys


def _target_bytes(y: NDArray[Any], classes: Sequence[str]) -> list[bytes]:
    """Targets as bytes; classes by name, since their numbers may change."""
    return [classes[i].encode() for i in y.tolist()] if classes else [v.tobytes() for v in y.astype(np.float64)]


def _hash_rows(x: Floats, y: Sequence[bytes]) -> list[str]:
    rows = np.ascontiguousarray(x, dtype=np.float64)
    pairs = zip(rows, y, strict=True)
    return [hashlib.blake2b(row.tobytes() + target, digest_size=8).hexdigest() for row, target in pairs]


@dataclass(frozen=True)
class SiteChange:
    """How a site's rows differ from those of the earlier fit."""

    before: int
    after: int
    added: int
    removed: int
    kept_test: Indices  # positions of test rows that were test rows before

    @property
    def is_any(self) -> bool:
        return bool(self.added or self.removed)


@dataclass
class EarlierRows:
    """The rows of an earlier fit; splitting a site records its change."""

    preparation: Preparation
    keys: Keys
    number: int  # of the update, part of the random stream that splits new rows
    changes: dict[str, SiteChange] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)  # the sites as they were read
    notes: list[str] = field(default_factory=list)

    def check(self, sites: Sequence[Any], columns: Sequence[str], task: str) -> None:
        """Refuse tables with other columns than the fit had."""
        known, file = {c.name: c for c in self.preparation.columns}, sites[0].file
        anew = "an update keeps the columns of its fit; put them back, or fit anew with fedtailor fit"
        for words, names in (("new", set(columns) - set(known)), ("gone", set(known) - set(columns))):
            if names:
                quoted = ", ".join(f'"{name}"' for name in sorted(names))
                are = "is" if len(names) == 1 else "are"
                raise DataError(f"{file}: columns changed: {quoted} {are} {words}; {anew}")
        for name, column in known.items():
            is_number = name in sites[0].numeric
            if is_number != isinstance(column, NumberColumn):
                was, now = ("categories", "numbers") if is_number else ("numbers", "categories")
                raise DataError(f'{file}: column "{name}" has {now}, in the fit it had {was}; {anew}')
        was = self.preparation.target.task
        if task != was:
            raise DataError(f"{file}: the target was one of {was}, now it is one of {task}; {anew}")

    def cut(self, site: Any, classes: Sequence[str], config: SplitConfig, seed: int) -> Split:
        """Split a site: old rows stay on their side, new ones are split among themselves."""
        labelled = self.preparation.target.task == "classification"
        client = f"{site.name}, update {self.number}"
        before = self.keys.get(site.name, {"train": [], "test": []})
        side = np.array(self._sides(site, classes, before), dtype=object)
        fresh = np.flatnonzero(side == "")
        known = {name: np.flatnonzero(side == name) for name in ("train", "test")}
        old = len(before["train"]) + len(before["test"])
        most = None if config.max_samples is None else max(config.max_samples - old, 0)
        if most == 0:
            fresh = fresh[:0]
        labels = site.y[fresh] if labelled else None
        limited = config.model_copy(update={"max_samples": most or None})
        added = split(len(fresh), labels, limited, seed=seed, client=client)
        used = len(added.train) + len(added.val) + len(added.test)
        retained = len(known["train"]) + len(known["test"])
        whole = Split(
            np.sort(np.concatenate([known["train"], fresh[added.train]])),
            fresh[added.val],
            np.sort(np.concatenate([known["test"], fresh[added.test]])),
        )
        self.raw[site.name] = site
        self.changes[site.name] = SiteChange(old, retained + used, used, old - retained, known["test"])
        return whole

    def _sides(self, site: Any, classes: Sequence[str], before: Mapping[str, list[str]]) -> list[str]:
        """Side of each row, "train" or "test"; "" for new rows."""
        target = self.preparation.target
        if not before["train"] and not before["test"]:
            return [""] * len(site.y)
        x = self.preparation.encode(site.name, site.numeric, site.categorical, site.file, [])
        x = x[:, ~self.preparation.is_statistic]  # of a training row it is without its own target
        y = site.y if classes else target.standardise(site.y)
        left = {name: Counter(keys) for name, keys in before.items()}
        sides = []
        for key in _hash_rows(x, _target_bytes(y, classes)):
            side = next((name for name in ("test", "train") if left[name][key] > 0), "")
            if side:
                left[side][key] -= 1
            sides.append(side)
        return sides

    def revise(self, fresh: Preparation) -> Preparation:
        """Keep the earlier scales where possible, so that an unchanged site keeps its features."""
        old = self.preparation
        for now in fresh.columns:
            was = next(c for c in old.columns if c.name == now.name)
            both = [c for c in (now, was) if isinstance(c, CategoryColumn)]
            if len({(c.categories, c.statistics) for c in both}) > 1:
                self.notes.append(f'column "{now.name}" has other categories now; all models are trained from scratch')
                return fresh
        if fresh.target.classes != old.target.classes:
            self.notes.append("the target has other classes now; all models are trained from scratch")
            return fresh
        columns: list[NumberColumn | CategoryColumn] = []
        for was in old.columns:
            now = next(c for c in fresh.columns if c.name == was.name)
            if isinstance(now, NumberColumn) and isinstance(was, NumberColumn):
                columns.append(now.model_copy(update={"sites": self._scales(was, now)}))
            else:
                columns.append(now)
        return fresh.model_copy(update={"columns": tuple(columns), "target": old.target})

    def _scales(self, was: NumberColumn, now: NumberColumn) -> dict[str, Any]:
        common = {(s.mean, s.sd) for s in was.sites.values()}
        pooled = {"mean": next(iter(common))[0], "sd": next(iter(common))[1]} if len(common) == 1 else {}
        return {
            name: scale.model_copy(update=pooled) if self.changes[name].is_any else was.sites[name]
            for name, scale in now.sites.items()
        }
