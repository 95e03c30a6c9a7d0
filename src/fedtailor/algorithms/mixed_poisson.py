"""MixedPoisson: a Poisson mixed model of counts without pooling the data, by Laplace's approximation.

Pinheiro, Chao, J. Comput. Graph. Stat. 15, 2006, section 2, for what is maximised; begun by the quasi-likelihood of
MixedLogit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedtailor.algorithms._shared.generalised_mixed import GeneralisedMixed
from fedtailor.numerics.counts import POISSON
from fedtailor.numerics.newton import Family


@dataclass(frozen=True)
class MixedPoisson(GeneralisedMixed):
    """Common coefficients of the logarithm of a rate, and random ones around them; only sums leave."""

    laplace: bool = True
    """End with Laplace's approximation of the likelihood, as lme4 has it, in place of quasi-likelihood alone."""

    title: ClassVar[str] = "MixedPoisson"
    task: ClassVar[str] = "count"
    citation: ClassVar[str] = """@article{pinheiro2006efficient,
  title={Efficient Laplacian and Adaptive Gaussian Quadrature Algorithms for Multilevel Generalized Linear Mixed
  Models},
  author={Pinheiro, Jos{\\'e} C. and Chao, Edward C.},
  journal={Journal of Computational and Graphical Statistics}, volume={15}, number={1}, year={2006}
}"""

    @property
    def family(self) -> Family:
        return POISSON
