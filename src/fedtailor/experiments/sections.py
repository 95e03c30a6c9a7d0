"""The sections of a configuration: every key with its sentence, and its default or where that stands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from fedtailor.aggregation.clip import Clip
from fedtailor.aggregation.noise import GaussianNoise
from fedtailor.aggregation.robust import Robust
from fedtailor.aggregation.secure import Secure
from fedtailor.aggregation.server_step import ServerOptimizer, ServerOptimizerName
from fedtailor.core.environment import Environment
from fedtailor.core.model import BufferPolicy
from fedtailor.core.reduce import Aggregation, Limits, Open
from fedtailor.engines import EngineName, machine
from fedtailor.engines.attacked import AttackName
from fedtailor.errors import ConfigError, nearest
from fedtailor.models.adapters import AdapterConfig
from fedtailor.training.arithmetic import Arithmetic, Precision
from fedtailor.training.optimizers import find as find_optimizer
from fedtailor.training.solver import Solver
from fedtailor.training.specification import PartOptions, Schedule, ScheduleName

SAME = ("buffers", "prior", "dtype")  # of the model: the same for all clients
VALUES, RANGE = "values", "range"  # what may be searched: a list, or all numbers between two


class Section(BaseModel):
    """Immutable; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class OpenSection(BaseModel):
    """A section whose other keys are options of what it names; they are checked when that is built."""

    model_config = ConfigDict(frozen=True, extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """The keys beyond the declared ones."""
        return dict(self.model_extra or {})


class AlgorithmSection(OpenSection):
    """Which algorithm, and its hyper-parameters."""

    name: str = Field(
        default="fedrep", description="Algorithm; fedtailor list algorithms shows them and their options."
    )


class ModelSection(OpenSection):
    """Which model, and its options."""

    name: str = Field(default="mlp", description='Model, or an own nn.Module as "package.module:Class".')
    head: tuple[str, ...] = Field(
        default=(), description="Modules of the personal head, or globs; empty: the model's default."
    )
    adapter: AdapterConfig | None = Field(default=None, description="Adapters to train instead of the weights.")
    buffers: BufferPolicy = Field(
        default="private", description="BatchNorm statistics: private to each client, or averaged (mean)."
    )
    prior: Literal["none", "label"] = Field(
        default="none", description="label: add each client's log label frequencies to its logits."
    )
    dtype: Literal["float32", "float64"] = Field(default="float32", description="Floating-point precision.")
    checkpoint: tuple[str, ...] | None = Field(
        default=None,
        description="Gradient checkpointing: parts, or globs, whose activations are recomputed to save memory.",
    )
    by_client: dict[str, dict[str, Any]] | None = Field(
        default=None,
        description="Clients with a different model, by name or glob: its name, head, adapter, checkpoint and options.",
    )

    def at(self, client: str) -> ModelSection:
        """The model of a client: the first entry of `by_client` that has its name, else this one."""
        own = next((v for name, v in (self.by_client or {}).items() if fnmatchcase(client, name)), None)
        base = self.model_dump(exclude={"by_client"}, exclude_none=True)
        if own is None:
            return ModelSection(**base)
        for key in own.keys() & {*SAME, "by_client"}:
            raise ConfigError(f'model.by_client: "{key}" is the same for all clients; set model.{key}')
        if "name" in own:  # options of one model mean nothing to another
            base = {k: base[k] for k in SAME}
        try:
            return ModelSection(**(base | own))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(f'model.by_client: {key} for "{client}": {first["msg"]}', code="config.value") from None

    def check_clients(self, clients: Sequence[str]) -> None:
        """Fail if an entry of `by_client` matches no client."""
        for name in self.by_client or ():
            if not any(fnmatchcase(client, name) for client in clients):
                raise ConfigError(f'model.by_client: no client "{name}"; {nearest(name, clients)}')


class TaskSection(OpenSection):
    """The task: what is predicted, and its options, such as quantiles or weights."""

    name: str = Field(
        default="auto",
        description="auto (given by the data), classification, multilabel, regression, count, quantile, survival, "
        'tokens, segmentation, or your own "package.module:Class".',
    )


class PartSection(Section):
    """Other steps for the parameters of a part of the model, such as [local.parts.head]; what is not set is as for all.

    A part is head, body, a module, or a glob of parameters.
    """

    optimizer: str | None = Field(default=None, description="As local.optimizer.")
    lr: float | None = Field(default=None, gt=0, description="Learning rate.")
    momentum: float | None = Field(default=None, ge=0, lt=1, description="Momentum.")
    weight_decay: float | None = Field(default=None, ge=0, description="Weight decay.")


class LocalSection(Section):
    """Local training, the same for every algorithm."""

    optimizer: str = Field(
        default=Solver.optimizer,
        description='sgd, nesterov, adam, adamw, a class such as "torch.optim.RMSprop", or your own "module:function".',
    )
    lr: float = Field(default=Solver.lr, gt=0, description="Learning rate.")
    momentum: float = Field(default=Solver.momentum, ge=0, lt=1, description="Momentum (sgd and nesterov).")
    weight_decay: float = Field(
        default=Solver.weight_decay, ge=0, description="Weight decay: added to the gradient; adamw: decoupled."
    )
    clip: float = Field(
        default=Solver.clip, ge=0, description="Clip each step's gradient to this L2 norm; 0: no clipping."
    )
    batch_size: int = Field(default=Solver.batch_size, ge=0, description="Batch size; 0: full batch.")
    accumulate: int = Field(
        default=Solver.accumulate,
        ge=1,
        description="Gradient accumulation: batches per step.",
    )
    keep_state: bool = Field(
        default=Solver.keep_state,
        description="Keep each client's optimizer state between rounds; otherwise it is reset.",
    )
    refit: int = Field(
        default=Solver.refit,
        ge=0,
        description="Epochs to refit a private head, body or layers to the newest average before predicting.",
    )
    steps: int = Field(default=Solver.epoch, ge=0, description="Steps per epoch; 0: a pass over the client's data.")
    schedule: ScheduleName = Field(
        default=Schedule.name, description="Learning rate: constant, cosine, linear or step."
    )
    schedule_over: Literal["rounds", "steps"] = Field(
        default=Schedule.over,
        description="Whether the schedule runs over rounds or over the steps of each local training.",
    )
    warmup: int = Field(default=Schedule.warmup, ge=0, description="Rounds or steps of linear warm-up to lr.")
    lr_end: float = Field(
        default=Schedule.last, ge=0, le=1, description="Final learning rate of cosine and linear, as a fraction of lr."
    )
    lr_decay: float = Field(default=Schedule.decay, gt=0, le=1, description="Factor of the step schedule.")
    lr_decay_every: int = Field(
        default=Schedule.every, ge=0, description="Rounds or steps between decays of the step schedule."
    )
    augment: Literal["crop-flip"] | None = Field(
        default=Solver.augment, description="crop-flip: random shifts of up to 4 pixels and horizontal flips."
    )
    kernels: Literal["auto", "off"] = Field(
        default=Arithmetic.kernels,
        description="auto: fast kernels where the model allows them; off: plain torch, equal up to rounding.",
    )
    precision: Precision = Field(
        default=Arithmetic.precision, description="float32: that of model.dtype; otherwise mixed precision (autocast)."
    )
    compile: bool = Field(
        default=Arithmetic.compile, description="Compile steps with torch.compile, instead of the fast kernels."
    )

    parts: dict[str, PartSection] | None = Field(
        default=None, description="Other optimizers, lr, momentum and weight_decay for parts, by head, body or module."
    )

    @model_validator(mode="after")
    def _goes_together(self) -> LocalSection:
        if self.schedule == "step" and not self.lr_decay_every:
            raise ValueError('schedule = "step" needs lr_decay_every, such as 10')
        if self.optimizer == "nesterov" and not self.momentum:
            raise ValueError('optimizer = "nesterov" needs momentum, such as 0.9')
        if self.accumulate > 1 and not self.batch_size:
            raise ValueError("accumulate needs batch_size: of the full batch there is only one")
        if ":" not in self.optimizer:  # a custom optimizer is not imported to check a configuration
            find_optimizer(self.optimizer)
        return self

    def build(self, rounds: int) -> Solver:
        """For a run of so many rounds."""
        schedule = Schedule(
            self.schedule, self.schedule_over, rounds, self.warmup, self.lr_end, self.lr_decay, self.lr_decay_every
        )
        arithmetic = Arithmetic(self.kernels, self.precision, self.compile)
        same = {"optimizer", "lr", "momentum", "weight_decay", "clip", "batch_size", "augment"}
        same |= {"accumulate", "keep_state", "refit"}
        plain = self.model_dump(include=same)
        return Solver(**plain, epoch=self.steps, schedule=schedule, arithmetic=arithmetic, parts=self._parts())

    def _parts(self) -> tuple[PartOptions, ...]:
        out = []
        for name, part in (self.parts or {}).items():
            own: dict[str, Any] = {
                "optimizer": self.optimizer,
                "momentum": self.momentum,
                "weight_decay": self.weight_decay,
            }
            own |= part.model_dump(include=set(own), exclude_none=True)
            if own["optimizer"] == "nesterov" and not own["momentum"]:
                raise ConfigError(f'local.parts.{name}: optimizer = "nesterov" needs momentum, such as 0.9')
            out.append(PartOptions(name, factor=(part.lr or self.lr) / self.lr, **own))
        return tuple(out)


class ServerSection(Section):
    """What the server makes of the mean of its clients' models; Reddi et al., ICLR 2021, Algorithm 2."""

    optimizer: ServerOptimizerName = Field(
        default="none",
        description="none: the mean is the next model; momentum (FedAvgM), adam or yogi: a step towards it.",
    )
    lr: float = Field(default=1.0, gt=0, description="Learning rate of the server.")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Momentum; beta 1 of adam and yogi.")
    beta2: float = Field(default=0.99, gt=0, lt=1, description="Decay of squared changes (adam and yogi).")
    tau: float = Field(default=1e-3, gt=0, description="Added to the root of squared changes (adam and yogi).")

    def build(self) -> ServerOptimizer | None:
        """None where the mean is the next model."""
        if self.optimizer == "none":
            return None
        return ServerOptimizer(self.optimizer, self.lr, self.momentum, self.beta2, self.tau)


class FederationSection(Section):
    """Who takes part in a round, and where clients run."""

    engine: EngineName = Field(
        default="auto", description="loop, vmap, pool or wire; auto chooses among the first three and says why."
    )
    device: str = Field(default="auto", description="auto (what torch finds), cpu, cuda, cuda:1, mps or xpu.")
    threads: int = Field(default=0, ge=0, description="Torch threads; 0: one. Engine pool uses more cores.")
    chunk: int = Field(default=0, ge=0, description="Maximum clients per vmap stack; 0: as many as fit the cache.")
    workers: int = Field(default=0, ge=0, description="Processes (pool, long vmap rounds); 0: one per core or device.")
    memory: int = Field(
        default=0,
        ge=0,
        description="Memory budget (MB) for client states; the rest spills to disk. 0: half of the memory.",
    )
    clients_per_round: int = Field(default=0, ge=0, description="Clients sampled per round; 0: all.")
    sampler: str = Field(
        default="uniform",
        description='How they are sampled: uniform, size (by samples), cycle (in turn) or your own "module:function".',
    )
    min_replies: int = Field(
        default=Limits.min_replies, ge=1, description="A round with fewer usable replies is abandoned."
    )
    max_norm: float = Field(default=Limits.max_norm, gt=0, description="Replies with a larger norm are rejected.")
    timeout: float = Field(default=600.0, gt=0, description="Seconds that torchrun ranks wait for each other.")
    deadline: float = Field(default=600.0, gt=0, description="Seconds a site of a real federation has to reply.")
    goal: int = Field(default=0, ge=0, description="Replies that close a round of a real federation; 0: all.")
    late: Literal["drop", "buffer"] = Field(
        default="drop", description="Replies after the goal: drop them, or count them in a later round (FedBuff)."
    )
    staleness: float = Field(
        default=0.5, ge=0, description="A reply late by t rounds counts (1 + t) to the power of minus this."
    )
    silence: float = Field(
        default=10.0, gt=0, description="Seconds without a heartbeat after which a site counts as away."
    )

    @property
    def budget(self) -> int:
        """Bytes of private states that may be in memory."""
        return self.memory * 2**20 or machine.memory() // 2

    @property
    def limits(self) -> Limits:
        return Limits(self.min_replies, self.max_norm)


class EnvironmentSection(Section):
    """Differences between clients besides their data. Lists have one number per client, in the order of their names."""

    epochs: tuple[int, ...] = Field(
        default=Environment.epochs, description="Epochs a client runs for each epoch requested; empty: 1."
    )
    answer: tuple[float, ...] = Field(
        default=Environment.answer, description="Probability that a client's reply arrives; empty: 1."
    )
    leave: float = Field(
        default=Environment.leave, ge=0, lt=1, description="Probability per round that a client drops out for good."
    )
    speed: tuple[float, ...] = Field(
        default=Environment.speed, description="Samples a client processes per unit of time; empty: 1."
    )
    jitter: float = Field(
        default=Environment.jitter, ge=0, description="Standard deviation of the log of a client's round time."
    )
    deadline: float = Field(
        default=Environment.deadline, ge=0, description="Replies that take longer are lost; 0: no deadline."
    )
    missing: Literal["renormalise", "stale"] = Field(
        default=Environment.missing,
        description="renormalise: average responders only; stale: count non-responders with the model they received.",
    )

    def build(self, clients: int, seed: int) -> Environment:
        """For so many clients; refuses tables that do not fit."""
        for name, least, most in (("epochs", 1, 10**6), ("answer", 0.0, 1.0), ("speed", 1e-12, math.inf)):
            table = getattr(self, name)
            if table and len(table) != clients:
                raise ConfigError(f"environment.{name}: {len(table)} numbers for {clients} clients")
            wrong = [v for v in table if not least <= v <= most]
            if wrong:
                raise ConfigError(f"environment.{name}: {wrong[0]:g} is not between {least:g} and {most:g}")
        return Environment(seed=seed, **self.model_dump())


class EvaluationSection(Section):
    """When personal models are evaluated. Test data is read once, at the end, unless test_curve is set."""

    every: int = Field(default=1, ge=1, description="Rounds between evaluations on validation data.")
    test_curve: bool = Field(
        default=False, description="Also record test metrics at each evaluation; never used for selection."
    )
    metrics: tuple[str, ...] = Field(
        default=(),
        description='Metrics of a client\'s split: "auroc", own "module:function"; empty: the task\'s.',
    )
    batch_size: int = Field(
        default=0, ge=0, description="Samples in an evaluation pass; 0: as many as need little memory."
    )
    window: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None, description="Evaluate and predict images in overlapping windows of this size; none: whole."
    )
    decide: str = Field(default="", description="Metric that selects rounds and compares; empty: the first.")
    unseen: Annotated[float, Field(gt=0, lt=1)] | Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="Clients held out of training, a fraction or by name; they are onboarded at the end and evaluated.",
    )
    unseen_epochs: int | None = Field(
        default=None, ge=0, description="Epochs of fine-tuning for held-out clients; 3 by default."
    )


