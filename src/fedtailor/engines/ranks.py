"""`torchrun`: the clients of a simulation on several processes, on one machine or many, over torch.distributed."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later it would keep the ranks' group, and its threads, to the end
from torch import Tensor

from fedtailor.core.client import Call
from fedtailor.core.engine import Evaluated, Reply
from fedtailor.core.experiment import Experiment
from fedtailor.core.process_group import SINGLE_PROCESS, ProcessGroup, under_torchrun
from fedtailor.core.reduce import in_order
from fedtailor.core.trees import Tree, leaves, rebuild, tree_map, widest
from fedtailor.engines import devices
from fedtailor.engines.choice import stack_size
from fedtailor.engines.disk import Disk
from fedtailor.engines.inprocess import InProcess
from fedtailor.errors import ConfigError, RankLost, RunError, UserError

T = TypeVar("T")
INLINE = 256  # bytes that are told in one message; longer texts need a second one


def join(timeout: float) -> ProcessGroup:
    """The ranks that torchrun started, of which this process is one; without torchrun, this process alone."""
    if not under_torchrun():
        return SINGLE_PROCESS
    signal.signal(signal.SIGTERM, _on_sigterm)
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    if gpus:
        devices.use(devices.with_index(torch.device("cuda"), devices.local_rank()))
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        at = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
        raise RunError(f"{at}: the ranks could not connect: {_reason(error)}") from None
    return Group()


def has_last_word() -> bool:
    """Whether this is the first rank to report why the run ends: one line is enough."""
    where, attempt = os.environ["MASTER_ADDR"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        port, limit = int(os.environ["MASTER_PORT"]), timedelta(seconds=5)
        store = dist.TCPStore(where, port, is_master=False, timeout=limit, wait_for_workers=False)
        return int(store.add(f"fedtailor/last word/{attempt}", 1)) == 1
    except (RuntimeError, ValueError, KeyError):  # nobody can be asked: better twice than not at all
        return True


def leave(ranks: ProcessGroup) -> None:
    if ranks.count > 1:
        dist.destroy_process_group()


def _on_sigterm(signum: int, frame: Any) -> None:
    raise RankLost("torchrun ended this rank")  # as it does when another one has failed


class Group:
    """The ranks of torch.distributed's process group. A client is on the rank of its number, counted round."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()

    def mine(self, clients: Sequence[int]) -> tuple[int, ...]:
        return self._of(self.rank, clients)

    def _of(self, rank: int, clients: Sequence[int]) -> tuple[int, ...]:
        return tuple(c for c in clients if c % self.count == rank)

    def total(self, tree: Tree) -> Tree:
        return _apply(_Total, tree)

    def spread(self, tree: Tree) -> Tree:
        return _apply(_Spread, tree)

    def everywhere(self, rows: Tree, clients: Sequence[int]) -> Tree:
        with torch.enable_grad():  # the rows are kept, and may be needed by a tape later
            return _apply(_Everywhere, rows, self, tuple(clients))

    def own(self, rows: Tree, clients: Sequence[int]) -> Tree:
        return _apply(_Own, rows, self, tuple(clients))

    def gather_to_root(self, rows: Tree, clients: Sequence[int]) -> Tree:
        packed = _gather_bytes(_pack(leaves(rows)), to_all=False)
        if self.rank:
            return None
        return rebuild(rows, iter(self._unpack(packed, leaves(rows), clients)))

    def broadcast(self, tree: Tree) -> Tree:
        flat = _pack([v[None] for v in leaves(tree)])
        if not flat.numel():
            return tree
        sent = _reachable(flat)
        _call_collective(dist.broadcast, sent, src=0)
        return rebuild(tree, (v[0] for v in _split_rows(sent, [v[None] for v in leaves(tree)], 1)))

    def all_gather_object(self, value: Any) -> list[Any]:
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        short = torch.zeros(8 + INLINE, dtype=torch.uint8, device="cpu")
        short[:8] = _bytes_of(len(text))
        short[8 : 8 + len(text)] = text[:INLINE]
        each = _gather_bytes(short, [len(short)] * self.count)
        lengths = [int(v[:8].clone().view(torch.int64)) for v in each]
        texts = [v[8:] for v in each] if max(lengths) <= INLINE else _gather_bytes(text, lengths)
        return [json.loads(v[:n].numpy().tobytes()) for v, n in zip(texts, lengths, strict=True)]

    def agreed(self, work: Callable[[], T]) -> T:
        mistake: Exception | None = None
        try:
            result = work()
        except (UserError, OSError) as error:
            mistake = error
        mistakes = self.all_gather_object(None if mistake is None else str(mistake))
        first = next(((rank, text) for rank, text in enumerate(mistakes) if text is not None), None)
        if first is None:
            return result
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all with the first; let the reason be said
        if mistake is not None:
            raise mistake
        raise RunError(first[1] if first[0] == 0 else f"rank {first[0]}: {first[1]}")

    def all_rows(self, own: list[Tensor], clients: Sequence[int]) -> list[Tensor]:
        """The rows of `clients` on every rank, from those of each."""
        width = sum(_width(v) for v in own)
        lengths = [width * len(self._of(rank, clients)) for rank in range(self.count)]
        return self._unpack(_gather_bytes(_pack(own), lengths), own, clients)

    def own_rows(self, rows: list[Tensor], clients: Sequence[int]) -> list[Tensor]:
        """The rows of this rank's clients, from those of all `clients`."""
        at = [i for i, c in enumerate(clients) if c % self.count == self.rank]
        return [v[at] for v in rows]

    def _unpack(self, each: list[Tensor], like: list[Tensor], clients: Sequence[int]) -> list[Tensor]:
        """Rows in the order of `clients` from the bytes of each rank."""
        owned = [self._of(rank, clients) for rank in range(self.count)]
        parts = [_split_rows(flat, like, len(part)) for flat, part in zip(each, owned, strict=True)]
        place = {c: i for i, c in enumerate(c for part in owned for c in part)}
        at = [place[c] for c in clients]
        return [torch.cat(rows)[at] for rows in zip(*parts, strict=True)]


