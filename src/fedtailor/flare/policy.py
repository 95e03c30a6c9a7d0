"""What a site allows and what of it is spent: its policy, its limits, its privacy budget and its part in secure sums.

The file is the site's own: whatever a server asks beyond it is refused by name.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedtailor.aggregation import accountant
from fedtailor.aggregation.dry_run import calls_made
from fedtailor.aggregation.noise import LocalNoise, exposed_part
from fedtailor.core.algorithm import Algorithm, reply_names
from fedtailor.core.data import FederatedData
from fedtailor.core.experiment import Experiment
from fedtailor.core.trees import Tree, tree_map
from fedtailor.errors import RunError
from fedtailor.experiments.store import read_json, write_json
from fedtailor.flare.protocol import Refused

if TYPE_CHECKING:
    from fedtailor.aggregation.member import Party

UNITS = 8  # fewer thresholds tell little
SHARE = 0.25  # of a layer's units
SAME = 1e-4  # directions that differ by less are one
LEAST_INPUTS = 3  # with fewer, directions are easily alike


def find_imprint(message: Tree) -> str | None:
    """The name of a layer whose units are thresholds on one direction, in a message with parameters by name."""
    for name, weight, bias in _linear_layers(message):
        if (units := _count_thresholds(weight, bias)) >= max(UNITS, SHARE * len(weight)):
            return f"{units} of {len(weight)} units of {name} are thresholds on one direction"
    return None


def _linear_layers(tree: Tree) -> Iterator[tuple[str, Tensor, Tensor]]:
    if isinstance(tree, dict):
        for key, weight in tree.items():
            bias = tree.get(f"{key.removesuffix('weight')}bias") if key.endswith("weight") else None
            if isinstance(weight, Tensor) and isinstance(bias, Tensor) and bias.shape == weight.shape[:1]:
                rows = weight.detach().flatten(1).double() if weight.dim() > 1 else weight[:0]
                if rows.dim() == 2 and rows.shape[1] >= LEAST_INPUTS:
                    yield key.removesuffix(".weight"), rows, bias.detach().double()
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ():
        yield from _linear_layers(part)


def _count_thresholds(weight: Tensor, bias: Tensor) -> int:
    """Units in the largest group with one direction and different thresholds."""
    norms = weight.norm(dim=1)
    alive = norms > 0
    directions, thresholds = weight[alive] / norms[alive, None], bias[alive] / norms[alive]
    if len(directions) < UNITS:
        return 0
    # a direction by two numbers: rows are sorted by them, not compared with each other
    seed = torch.Generator().manual_seed(0)
    marks = torch.randn(weight.shape[1], 2, generator=seed, dtype=torch.float64, device="cpu")
    places = (directions @ marks / marks.norm(dim=0) / SAME).round().to(torch.int64)
    _, group = places.unique(dim=0, return_inverse=True)
    return max((len(thresholds[group == g].unique()) for g in group.bincount().topk(1).indices), default=0)


def refuse_private_message(experiment: Experiment, function: str, placed: Sequence[bool]) -> None:
    """Refuse a message for this site alone where the algorithm sends all the same.

    What the others reply to theirs could be known, and the sum would then be this site's reply.
    """
    if any(placed) and tuple(placed) not in calls_made(experiment).get(function, set()):
        title = experiment.algorithm.title
        raise Refused(f"{function} with a message for this site alone in a run of secure sums; {title} sends no such")


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


class PrivacyAccount:
    """Replies that left with noise, on disk: neither another run nor a new process begins at nothing."""

    def __init__(self, privacy: SitePrivacy, folder: Path) -> None:
        self.privacy = privacy
        self.path = folder / ACCOUNT

    def add_noise(self, experiment: Experiment) -> Experiment:
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
        account = _read_account(self.path)
        return {} if account is None else {float(noise): int(times) for noise, times in account["replies"]}


def _read_account(path: Path) -> dict[str, Any] | None:
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


def account_text(folder: Path) -> str:
    """What the account of a site says, for people; "" if there is none."""
    if (account := _read_account(folder / ACCOUNT)) is None:
        return ""
    count = sum(times for _, times in account["replies"])
    epsilon = f"epsilon {account['epsilon']:.2f} of {account['of']:g} at delta {account['delta']:g}"
    return f"{epsilon}: {count} replies with noise"


SPENT = "spent.json"
MINUTE = 60.0
EXACT = 15  # decimals


class Budget(BaseModel):
    """The table [policy.budget] of a site's own file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    evaluations_per_round: int = Field(default=6, ge=0, description="Times that metrics are told in one round.")
    evaluations_per_run: int = Field(
        default=0, ge=0, description="Times that metrics are told in one run. 0: twice its rounds, and 12."
    )
    calls_per_round: int = Field(default=400, ge=1, description="Calls of the algorithm's functions in one round.")
    requests_per_minute: int = Field(default=6000, ge=1, description="Requests of any kind within a minute.")
    decimals: int = Field(
        default=3, ge=0, le=EXACT, description=f"Decimals to which metrics are rounded; {EXACT}: not at all."
    )
    min_rows: int = Field(default=10, ge=1, description="Minimum rows behind a metric.")
    train_metrics: bool = Field(default=False, description="Whether metrics on training rows may be told.")
    refuse_imprints: bool = Field(
        default=True, description="Refuse models whose units are thresholds on one direction, which single rows out."
    )
    privacy: SitePrivacy = Field(default_factory=SitePrivacy, description="Noise on replies, and its own budget.")