class EarlyStoppingSection(Section):
    """Stops a run that no longer improves on validation data."""

    patience: int = Field(
        default=0, ge=0, description="Rounds without improvement after which the run stops; 0: never."
    )
    metric: str = Field(default="", description="Metric on validation data; empty: the one that selects rounds.")
    min_delta: float = Field(default=0.0, ge=0, description="Smallest improvement that counts.")
    keep: Literal["best", "last"] = Field(
        default="best", description="Which round the run ends with: the best, or the last."
    )


class PrivacySection(Section):
    """Protection of individual clients. Secure sums and noise need algorithms that only sum replies."""

    secure_sum: bool = Field(
        default=False,
        description="Secure aggregation: the server sees masked sums only; needs the wire engine.",
    )
    fraction_bits: int = Field(
        default=Secure.fraction_bits,
        ge=8,
        le=52,
        description="Fractional bits of the fixed-point numbers in a secure sum.",
    )
    clip: float = Field(default=0.0, ge=0, description="Clip each client's update to this L2 norm; 0: no clipping.")
    noise: float = Field(
        default=0.0,
        ge=0,
        description="Noise multiplier: noise std / clip. Clients then weigh equally.",
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="Delta at which epsilon is reported.")
    repeatable_noise: bool = Field(
        default=False,
        description="Draw noise from the seed, so that a run can be repeated; whoever has the seed can take it away.",
    )

    def build(self) -> Aggregation:
        """The slots that protect clients."""
        return Aggregation(
            at_client=(Clip(self.clip),) if self.clip else (),
            reduction=Secure(self.fraction_bits) if self.secure_sum else Open(),
            noise=GaussianNoise(self.noise, self.clip, self.repeatable_noise) if self.noise else None,
        )


