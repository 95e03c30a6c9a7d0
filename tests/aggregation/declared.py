"""An algorithm whose one function sends a vector, declared for a plain sum alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedtailor.core.algorithm import Algorithm, ReplySpec, on_client

VECTOR = ReplySpec("vector", lambda algorithm, model: {"w": model.like.new_zeros(3)}).summed()


@dataclass(frozen=True)
class Vectors(Algorithm):
    @on_client(sends=VECTOR)
    def local(self, me: Any, *message: Any) -> Any:
        return {}, {"w": me.n.expand(3)}
