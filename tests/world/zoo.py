"""Small modules of every kind that people bring, and what becomes of them: "equal" to plain torch, or "refused"."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.nn.utils import spectral_norm as old_spectral_norm

WIDTH = 6
REFUSED: dict[str, str] = {  # and the name in the message
    "ComplexWeight": "w",
    "PythonCounter": "passes",
    "PlainTensorState": "seen",
    "PlainTensorMemory": "PlainTensorMemory",
    "CountsInEvaluation": "calls",
    "RenormedEmbedding": "embed.weight",
    "GrowingBuffer": "store",
    "LateBuffer": "cache",
    "HalfPrecision": "first.weight",
    "Double": "first.weight",
    "ComplexState": "phase",
    "WidenedBuffer": "count",
    "OwnGenerator": "OwnGenerator",
    "ListMemory": "seen",
}


class Base(nn.Module):
    """Two dense layers; others change something about them."""

    head: tuple[str, ...] = ("out",)
    first: nn.Module
    ema: Tensor
    calls: Tensor
    samples: Tensor
    queue: Tensor
    queue_ptr: Tensor
    is_set: Tensor
    shift: Tensor
    order: Tensor
    mask: Tensor
    turn: Tensor
    phase: Tensor
    store: Tensor
    cache: Tensor | None
    count: Tensor

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(shape[0], WIDTH), nn.Linear(WIDTH, outputs)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x))


class Tied(Base):
    """One matrix in two places."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.third.weight = self.second.weight

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.third(torch.tanh(self.second(super().hidden(x)))))


class Shared(Base):
    """One module under two names."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.again = self.second

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.again(torch.tanh(self.second(super().hidden(x)))))


class Frozen(Base):
    """A first layer that is not trained."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.first.requires_grad_(False)


class FrozenNorm(Base):
    """BatchNorm in evaluation mode, whatever the mode of the model."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.norm = nn.BatchNorm1d(WIDTH).eval()
        self.norm.running_mean.fill_(0.1)  # type: ignore[union-attr]

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(super().hidden(x))


class Normed(Base):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.norm = nn.BatchNorm1d(WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(super().hidden(x))


class Grouped(Base):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.norm = nn.GroupNorm(2, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(super().hidden(x))


class SpectralNorm(Base):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.first = parametrizations.spectral_norm(self.first)


class OldSpectralNorm(Base):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.first = old_spectral_norm(self.first)


class WeightNorm(Base):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.first = parametrizations.weight_norm(self.first)


class OldWeightNorm(Base):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.first = weight_norm(self.first)


class Orthogonal(Base):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.second = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))

    def hidden(self, x: Tensor) -> Tensor:
        return self.second(super().hidden(x))


class ReassignedBuffer(Base):
    """A moving mean of the features, a new tensor in every pass; predictions use it."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.register_buffer("ema", torch.zeros(WIDTH))

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x) - self.ema
        if self.training:
            self.ema = 0.9 * self.ema + 0.1 * h.detach().mean(0)
        return h


class ReassignedHidden(ReassignedBuffer):
    """The same buffer, which is not saved with the module."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.register_buffer("ema", torch.zeros(WIDTH), persistent=False)


class InPlaceBuffer(Base):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.register_buffer("ema", torch.zeros(WIDTH))

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if self.training:
            self.ema.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h + self.ema.clone()


class Counter(Base):
    """A counter of training passes that decides on the outputs."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def hidden(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().hidden(x) / (1 + self.calls)


class ReassignedCounter(Base):
    """The same, with a new tensor for every pass."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def hidden(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls = self.calls + 1
        return super().hidden(x) / (1 + self.calls)


class CountsSamples(Base):
    """What padding would disturb: how many samples it has seen."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))

    def hidden(self, x: Tensor) -> Tensor:
        if self.training:
            self.samples += len(x)
        return super().hidden(x) / (1 + self.samples / 10)


