"""What a site allows, and what of it is spent: the policy in its own file, budgets kept on disk, its secure sums.

Whatever a server asks beyond the policy is refused, and the refusal says which rule it broke.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedtailor.aggregation import accountant
from fedtailor.aggregation.dry_run import calls_made, most_calls
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

GRADIENTS = "gradients"  # what a taped call sends back: derivatives with respect to the message
EXACT = 15  # decimals: metrics are not rounded
MINUTE = 60.0
SPENT, ACCOUNT, OPENED = "spent.json", "epsilon.json", "sums.json"  # what is spent, in the site's own folder
LEDGER = "booked.json"  # beside the account: what all runs may need
ATTEMPTS, SPARE_CALLS = 4, 100  # at a round, whose calls are made again; and calls that any round may make
COUNT = "epsilon.count"  # beside the account: how many replies it must list, so that a lost line is noticed
LEAST_UNITS, LEAST_SHARE = 8, 0.25  # of a layer, with one direction, to be an imprint
LEAST_INPUTS = 3  # with fewer, directions are alike by chance
SAME = 1e-4  # directions that differ by less are one


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
        if self.epsilon and (first := self.cost({self.noise: 1})) > self.epsilon:
            raise ValueError(f"one reply with noise = {self.noise:g} costs {first:.2f}, more than epsilon")
        return self

    def cost(self, replies: dict[float, int]) -> float:
        """Epsilon of all these replies together; the keys are noise multipliers."""
        accountant.require()
        return accountant.renyi_epsilon(replies, self.delta)


class Budget(BaseModel):
    """The table [policy.budget] of a site's own file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    evaluations_per_round: int = Field(default=6, ge=0, description="Evaluations that are answered per round.")
    evaluations_per_run: int = Field(
        default=0, ge=0, description="Evaluations that are answered per run. 0: twice its rounds, plus 12."
    )
    evaluations_per_day: int = Field(default=2500, ge=0, description="Evaluations that all runs of a day may need.")
    evaluations_in_all: int = Field(default=50_000, ge=0, description="Evaluations that all runs ever may need.")
    calls_per_round: int = Field(
        default=0, ge=0, description="Calls of the algorithm's functions per round. 0: as many as it may need."
    )
    calls_per_day: int = Field(default=1_000_000, ge=1, description="Calls that all runs of a day may need.")
    calls_in_all: int = Field(default=20_000_000, ge=1, description="Calls that all runs ever may need.")
    runs_per_day: int = Field(default=200, ge=1, description="Runs that may begin on a day.")
    runs_in_all: int = Field(default=10_000, ge=1, description="Runs that may ever begin.")
    rounds_per_day: int = Field(default=50_000, ge=1, description="Rounds that all runs of a day may have.")
    rounds_in_all: int = Field(default=5_000_000, ge=1, description="Rounds that all runs ever may have.")
    megabytes_per_day: float = Field(default=100_000, gt=0, description="Megabytes of replies that leave on a day.")
    megabytes_in_all: float = Field(default=10_000_000, gt=0, description="Megabytes of replies that ever leave.")
    hours_per_day: float = Field(default=24, gt=0, description="Hours of computing on a day.")
    hours_in_all: float = Field(default=100_000, gt=0, description="Hours of computing in all.")
    memory_mb: int = Field(
        default=0,
        ge=0,
        description="Megabytes of memory of a run's process; with more, it answers no more. 0: any.",
    )
    limited_replies: int = Field(
        default=50,
        ge=0,
        description="Replies per run that are limited to its bounds, or replaced, without a word to the server; then "
        "this site withdraws from the run.",
    )
    limited_per_day: int = Field(
        default=200,
        ge=0,
        description="The same of all runs of a day; then it takes part in none until the next.",
    )
    parameters: int = Field(default=50_000_000, ge=1, description="Numbers of a model that a server may ask for.")
    message_mb: int = Field(default=1024, ge=1, description="Megabytes of a request; a larger one is not read.")
    requests_per_minute: int = Field(default=6000, ge=1, description="Requests of any kind per minute.")
    decimals: int = Field(
        default=3,
        ge=0,
        le=EXACT,
        description=f"Decimals to which metrics are rounded, of numbers above 1 behind their first digit; {EXACT}: not "
        "rounded.",
    )
    min_rows: int = Field(default=10, ge=1, description="Minimum rows for a metric.")
    train_metrics: bool = Field(default=False, description="Allow metrics on training rows.")
    refuse_imprints: bool = Field(
        default=True, description="Refuse models whose units are thresholds on one direction, which single out rows."
    )
    privacy: SitePrivacy = Field(default_factory=SitePrivacy, description="Noise on replies, and a privacy budget.")


