"""JointLS: least squares with given personal and common features, solved exactly in one round.

With all features personal it is every client's own least squares, with none the pooled one, with the right ones what an
oracle would do. Elimination of the personal part (Schur complement): Golub, Van Loan, Matrix Computations, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedtailor.algorithms._shared.random_coefficients import NORMAL
from fedtailor.core.algorithm import Algorithm, ReplySpec, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.federation import Federation
from fedtailor.core.model import Model
from fedtailor.core.trees import Params, Tree
from fedtailor.numerics import ridge

VECTOR = ReplySpec("vector of the model's size", lambda algorithm, model: ridge.as_vector(model, model.params))


@dataclass(frozen=True)
class JointLS(Algorithm):
    """Which features are personal is given, not learned."""

    personal_features: tuple[int, ...] | None = None
    """Indices of the personal features, from 0; all by default."""

    title: ClassVar[str] = "JointLS"
    learns: ClassVar[str] = "models"
    keeps: ClassVar[str] = "entries"
    private: ClassVar[str] = "personal coefficients"
    onboards_fitted: ClassVar[bool] = True
    citation: ClassVar[str] = """@book{golub2013matrix,
  title={Matrix Computations}, edition={4},
  author={Golub, Gene H. and Van Loan, Charles F.},
  publisher={Johns Hopkins University Press}, year={2013}
}"""

    def check(self, model: Model, task: str) -> None:
        ridge.check(model, task)

    def server_init(self, model: Model) -> Tensor:
        return torch.zeros_like(ridge.as_vector(model, model.params))

    def client_init(self, me: ClientContext) -> Tree:
        return ridge.statistics(me.model, me.train)

    def own(self, w: Tensor) -> Tensor:
        """1 at personal features, 0 at common ones."""
        if self.personal_features is None:
            return w.new_ones(len(w))
        return w.new_zeros(len(w)).index_fill(0, w.new_tensor(self.personal_features, dtype=torch.int64), 1)

    def fit_personal(self, d: Params, rest: Tensor) -> Tensor:
        """The personal coefficients that fit `rest` best, with zeros at the common ones."""
        own = self.own(rest)
        a = own[:, None] * d["A"] * own[None]
        return torch.linalg.pinv(a, hermitian=True, rtol=1e-12) @ (own[:, None] * rest)

    @on_client(sends=(NORMAL.summed(), VECTOR.summed()))
    def local(self, me: ClientContext) -> tuple[Tree, Tree]:
        d, common = me.state, 1 - self.own(me.state["b"])
        a = d["A"] - d["A"] @ self.fit_personal(d, d["A"])
        b = d["b"] - d["A"] @ self.fit_personal(d, d["b"])
        return d, (common[:, None] * a * common[None], common[:, None] * b)

    def round(self, fed: Federation, w: Tensor) -> Tensor:
        a, b = fed.sum(fed.map(self.local))
        return torch.linalg.pinv(a, hermitian=True, rtol=1e-12) @ b

    def personal(self, me: ClientContext, w: Tensor) -> Params:
        d = me.state
        return ridge.as_params(me.model, w + self.fit_personal(d, d["b"] - d["A"] @ w))
