"""What a site allows. The file is the site's own: whatever a server asks beyond it is refused by name."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from fedtailor.core.algorithm import Algorithm, reply_names
from fedtailor.deploy.flare.budget import Budget
from fedtailor.deploy.flare.refusal import Refused

GRADIENTS = "gradients"  # what a taped call sends back: derivatives by the message that was received


class Policy(BaseModel):
    """What may be run beside this site's data, and what may leave it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithms: tuple[str, ...] = Field(description="Algorithms that may run here, as fedtailor list names them.")
    models: tuple[str, ...] = Field(
        default=("linear", "mlp"), description='Models that may run here; own ones as "package.module:Class".'
    )
    sends: tuple[str, ...] = Field(
        description='What may leave, in the words of fedtailor list algorithms; "gradients" for methods that learn '
        "through a whole round."
    )
    code: tuple[str, ...] = Field(
        default=(), description='Own tasks, optimizers and metrics that may run here, as "package.module:name".'
    )
    metrics: bool | None = Field(
        default=None,
        description="Whether metrics on this site's samples may be sent to the server. Unless it is said here: where "
        "replies may leave alone (sums_of = 0) and have no noise (budget.privacy.epsilon = 0).",
    )
    sums_of: int = Field(
        default=0,
        ge=0,
        description="Minimum sites per secure sum; replies then leave in such sums only. 0: replies may leave alone.",
    )
    partners: tuple[str, ...] = Field(
        default=(),
        description='Sites with which this one sums, by name; "name of owner" counts the sites of an owner once, and '
        '"name sha256:..." is for one certificate only. Needed with sums_of.',
    )
    min_samples: int = Field(default=20, ge=1, description="Minimum training samples; with fewer nothing leaves.")
    max_rounds: int = Field(default=1000, ge=1, description="Maximum rounds per run.")
    budget: Budget = Field(default_factory=Budget, description="How much may be asked.")

    @property
    def tells_metrics(self) -> bool:
        """Whether metrics may leave."""
        return self.sums_of == 0 and not self.budget.privacy.epsilon if self.metrics is None else self.metrics

    def check_run(self, algorithm: str, model: str, rounds: int, samples: int, code: Sequence[str]) -> None:
        """Before anything of a run is looked at; names decide, nothing is imported yet."""
        if algorithm.lower() not in {name.lower() for name in self.algorithms}:
            raise Refused(f'algorithm "{algorithm}" is not among those of the policy: {", ".join(self.algorithms)}')
        if model not in self.models:
            raise Refused(f'model "{model}" is not among those of the policy: {", ".join(self.models)}')
        for name in code:
            if name not in self.code:
                raise Refused(f'the code "{name}" is not among that of the policy: {", ".join(self.code) or "none"}')
        if rounds > self.max_rounds:
            raise Refused(f"{rounds} rounds are more than the {self.max_rounds} of the policy")
        if samples < self.min_samples:
            raise Refused(f"this site has fewer than the {self.min_samples} training samples of the policy")

    def check_sends(self, algorithm: Algorithm) -> None:
        """Everything that the algorithm declares to send must be allowed."""
        for name in reply_names(algorithm):
            if name not in self.sends:
                raise Refused(f'{algorithm.title} sends "{name}", which the policy does not let out')

    def check_sums(self, *, is_sealed: bool) -> None:
        """Whether the server's way of adding up is good enough."""
        if self.sums_of and not is_sealed:
            raise Refused("the policy lets replies out in secure sums only; set privacy.secure_sum = true")

    def check_round(self, round: int) -> None:
        """A server may go on for longer than it said."""
        if round > self.max_rounds:
            raise Refused(f"round {round} is beyond the {self.max_rounds} of the policy")