class Policy(BaseModel):
    """The table [policy] of a site's own file: what may run on its data, and what may leave."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithms: tuple[str, ...] = Field(description="Algorithms that may run here, as fedtailor list names them.")
    models: tuple[str, ...] = Field(
        default=("linear", "mlp"), description='Models that may run here; own ones as "package.module:Class".'
    )
    sends: tuple[str, ...] = Field(
        description='What may leave, as fedtailor list algorithms names it; "gradients" for methods that '
        "differentiate through a round."
    )
    code: tuple[str, ...] = Field(
        default=(), description='Own tasks, optimizers and metrics that may run here, as "package.module:name".'
    )
    metrics: bool | None = Field(
        default=None,
        description="Whether metrics on this site's samples may be sent to the server. Default: true where replies may "
        "leave openly (sums_of = 0) and without noise (budget.privacy.epsilon = 0).",
    )
    sums_of: int = Field(
        default=0,
        ge=0,
        description="Minimum sites per secure sum; replies then leave in such sums only. 0: replies may leave openly.",
    )
    partners: tuple[str, ...] = Field(
        default=(),
        description='Sites with which this one sums, by name; "name of owner" counts the sites of an owner once, "name '
        'sha256:..." accepts one certificate only. Required with sums_of.',
    )
    min_samples: int = Field(default=20, ge=1, description="Minimum training samples; with fewer, nothing leaves.")
    max_rounds: int = Field(default=1000, ge=1, description="Maximum rounds per run.")
    approve: Literal["policy", "ask"] = Field(
        default="policy",
        description="Whether a run that the policy allows begins by itself, or waits until a person has said yes.",
    )
    reasons: bool = Field(
        default=True, description="Whether a refusal tells the server which rule it breaks; the audit log has it."
    )
    budget: Budget = Field(default_factory=Budget, description="How much may be asked.")

    @property
    def sends_metrics(self) -> bool:
        """Whether metrics may leave; `metrics` decides, or else whether replies may leave openly without noise."""
        return self.sums_of == 0 and not self.budget.privacy.epsilon if self.metrics is None else self.metrics

    def check_run(self, algorithm: str, model: str, rounds: int, samples: int, code: Sequence[str]) -> None:
        """Refuse a run by the names in its header, before anything is imported."""
        if algorithm.lower() not in {name.lower() for name in self.algorithms}:
            raise Refused(f'algorithm "{algorithm}" is not in the policy, which lists {", ".join(self.algorithms)}')
        if model not in self.models:
            raise Refused(f'model "{model}" is not in the policy, which lists {", ".join(self.models)}')
        for name in code:
            if name not in self.code:
                raise Refused(f'the code "{name}" is not in the policy, which lists {", ".join(self.code) or "none"}')
        if rounds > self.max_rounds:
            raise Refused(f"{rounds} rounds are more than the policy's limit of {self.max_rounds}")
        if samples < self.min_samples:
            raise Refused(f"this site has fewer than {self.min_samples} training samples, the minimum of its policy")

    def check_sends(self, algorithm: Algorithm) -> None:
        """Refuse an algorithm that declares to send what `sends` does not list."""
        for name in reply_names(algorithm):
            if name not in self.sends:
                raise Refused(f'{algorithm.title} sends "{name}", which the policy does not allow')

    def check_sums(self, *, is_sealed: bool) -> None:
        """Refuse a run without secure sums where `sums_of` requires them."""
        if self.sums_of and not is_sealed:
            raise Refused("the policy requires secure sums; set privacy.secure_sum = true")

    def check_round(self, round: int) -> None:
        """Refuse rounds beyond the limit: a server may continue for longer than it announced."""
        if round > self.max_rounds:
            raise Refused(f"round {round} is beyond the policy's limit of {self.max_rounds}")


def check_splits(budget: Budget, data: FederatedData, splits: Sequence[str]) -> None:
    """Refuse metrics on training rows, unless they are allowed, and on few rows; an empty split has no metrics."""
    for split in splits:
        rows = len(getattr(data, split).x)
        if split == "train" and not budget.train_metrics:
            raise Refused("the policy does not allow metrics on training rows")
        if 0 < rows < budget.min_rows:
            raise Refused(f"{split} has fewer rows than the {budget.min_rows} that the policy requires for metrics")


def round_metrics(budget: Budget, metrics: Tree) -> Tree:
    """Metrics with so many decimals and, where they are large, no more digits than that and one.

    At a model that is large enough every digit of a loss is before the point: decimals alone would limit nothing.
    """
    if budget.decimals == EXACT:
        return metrics

    def rounded(v: Tensor) -> Tensor:
        size = 10.0 ** torch.where(v.isfinite(), v.abs().double(), 1.0).clamp(min=1.0).log10().floor()
        return (torch.round(v.double() / size, decimals=budget.decimals) * size).to(v.dtype)

    return tree_map(lambda v: rounded(v) if v.is_floating_point() else v, metrics)


class RequestRate:
    """Limits the requests in any minute."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._times = deque[float]()

    def count(self) -> None:
        now = time.monotonic()
        while self._times and now - self._times[0] > MINUTE:
            self._times.popleft()
        if len(self._times) >= self.most:
            raise Refused(f"more than {self.most} requests in a minute, the limit of the policy")
        self._times.append(now)


