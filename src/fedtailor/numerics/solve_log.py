"""How equilibrium solves ended: reports of single ones, and their tally over a round and over processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Report(NamedTuple):
    """How a solve ended, for each sample."""

    residual: Tensor  # |g(z) - z| / |g(z)| at the last z but one; the result is that g(z)
    iterations: Tensor  # evaluations of g
    converged: Tensor

    def __str__(self) -> str:
        open_ = int((~self.converged).sum())
        return (
            f"{'converged' if not open_ else f'{open_} of {self.converged.numel()} samples not converged'}: "
            f"largest residual {float(self.residual.max()):.2g}, "
            f"{float(self.iterations.double().mean()):.1f} iterations on average"
        )


class Tally(NamedTuple):
    """Many solves in numbers that can be sent to another process."""

    samples: int = 0
    open: int = 0  # samples that did not converge
    iterations: int = 0  # of all samples
    residual: float = 0.0  # the largest

    def __add__(self, other: Any) -> Tally:
        samples, still_open, iterations, residual = other
        larger = max(self.residual, residual, key=lambda v: (math.isnan(v), v))
        return Tally(self.samples + samples, self.open + still_open, self.iterations + iterations, larger)

    @property
    def figures(self) -> dict[str, float]:
        """For people: how many samples did not converge, iterations of a sample, the largest residual."""
        if not self.samples:
            return {}
        mean = self.iterations / self.samples
        return {"solver_open": float(self.open), "solver_iterations": mean, "solver_residual": self.residual}


class Solves(list[Report]):
    """The reports of solves; and the tally of those in other processes."""

    elsewhere = Tally()

    @property
    def tally(self) -> Tally:
        known = [r for r in self if r.converged.numel()]
        if not known:
            return self.elsewhere
        columns = [[(~r.converged).sum(), r.iterations.sum(), r.residual.max()] for r in known]
        read = [torch.stack(column).tolist() for column in zip(*columns, strict=True)]  # once for all solves
        each = (Tally(r.converged.numel(), *figures) for r, *figures in zip(known, *read, strict=True))
        return sum(each, start=self.elsewhere)


_watchers: ContextVar[tuple[Solves, ...]] = ContextVar("watchers", default=())


@contextmanager
def watched() -> Iterator[Solves]:
    """Collects the report of every solve inside the block, those of adjoint equations included."""
    solves = Solves()
    token = _watchers.set((*_watchers.get(), solves))
    try:
        yield solves
    finally:
        _watchers.reset(token)


def log_solve(report: Report) -> None:
    for solves in _watchers.get():
        solves.append(report)


def log_elsewhere(tally: Tally) -> None:
    """Note solves that another process did for this one."""
    for solves in _watchers.get():
        solves.elsewhere += tally


def forget_watchers() -> None:
    """For a forked process: it has copies of them that nobody will ever read."""
    _watchers.set(())