class AggregationSection(Section):
    """How replies are averaged if some clients may be malicious. The default trusts all clients."""

    mean: Literal["weighted", "clients", "median", "trimmed", "geometric", "krum", "clipped"] = Field(
        default="weighted",
        description="Mean over clients: weighted by samples, clients (each the same), or robust: median, trimmed, "
        "geometric, krum, clipped (to the median distance).",
    )
    liars: float = Field(default=0.2, ge=0, lt=0.5, description="Fraction of clients that may be malicious.")
    neighbours: bool = Field(
        default=True,
        description="Before a robust mean other than krum, replace each reply by the mean of its nearest replies, "
        "leaving out as many as may be malicious.",
    )

    def build(self) -> Robust | None:
        """None for the weighted mean."""
        return None if self.mean == "weighted" else Robust(self.mean, self.liars, self.neighbours)


class AttackSection(Section):
    """Simulated malicious clients."""

    name: AttackName = Field(default="none", description="none, sign-flip, scaling, noise, label-flip or backdoor.")
    share: float = Field(default=0.2, ge=0, lt=1, description="Fraction of malicious clients.")
    strength: float = Field(default=10.0, gt=0, description="Factor of sign-flip, scaling and noise.")


class CheckpointSection(Section):
    """How often a run is checkpointed."""

    every: int = Field(default=1, ge=1, description="Rounds between checkpoints.")
    seconds: float = Field(default=2.0, ge=0, description="Minimum seconds between checkpoints.")


