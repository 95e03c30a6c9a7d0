"""MixedLogit: logistic and multinomial mixed models without pooling the data, by penalised quasi-likelihood.

Breslow, Clayton, J. Am. Stat. Assoc. 88, 1993: at the clients' modes the likelihood is replaced by that of a working
response, whose linear mixed model is fitted as in MixedModel; repeated until nothing moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedtailor.algorithms._shared.generalised_mixed import GeneralisedMixed
from fedtailor.numerics.logits import LOGIT
from fedtailor.numerics.newton import Family


@dataclass(frozen=True)
class MixedLogit(GeneralisedMixed):
    """Common coefficients of the classes' logits, and random ones around them; only sums leave."""

    title: ClassVar[str] = "MixedLogit"
    task: ClassVar[str] = "classification"
    fixed: ClassVar[int] = 1
    citation: ClassVar[str] = """@article{breslow1993approximate,
  title={Approximate Inference in Generalized Linear Mixed Models},
  author={Breslow, Norman E. and Clayton, David G.},
  journal={Journal of the American Statistical Association}, volume={88}, number={421}, year={1993}
}"""

    @property
    def family(self) -> Family:
        return LOGIT