def _apply(function: Any, tree: Tree, *options: Any) -> Tree:
    flat = leaves(tree)
    return rebuild(tree, iter(function.apply(*options, *flat))) if flat else tree


def _all_reduce(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The sum over ranks of each; one message for all of a type."""
    out: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(v.dtype for v in tensors):
        at = [i for i, v in enumerate(tensors) if v.dtype == dtype]
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in at])
        sent = _reachable(flat)
        _call_collective(dist.all_reduce, sent)
        parts = sent.to(flat.device).split([tensors[i].numel() for i in at])
        out |= {i: part.reshape(tensors[i].shape) for i, part in zip(at, parts, strict=True)}
    return tuple(out[i] for i in range(len(tensors)))


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> tuple[Tensor, ...]:
        return _all_reduce(parts)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return cotangents


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(v.clone() for v in values)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return _all_reduce(cotangents)


class _Everywhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, clients: tuple[int, ...], *own: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.clients = group, clients
        return tuple(group.all_rows(list(own), clients))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return None, None, *ctx.group.own_rows(cotangents, ctx.clients)


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, clients: tuple[int, ...], *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.clients = group, clients
        return tuple(group.own_rows(list(rows), clients))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return None, None, *ctx.group.all_rows(list(cotangents), ctx.clients)


def _reachable(flat: Tensor) -> Tensor:
    """The numbers where the ranks' connections can take them: those of devices without one go through the host."""
    has_own = flat.device.type == "cpu" or (flat.device.type == "cuda" and "nccl" in dist.get_backend_config())
    return flat if has_own else flat.cpu()


def _call_collective(collective: Callable[..., Any], *args: Any, **options: Any) -> None:
    try:
        collective(*args, **options)
    except RuntimeError as error:  # gloo: the connection was closed, or nothing came in time
        raise RankLost(_reason(error)) from None


def _gather_bytes(mine: Tensor, lengths: list[int] | None = None, *, to_all: bool = True) -> list[Tensor]:
    """The bytes of every rank; `lengths` if they are known. Not `to_all`: on rank 0 only."""
    rank, count = dist.get_rank(), dist.get_world_size()
    if lengths is None:
        each = _gather_bytes(_bytes_of(len(mine)), [8] * count)
        lengths = [int(v.view(torch.int64)) for v in each]
    longest = max(lengths)
    if not longest:
        return [mine] * count
    mine = _reachable(mine)
    same = mine if len(mine) == longest else torch.cat([mine, mine.new_zeros(longest - len(mine))])
    blocks = [torch.empty_like(same) for _ in range(count)] if to_all or rank == 0 else None
    if to_all:
        _call_collective(dist.all_gather, blocks, same)
    else:
        _call_collective(dist.gather, same, blocks, dst=0)
    return [] if blocks is None else [v[:n] for v, n in zip(blocks, lengths, strict=True)]


def _bytes_of(number: int) -> Tensor:
    return torch.tensor([number], device="cpu").view(torch.uint8)


def _pack(rows: list[Tensor]) -> Tensor:
    """The bytes of tensors, one after the other."""
    # a copy, because expanded tensors have strides that cannot be seen as bytes
    parts = [v.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for v in rows]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8, device="cpu")