@dataclass(frozen=True)
class RunNeed:
    """What a run may need at a site, known before it begins."""

    first: int  # round; 0, or less where the algorithm prepares the run
    last: int
    calls_per_round: int
    evaluations: int

    @staticmethod
    def of(budget: Budget, experiment: Experiment, rounds: int, *, has_metrics: bool) -> RunNeed:
        """The need of a run of so many rounds; of metrics, as many as the policy lets one run have."""
        evaluations = budget.evaluations_per_run or 2 * rounds + 12
        first = -experiment.algorithm.preparation
        return RunNeed(first, rounds, most_calls(experiment), evaluations if has_metrics else 0)

    @property
    def calls(self) -> int:
        return SPARE_CALLS + (self.last - self.first) * self.calls_per_round

    def check(self, budget: Budget) -> None:
        """Refuse a run whose rounds cannot be as long as its algorithm may need."""
        if 0 < budget.calls_per_round < self.calls_per_round:
            raise Refused(
                f"a round may need {self.calls_per_round} calls, and the policy allows {budget.calls_per_round}"
            )

    def check_round(self, round: int) -> None:
        """Refuse rounds that were not announced: what a run may need is booked by their number."""
        if not self.first <= round <= self.last:
            raise Refused(f"round {round} is not among those of the run, {self.first} to {self.last}")


class SiteLedger:
    """What the runs of a site may need, booked as each begins, and replies that were limited today.

    It is kept over all runs, names and servers.
    """

    def __init__(self, budget: Budget, folder: Path) -> None:
        self.budget = budget
        self.path = folder / LEDGER
        self.today = datetime.now(UTC).date().isoformat()

    def book(self, run: str, need: RunNeed) -> None:
        """Book what a run may need, or refuse it with the number that is missing; a run is booked once."""
        content = self._read()
        booked = content["runs"]
        if run in booked:
            return
        needs = {"calls": need.calls, "evaluations": need.evaluations, "runs": 1, "rounds": need.last - need.first}
        for what, amount in needs.items():
            in_all = sum(its.get(what, 0) for its in booked.values())
            of_today = sum(its.get(what, 0) for its in booked.values() if its["day"] == self.today)
            for limit, spent, when in (("per_day", of_today, "today"), ("in_all", in_all, "in all")):
                most = getattr(self.budget, f"{what}_{limit}")
                if amount and spent + amount > most:
                    left = max(most - spent, 0)
                    raise Refused(f"the run may need {amount} {what}; of {most} {when} the policy has {left} left")
        booked[run] = {"day": self.today} | needs
        write_json(self.path, content)

    def count_limited(self) -> None:
        """Count a reply that was limited."""
        content = self._read()
        content["limited"] = {self.today: content["limited"].get(self.today, 0) + 1}
        write_json(self.path, content)

    @property
    def has_limited_too_many(self) -> bool:
        """Whether so many replies were limited today that the site takes part in no run."""
        return bool(self._read()["limited"].get(self.today, 0) > self.budget.limited_per_day)

    def _read(self) -> dict[str, Any]:
        return {"runs": {}, "limited": {}} | (dict(read_json(self.path)) if self.path.exists() else {})