class TrackingSection(Section):
    """Experiment trackers; pip install 'fedtailor[trackers]' installs them."""

    tensorboard: bool = Field(default=False, description="Write TensorBoard event files to the run folder.")
    mlflow: Path | None = Field(default=None, description="Folder of an MLflow file store to log to.")
    wandb: str | None = Field(default=None, description="Project of Weights & Biases to log to.")
    wandb_mode: Literal["offline", "online"] = Field(
        default="offline",
        description="offline: files in the run folder, for wandb sync; online: sent as the run goes on.",
    )


def dotted(tables: Any) -> Any:
    """Tables within tables as keys with dots: what `--set search.space.local.lr=[0.1]` makes."""
    if not isinstance(tables, dict):
        return tables
    out: dict[str, Any] = {}
    for key, value in tables.items():
        inner = dotted(value)
        out |= {f"{key}.{k}": v for k, v in inner.items()} if isinstance(inner, dict) else {key: inner}
    return out


class CompareSection(Section):
    """A grid of runs."""

    name: str = Field(default="compare", description="Name of the folder that holds the runs.")
    algorithms: tuple[str | dict[str, Any], ...] = Field(
        default=("local", "fedavg"),
        min_length=1,
        description='Names, or tables such as {name = "ditto", lam = 0.5, set = {"local.lr" = 0.1}, label = "mine"}.',
    )
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1, description="Seeds; each algorithm runs once per seed.")
    workers: int = Field(default=0, ge=0, description="Parallel runs; 0: one per core.")
    against: str = Field(default="", description="Row that the others are tested against; empty: the first.")