def _width(v: Tensor) -> int:
    return v.element_size() * v.shape[1:].numel()


def _split_rows(flat: Tensor, like: list[Tensor], rows: int) -> list[Tensor]:
    """The inverse of `_pack`: tensors of so many rows, with shapes and types as `like`."""
    parts = flat.split([rows * _width(v) for v in like])
    return [p.clone().view(v.dtype).reshape(rows, *v.shape[1:]).to(v.device) for p, v in zip(parts, like, strict=True)]


class Sharded:
    """This rank's clients, in this process. Every rank calls it with the whole cohort; states are those of its own."""

    def __init__(
        self, experiment: Experiment, engine: str, chunk: int, ranks: ProcessGroup, disk: Disk | None = None
    ) -> None:
        if engine == "wire":
            raise ConfigError("federation.engine = wire: not with torchrun; use loop, vmap or auto")
        own = ranks.mine(range(len(experiment.data.clients)))
        self.experiment, self.ranks = experiment, ranks
        stacked = (chunk or stack_size(experiment)) if engine == "vmap" else 0
        self.inside = InProcess(experiment, own, chunk=stacked, disk=disk)

    @property
    def chunk(self) -> int:
        """How many clients this rank stacks."""
        return self.inside.chunk

    def start(self) -> None:
        self.inside.start()

    def call(self, call: Call, clients: Sequence[int]) -> Iterator[Reply]:
        yield from self.inside.call(call, self.ranks.mine(clients))

    def pull_back(
        self, number: int, clients: Sequence[int], cotangent: Tree
    ) -> Iterator[tuple[tuple[int, ...], tuple[Tree, ...]]]:
        if own := self.ranks.mine(clients):
            yield from self.inside.pull_back(number, own, cotangent)

    def finish_backward(self) -> None:
        self.inside.finish_backward()

    def begin_round(self, round: int) -> dict[int, str]:
        """A new round. Nobody is ever away here."""
        return self.inside.begin_round(round)

    def close(self) -> None:
        self.inside.close()

    def undo(self, clients: Sequence[int] | None = None) -> None:
        self.inside.undo(None if clients is None else self.ranks.mine(clients))

    def evaluate(
        self, clients: Sequence[int], round: int, server: Tree, splits: Sequence[str], keep: str = ""
    ) -> Iterator[Evaluated]:
        """Metrics of all clients; models of this rank's only."""
        own = self.ranks.mine(clients)
        parts: list[tuple[tuple[int, ...], Tree]] = []
        for group, own_metrics, models in self.inside.evaluate(own, round, server, splits):
            parts.append((group, own_metrics))
            yield group, own_metrics, models
        number = self.experiment.model.like.new_zeros((), dtype=widest(self.experiment.device))
        names = {split: {m.name: number for m in self.experiment.metrics} for split in splits}
        metrics = self.ranks.everywhere(in_order(parts, own, names), clients)
        at = [i for i, c in enumerate(clients) if c not in set(own)]
        yield tuple(clients[i] for i in at), tree_map(lambda v: v[at], metrics), {}

    def get_states(self) -> Tree:
        return self.inside.get_states()

    def set_states(self, rows: Tree) -> None:
        self.inside.set_states(rows)


def _reason(error: Exception) -> str:
    """The first sentence, without the place in gloo's sources where it was said."""
    return re.sub(r"^\[[^\]]*\]\s*", "", str(error).splitlines()[0]).split(". ")[0][:200]