class RunUsage:
    """What one run has used up. On disk, for a server that comes back may not ask anew."""

    def __init__(self, budget: Budget, folder: Path, rounds: int) -> None:
        self.budget = budget
        self.path = folder / SPENT
        self.most = budget.evaluations_per_run or 2 * rounds + 12
        saved: dict[str, Any] = read_json(self.path) if self.path.exists() else {}
        self.evaluations = {int(k): int(v) for k, v in saved.get("evaluations", {}).items()}  # by round
        self.calls = {int(k): int(v) for k, v in saved.get("calls", {}).items()}

    def save(self) -> None:
        """Whatever is asked next, this was answered."""
        write_json(self.path, {"evaluations": self.evaluations, "calls": self.calls})

    def count_evaluation(self, round: int) -> None:
        """One more evaluation, or a refusal."""
        count, total = self.evaluations.get(round, 0), sum(self.evaluations.values())
        if count >= self.budget.evaluations_per_round:
            raise Refused(f"metrics were told {count} times in round {round}, as often as the policy allows")
        if total >= self.most:
            raise Refused(f"metrics were told {total} times in this run, as often as the policy allows")
        self.evaluations[round] = count + 1
        self.save()

    def count_call(self, round: int) -> None:
        """One more call of the algorithm's functions, or a refusal."""
        count = self.calls.get(round, 0)
        if count >= self.budget.calls_per_round:
            raise Refused(f"{count} calls were answered in round {round}, as many as the policy allows")
        self.calls[round] = count + 1


def check_splits(budget: Budget, data: FederatedData, splits: Sequence[str]) -> None:
    """Whether numbers on these rows may leave; a split without rows has none to tell."""
    for split in splits:
        rows = len(getattr(data, split).x)
        if split == "train" and not budget.train_metrics:
            raise Refused("the policy does not let metrics on training rows out")
        if 0 < rows < budget.min_rows:
            raise Refused(f"{split} has fewer than the {budget.min_rows} rows that the policy wants behind a metric")


def round_metrics(budget: Budget, metrics: Tree) -> Tree:
    """Metrics as they may leave."""
    if budget.decimals == EXACT:
        return metrics
    return tree_map(lambda v: torch.round(v, decimals=budget.decimals) if v.is_floating_point() else v, metrics)


class RequestRate:
    """Requests of the last minute."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._times = deque[float]()

    def count(self) -> None:
        """One more, or a refusal."""
        now = time.monotonic()
        while self._times and now - self._times[0] > MINUTE:
            self._times.popleft()
        if len(self._times) >= self.most:
            raise Refused(f"more than {self.most} requests within a minute")
        self._times.append(now)


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
    def sends_metrics(self) -> bool:
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


OPENED = "sums.json"


def make_party(kit: Path, policy: Policy, name: str, run: str, number: int, folder: Path) -> Party:
    """What a site brings to the secure sums of a run; refused if its policy wants more than it can see to."""
    from fedtailor.aggregation.identity import owners, read_identity  # need cryptography, which other runs do without
    from fedtailor.aggregation.member import Opened, Party

    identity = read_identity(kit / "startup", policy.partners)
    if identity is not None and identity.name != name:
        raise Refused(f'the certificate in {kit.name} is of "{identity.name}", not of this site')
    if policy.sums_of and identity is None:
        raise Refused("the policy wants secure sums, and there is no certificate here to sign keys with")
    if policy.sums_of and not policy.partners:
        raise Refused("the policy wants secure sums, and names no partners that they may be made with")
    saved = read_json(folder / OPENED) if (folder / OPENED).exists() else {"round": None, "cohort": []}
    opened = Opened(saved["round"], saved["cohort"])
    opened.save = lambda its: write_json(folder / OPENED, {"round": its.round, "cohort": sorted(its.cohort)})
    return Party(number, max(2, policy.sums_of), identity, run, opened, owners(policy.partners))