class Queue(Base):
    """As MoCo's: features of earlier batches, and a pointer to the oldest."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.register_buffer("queue", torch.zeros(4, WIDTH))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.int64))

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if self.training:
            at = int(self.queue_ptr)
            self.queue[at] = h.detach().mean(0)
            self.queue_ptr[0] = (at + 1) % 4
        return h + self.queue.mean(0)


class FlagBuffer(Base):
    """A flag that the first pass in training sets."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.register_buffer("is_set", torch.zeros((), dtype=torch.bool))
        self.register_buffer("shift", torch.zeros(WIDTH))

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if self.training:
            self.shift = torch.where(self.is_set, self.shift, h.detach().mean(0))
            self.is_set = torch.ones_like(self.is_set)
        return h - self.shift


class ConstantIntegers(Base):
    """Integers that nobody changes."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.register_buffer("order", torch.arange(WIDTH).flip(0))
        self.register_buffer("mask", torch.arange(WIDTH) > 1, persistent=False)

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x)[:, self.order] * self.mask


class ComplexConstant(Base):
    """A rotation that nobody changes."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.register_buffer("turn", torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) / 3))

    def hidden(self, x: Tensor) -> Tensor:
        pairs = super().hidden(x).unflatten(-1, (-1, 2)).contiguous()
        return torch.view_as_real(torch.view_as_complex(pairs) * self.turn).flatten(-2)


class RealHeldComplex(Base):
    """A complex weight as it may be trained."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.w = nn.Parameter(torch.randn(WIDTH // 2, 2))

    def hidden(self, x: Tensor) -> Tensor:
        pairs = super().hidden(x).unflatten(-1, (-1, 2)).contiguous()
        return torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(self.w)).flatten(-2)


class Dropped(Base):
    def hidden(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().hidden(x), 0.4, self.training)


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 0.7


class OwnGradient(Base):
    """A gradient written by hand, in the old form of such functions."""

    def hidden(self, x: Tensor) -> Tensor:
        return _Clipped.apply(super().hidden(x))


class _Straight(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 0.5


class OwnStackedGradient(Base):
    def hidden(self, x: Tensor) -> Tensor:
        return _Straight.apply(super().hidden(x))


class Nested(nn.Module):
    """Lists, dicts and single parameters in each other."""

    head = ("parts.out",)

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {"in": nn.ModuleList([nn.Linear(shape[0], WIDTH), nn.Sequential(nn.Tanh())]), "out": nn.Linear(3, outputs)}
        )
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))])
        self.maps = nn.ParameterDict({"a.b".replace(".", "_"): nn.Parameter(torch.randn(WIDTH, 3))})

    def forward(self, x: Tensor) -> Tensor:
        h = self.parts["in"][1](self.parts["in"][0](x))  # type: ignore[index]
        return self.parts["out"]((h * self.scales[0] + self.scales[1]) @ self.maps["a_b"])


class ForwardHook(Base):
    """A hook on a layer that changes its output, and one before it."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.first.register_forward_hook(lambda module, inputs, output: output * 0.5)
        self.out.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.1,))


def _double(module: nn.Module, given: Any, out: Any) -> Any:
    return tuple(2 * g for g in given)


class BackwardHook(Base):
    """A hook on a gradient."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.first.register_full_backward_hook(_double)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x + 0.0 * self.out.weight.sum()))


class Recurrent(Base):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.lstm = nn.LSTM(2, WIDTH, batch_first=True)

    def hidden(self, x: Tensor) -> Tensor:
        return self.lstm(x.unflatten(-1, (-1, 2)))[0][:, -1]


class Attention(Base):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)[:, None].expand(-1, 3, -1)
        return self.attend(h, h, h, need_weights=False)[0].mean(1)


class DataDependent(Base):
    """Another path for some batches."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h * 2 if bool(x.mean() > 0) else h


class InPlaceActivation(Base):
    def hidden(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.relu_()
        return h


class Lazy(nn.Module):
    """Layers that learn their shapes from a sample."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.first, self.out = nn.LazyLinear(WIDTH), nn.LazyLinear(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


class Convolved(nn.Module):
    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 2)
        self.out = nn.Linear(3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.conv(x[:, None])).mean(-1))


class Logits(Base):
    """Outputs in an object, as models of transformers have them."""

    def forward(self, x: Tensor) -> Any:
        from types import SimpleNamespace

        h = self.hidden(x)
        return SimpleNamespace(logits=self.out(h), hidden_states=h)


class Compiled(nn.Module):
    """A compiled part."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        part = nn.Sequential(nn.Linear(shape[0], WIDTH), nn.Tanh())
        self.first = torch.compile(part, backend="eager")
        self.out = nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.first(x))


