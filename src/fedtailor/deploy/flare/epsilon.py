"""A site's own privacy budget: noise on every reply, and an account of all of them, whatever run they were for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedtailor.aggregation import accountant
from fedtailor.aggregation.noise import LocalNoise, exposed_part
from fedtailor.core.experiment import Experiment
from fedtailor.core.trees import Tree
from fedtailor.deploy.flare.refusal import Refused
from fedtailor.errors import RunError
from fedtailor.experiments.store import read_json, write_json

ACCOUNT = "epsilon.json"
COUNT = "epsilon.count"  # beside the account: of how many replies it must tell, so that lost ones are missed


class SitePrivacy(BaseModel):
    """The table [policy.budget.privacy] of a site's own file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epsilon: float = Field(
        default=0.0, ge=0, description="Budget of all replies of all runs together; 0: no noise, no budget."
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="Delta at which epsilon is counted.")
    clip: float = Field(default=1.0, gt=0, description="Clip each reply's change to this L2 norm.")
    noise: float = Field(default=1.0, gt=0, description="Noise multiplier: noise std / clip.")

    @model_validator(mode="after")
    def _enough_for_one(self) -> SitePrivacy:
        """A budget that the first reply would exceed is a mistake."""
        if self.epsilon and (first := self.cost({self.noise: 1})) > self.epsilon:
            raise ValueError(f"one reply with noise = {self.noise:g} costs {first:.2f}, more than epsilon")
        return self

    def cost(self, replies: dict[float, int]) -> float:
        """Epsilon of so many replies by noise multiplier."""
        accountant.require()
        return accountant.renyi_epsilon(replies, self.delta)


class Account:
    """Replies that left with noise, on disk: neither another run nor a new process begins at nothing."""

    def __init__(self, privacy: SitePrivacy, folder: Path) -> None:
        self.privacy = privacy
        self.path = folder / ACCOUNT

    def noised(self, experiment: Experiment) -> Experiment:
        """The experiment as it runs here."""
        if not self.privacy.epsilon:
            return experiment
        steps = (*experiment.aggregation.at_client, LocalNoise(self.privacy.clip, self.privacy.noise))
        return replace(experiment, aggregation=replace(experiment.aggregation, at_client=steps))

    def spend(self, experiment: Experiment, function: str | None, placed: list[bool], args: Tree, taped: bool) -> None:
        """One more reply, before it is made; or a refusal."""
        if not self.privacy.epsilon:
            return
        if function is None or taped:
            raise Refused("a taped call sends derivatives, to which this site's noise does not apply")
        if bare := exposed_part(experiment.algorithm, function, experiment.model, args, tuple(placed)):
            raise Refused(f'{function} sends "{bare}", which is no new version of what was sent: no noise covers it')
        replies = self._replies()
        spent, replies[self.privacy.noise] = self.privacy.cost(replies), replies.get(self.privacy.noise, 0) + 1
        if (total := self.privacy.cost(replies)) > self.privacy.epsilon:
            count = sum(replies.values()) - 1
            raise Refused(
                f"the privacy budget is spent: epsilon {spent:.2f} of {self.privacy.epsilon:g} after {count} replies, "
                f"{total:.2f} with one more"
            )
        account = {"epsilon": total, "of": self.privacy.epsilon, "delta": self.privacy.delta}
        write_json(self.path, account | {"replies": [[noise, times] for noise, times in replies.items()]})
        self.path.with_name(COUNT).write_text(str(sum(replies.values())))

    def _replies(self) -> dict[float, int]:
        account = _account(self.path)
        return {} if account is None else {float(noise): int(times) for noise, times in account["replies"]}


def _account(path: Path) -> dict[str, Any] | None:
    """The account; None if nothing was ever spent. A `RunError` if it is gone, or is an older one."""
    beside = path.with_name(COUNT)
    try:
        count = int(beside.read_text()) if beside.exists() else 0
    except ValueError:
        raise RunError(f"{beside}: damaged; it says of how many replies {path.name} tells") from None
    account = dict(read_json(path)) if path.exists() else None
    if count > (0 if account is None else sum(times for _, times in account["replies"])):
        raise RunError(f"{path}: gone, or older than what has left; it says what is spent of the privacy budget")
    return account


def spent_text(folder: Path) -> str:
    """What the account of a site says, for people; "" if there is none."""
    if (account := _account(folder / ACCOUNT)) is None:
        return ""
    count = sum(times for _, times in account["replies"])
    epsilon = f"epsilon {account['epsilon']:.2f} of {account['of']:g} at delta {account['delta']:g}"
    return f"{epsilon}: {count} replies with noise"