class RunUsage:
    """What one run has used of its limits. It is on disk: a server that is restarted gets no new limits."""

    def __init__(self, budget: Budget, folder: Path, need: RunNeed) -> None:
        self.budget = budget
        self.path = folder / SPENT
        self.need = need
        self.most_calls = budget.calls_per_round or max(SPARE_CALLS, ATTEMPTS * need.calls_per_round)
        saved: dict[str, Any] = read_json(self.path) if self.path.exists() else {}
        self.evaluations = {int(k): int(v) for k, v in saved.get("evaluations", {}).items()}  # by round
        self.calls = {int(k): int(v) for k, v in saved.get("calls", {}).items()}
        self.begun = {int(round) for round in saved.get("begun", [])}
        self.limited = int(saved.get("limited", 0))

    def save(self) -> None:
        used = {"evaluations": self.evaluations, "calls": self.calls}
        write_json(self.path, used | {"begun": sorted(self.begun), "limited": self.limited})

    def begin(self, round: int) -> None:
        """A round begins: metrics may be asked for in it."""
        self.need.check_round(round)
        self.begun.add(round)
        self.save()

    def count_limited(self) -> bool:
        """Count a reply that was limited; whether that was one too many."""
        self.limited += 1
        self.save()
        return self.limited > self.budget.limited_replies

    def count_evaluation(self, round: int) -> None:
        """Count an evaluation, or refuse it."""
        if round not in self.begun:
            raise Refused(f"round {round} never began at this site: there are no metrics of it")
        count, total = self.evaluations.get(round, 0), sum(self.evaluations.values())
        if count >= self.budget.evaluations_per_round:
            raise Refused(f"metrics were sent {count} times in round {round}, the limit of the policy")
        if total >= self.need.evaluations:
            raise Refused(f"metrics were sent {total} times in this run, the limit of the policy")
        self.evaluations[round] = count + 1
        self.save()

    def count_call(self, round: int) -> None:
        """Count a call of a client function, or refuse it."""
        count = self.calls.get(round, 0)
        if count >= self.most_calls:
            raise Refused(f"{count} calls were answered in round {round}, the limit of the policy")
        if (total := sum(self.calls.values())) >= ATTEMPTS * self.need.calls:
            raise Refused(f"{total} calls were answered in this run, {ATTEMPTS} times what it may need")
        self.calls[round] = count + 1


class PrivacyAccount:
    """Counts the replies that left with noise, over all runs of this site and all its processes."""

    def __init__(self, privacy: SitePrivacy, folder: Path) -> None:
        self.privacy = privacy
        self.path = folder / ACCOUNT

    def add_noise(self, experiment: Experiment) -> Experiment:
        """The experiment with this site's clipping and noise as the last steps at the client."""
        if not self.privacy.epsilon:
            return experiment
        steps = (*experiment.aggregation.at_client, LocalNoise(self.privacy.clip, self.privacy.noise))
        return replace(experiment, aggregation=replace(experiment.aggregation, at_client=steps))

    def spend(self, experiment: Experiment, function: str | None, placed: list[bool], args: Tree, taped: bool) -> None:
        """Charge one reply before it is computed, or refuse it."""
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
    """The account; None if nothing was ever spent. A `RunError` if it was deleted or replaced by an older copy."""
    beside = path.with_name(COUNT)
    try:
        count = int(beside.read_text()) if beside.exists() else 0
    except ValueError:
        raise RunError(f"{beside}: damaged; it holds the number of replies in {path.name}") from None
    account = dict(read_json(path)) if path.exists() else None
    if count > (0 if account is None else sum(times for _, times in account["replies"])):
        raise RunError(f"{path}: missing or older than {beside.name}; restore it: it holds what is spent")
    return account