class ManyKinds(Base):
    """Any options."""

    def __init__(self, shape: tuple[int, ...], outputs: int, **options: Any) -> None:
        super().__init__(shape, outputs)
        self.scale = float(options.get("scale", 1.0))

    def hidden(self, x: Tensor) -> Tensor:
        return self.scale * super().hidden(x)


class UnusedParameter(Base):
    """A layer that takes no part, and has no gradient."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.unused = nn.Linear(2, 2)


class Remembered(Base):
    """The last features, for whoever wants to look at them; outputs do not depend on it."""

    def hidden(self, x: Tensor) -> Tensor:
        self.last = super().hidden(x)
        return self.last


class ComplexWeight(Base):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.w = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def hidden(self, x: Tensor) -> Tensor:
        return (super().hidden(x) * self.w).abs()


class ComplexState(Base):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.register_buffer("phase", torch.ones(WIDTH, dtype=torch.complex64))

    def hidden(self, x: Tensor) -> Tensor:
        if self.training:
            self.phase = self.phase * torch.polar(torch.tensor(1.0), torch.tensor(0.3))
        return super().hidden(x) * self.phase.real


class PythonCounter(Base):
    """A counter that is no buffer."""

    passes = 0

    def hidden(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes = self.passes + 1
        return super().hidden(x) / (1 + self.passes)


class PlainTensorState(Base):
    """A tensor that is no buffer, written in place."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.seen = torch.zeros(WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if self.training:
            self.seen.add_(h.detach().mean(0))
        return h + 0 * self.seen


class PlainTensorMemory(Base):
    """A tensor that is no buffer, replaced in every pass."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.before = torch.zeros(WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        out, self.before = h - self.before, h.detach().mean(0)
        return out


class ListMemory(Base):
    """A list that grows."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.seen: list[float] = []

    def hidden(self, x: Tensor) -> Tensor:
        self.seen.append(0.0)
        return super().hidden(x) / len(self.seen)


class OwnGenerator(Base):
    """Noise out of a generator of its own."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.generator = torch.Generator().manual_seed(1)

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + torch.randn(WIDTH, generator=self.generator)


class CountsInEvaluation(Base):
    """A counter of all passes."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def hidden(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().hidden(x) / self.calls


class RenormedEmbedding(Base):
    """An embedding that changes its own weights when it is looked up."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.embed = nn.Embedding(2, WIDTH, max_norm=0.1)

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + self.embed((x[:, 0] > 0).long())


class GrowingBuffer(Base):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.register_buffer("store", torch.zeros(0, WIDTH))

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if self.training:
            self.store = torch.cat([self.store, h.detach().mean(0, keepdim=True)])
        return h


class LateBuffer(Base):
    """A buffer that the first pass makes."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.register_buffer("cache", None)

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        if self.cache is None:
            self.cache = h.detach().mean(0)
        return h - self.cache


class WidenedBuffer(Base):
    """An integer that becomes a fraction."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def hidden(self, x: Tensor) -> Tensor:
        if self.training:
            self.count = self.count + 0.5
        return super().hidden(x) / (1 + self.count)


class HalfPrecision(Base):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.to(torch.bfloat16)


class Double(Base):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__(shape, outputs)
        self.to(torch.float64)


MODULES: dict[str, Callable[..., nn.Module]] = {
    name: kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, nn.Module) and not name.startswith("_")
}
KINDS = {name: kind for name, kind in MODULES.items() if isinstance(kind, type) and issubclass(kind, Base)}
PARTS = [name for name in KINDS if name not in ("Base", *REFUSED)]


def __getattr__(name: str) -> type[nn.Module]:
    """Several in one, such as "Normed_Tied_Queue": each changes the features of the one after it."""
    if set(parts := name.split("_")) <= set(MODULES):
        kinds: Any = [MODULES[part] for part in parts]
        return type(name, tuple(kinds), {"__module__": __name__})
    raise AttributeError(name)