class Range(Section):
    """All numbers between two; whole ones if both are."""

    low: int | float
    high: int | float
    log: bool = False  # evenly on a logarithmic scale

    @model_validator(mode="after")
    def _is_one(self) -> Range:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError("low must be below high, and above 0 where log = true")
        return self


def is_range(value: Any) -> bool:
    """Whether a table of a configuration means all numbers between two."""
    return isinstance(value, Range) or (isinstance(value, dict) and {"low", "high"} <= value.keys())


def _keyed(tables: Any) -> Any:
    """Tables within tables as keys with dots, but for ranges."""
    if not isinstance(tables, dict):
        return tables
    out: dict[str, Any] = {}
    for key, value in tables.items():
        inner = value if is_range(value) else dotted(value)
        nested = isinstance(inner, dict) and not is_range(inner)
        out |= _keyed({f"{key}.{k}": v for k, v in value.items()}) if nested else {key: inner}
    return out


Values = Annotated[
    Annotated[Annotated[list[Any], Field(min_length=1)], Tag(VALUES)] | Annotated[Range, Tag(RANGE)],
    Discriminator(lambda value: RANGE if is_range(value) else VALUES),
]
Space = Annotated[dict[str, Values], BeforeValidator(_keyed)]  # key -> its values


class SearchSection(Section):
    """Hyper-parameter search on validation data, before the comparison."""

    trials: int = Field(default=6, ge=1, description="Configurations tried per algorithm, the same number for all.")
    sampler: Literal["grid", "optuna"] = Field(
        default="grid",
        description="grid: combinations of listed values; optuna: TPE, also in ranges of numbers.",
    )
    seed: int = Field(default=1000, ge=0, description="Seed of the search runs; must not be one of compare.seeds.")
    seeds: tuple[int, ...] = Field(default=(), description="Several seeds for each configuration; empty: seed alone.")
    rounds: int = Field(default=0, ge=0, description="Rounds per search run; 0: as many as in the comparison.")
    space: Space = Field(
        default_factory=dict,
        description='What to try for all, by key: "local.lr" = [0.01, 0.1] or {low = 0.01, high = 1, log = true}.',
    )
    algorithms: dict[str, Space] = Field(
        default_factory=dict, description="What to try for one algorithm, by its name or label."
    )

    @property
    def all_seeds(self) -> tuple[int, ...]:
        return self.seeds or (self.seed,)