def spent_epsilon(folder: Path) -> float | None:
    """What is spent of a site's privacy budget; None without an account."""
    account = _read_account(folder / ACCOUNT)
    return None if account is None else float(account["epsilon"])


def account_text(folder: Path) -> str:
    """What is spent of a site's privacy budget, in words; empty without an account."""
    if (account := _read_account(folder / ACCOUNT)) is None:
        return ""
    count = sum(times for _, times in account["replies"])
    epsilon = f"epsilon {account['epsilon']:.2f} of {account['of']:g} at delta {account['delta']:g}"
    return f"{epsilon}: {count} replies with noise"


def refuse_private_message(experiment: Experiment, function: str, placed: Sequence[bool]) -> None:
    """Refuse a message for this site alone where the algorithm sends all sites the same one.

    A server that knows the others' replies to theirs would read this site's reply off the sum.
    """
    if any(placed) and tuple(placed) not in calls_made(experiment).get(function, set()):
        title = experiment.algorithm.title
        raise Refused(f"{function} with a message for this site alone, in secure sums: {title} sends all the same")


def find_imprint(message: Tree) -> str | None:
    """Describe a layer made to read training rows off a reply, or None (Fowl et al., "Robbing the Fed", ICLR 2022).

    Its units have one direction and different biases: each is a threshold on one number of a sample, and neighbours
    differ by the samples between two thresholds. Only this plain form is found; secure sums, clipping and noise bound
    what a server that hides it better can learn.
    """
    for name, weight, bias in _linear_layers(message):
        if (units := _count_thresholds(weight, bias)) >= max(LEAST_UNITS, LEAST_SHARE * len(weight)):
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
    """Units in the largest group that has one direction and different thresholds."""
    norms = weight.norm(dim=1)
    alive = norms > 0
    directions, thresholds = weight[alive] / norms[alive, None], bias[alive] / norms[alive]
    if len(directions) < LEAST_UNITS:
        return 0
    # two random projections identify a direction: rows are grouped by them, not compared in pairs
    seed = torch.Generator().manual_seed(0)
    marks = torch.randn(weight.shape[1], 2, generator=seed, dtype=torch.float64, device="cpu")
    places = (directions @ marks / marks.norm(dim=0) / SAME).round().to(torch.int64)
    _, group = places.unique(dim=0, return_inverse=True)
    return max((len(thresholds[group == g].unique()) for g in group.bincount().topk(1).indices), default=0)


def make_party(kit: Path, policy: Policy, name: str, run: str, number: int, folder: Path) -> Party:
    """This site as a party to secure sums; refused if its certificate or partners cannot satisfy its policy.

    `run` is what all sites of a sum must have in common from the beginning, `folder` that of the run.
    """
    from fedtailor.aggregation.identity import owners, read_identity  # need cryptography, which other runs do not
    from fedtailor.aggregation.member import Opened, Party

    identity = read_identity(kit / "startup", policy.partners)
    if identity is not None and identity.name != name:
        raise Refused(f'the certificate in {kit.name} is of "{identity.name}", not of this site')
    if policy.sums_of and identity is None:
        raise Refused("the policy requires secure sums, and there is no certificate to sign keys with")
    if policy.sums_of and not policy.partners:
        raise Refused("the policy requires secure sums, but names no partners")
    saved = read_json(folder / OPENED) if (folder / OPENED).exists() else {"round": None, "cohort": []}
    opened = Opened(saved["round"], saved["cohort"], saved.get("state", ""))
    opened.save = lambda its: write_json(
        folder / OPENED, {"round": its.round, "cohort": sorted(its.cohort), "state": its.state}
    )
    return Party(number, max(2, policy.sums_of), identity, run, opened, owners(policy.partners))
