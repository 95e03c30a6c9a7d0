"""What speed is compared with: the same steps without a federation, and the usual way to write one."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.speed_tasks import LR
from fedtailor.engines import machine
from fedtailor.training.kernels import descent as factors
from fedtailor.training.kernels import winograd

Clients = Sequence[tuple[Tensor, Tensor]]  # images and labels of each
Round = Callable[[], None]


@dataclass(frozen=True)
class Phase:
    """One local epoch: of the head (`out`), of the rest, or of all; held near the start; on the own entries only."""

    part: str = "all"
    prox: float = 0.0
    mask: bool | None = None  # True: entries of the mask, False: the others

    def trains(self, name: str) -> bool:
        return self.part == "all" or (self.part == "head") == name.startswith("out")


PHASES = {
    "FedAvg": (Phase(),),
    "FedRep": (Phase("head"), Phase("body")),
    "Ditto": (Phase(prox=1.0), Phase()),
    "FedSelect": (Phase(mask=True), Phase(mask=False)),
}


class Workers:
    """Processes, one per core with one thread each: given clients to train, each does its share when called.

    keeps: memory that is freed is kept for the next step, as our engines do it.
    is_alone: one process with all threads.
    """

    def __init__(self, *, keeps: bool = False, is_alone: bool = False) -> None:
        self.keeps, self.is_alone = keeps, is_alone
        self.cores = 1 if is_alone else len(os.sched_getaffinity(0))
        self.pipes: list[Any] = []
        self.processes: list[Any] = []

    def _start(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        for _ in range(self.cores):
            here, there = context.Pipe()
            self.pipes.append(here)
            self.processes.append(context.Process(target=_serve, args=(there, self.keeps, self.is_alone), daemon=True))
            self.processes[-1].start()

    def load(self, make: Callable[..., dict[str, Round]], clients: Clients, *args: Any) -> None:
        """Share out the clients; `make` returns the ways to train a share."""
        if not self.pipes:
            self._start()
        self._all([("load", make, share, *args) for share in shares(clients, self.cores)])

    def __call__(self, way: str) -> None:
        self._all([("run", way)] * len(self.pipes))

    def _all(self, requests: Sequence[tuple[Any, ...]]) -> None:
        for pipe, request in zip(self.pipes, requests, strict=True):
            pipe.send(request)
        for pipe in self.pipes:
            pipe.recv()

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(("end",))
            process.join()


def shares(clients: Clients, cores: int) -> list[list[tuple[Tensor, Tensor]]]:
    """The clients in groups of about equally many images, the largest ones dealt first."""
    out: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(cores)]
    for client in sorted(clients, key=lambda c: -len(c[0])):
        min(out, key=lambda share: sum(len(x) for x, _ in share)).append(client)
    return out


def _serve(pipe: Any, keeps: bool, is_alone: bool) -> None:
    if keeps:
        machine.freed_memory_kept().__enter__()  # for as long as this process lives
    if not is_alone:
        torch.set_num_threads(1)
    ways: dict[str, Round] = {}
    while (request := pipe.recv())[0] != "end":
        if request[0] == "load":
            ways = request[1](*request[2:])
        else:
            ways[request[1]]()
        pipe.send(None)


def plain(clients: Clients, module: nn.Module, batch: int, phases: Sequence[Phase]) -> dict[str, Round]:
    """The same steps in plain torch: batches by index, in-place updates; two layouts in memory.

    "by hand" has our convolution, and large dense layers that move by the factors of their gradient.
    """

    def made(memory: torch.memory_format, *, by_hand: bool = False) -> Round:
        net = copy.deepcopy(module)
        params = dict(net.named_parameters())
        for v in params.values():
            if v.dim() == 4:
                v.data = v.data.to(memory_format=memory)  # `contiguous` would leave those of a single channel
        start = {k: v.detach().clone() for k, v in params.items()}
        masks = {k: torch.rand_like(v) < 0.3 for k, v in params.items()}

        def epoch(x: Tensor, y: Tensor, phase: Phase, factored: factors.Factors) -> None:
            trained = {k: v.requires_grad_() for k, v in params.items() if phase.trains(k)}
            centers = [start[k] for k in trained]
            kept = (
                {k: torch.eq(masks[k], phase.mask).to(v) for k, v in trained.items()} if phase.mask is not None else {}
            )
            for rows in torch.randperm(len(x)).split(batch):
                xs = x.index_select(0, rows).to(memory_format=memory)
                loss = F.cross_entropy(net(xs), y[rows])
                gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
                found = {k: g for k, g in zip(trained, gradients, strict=True) if g is not None}
                moved = [trained[k] for k in found]
                with torch.no_grad():
                    if phase.prox:
                        torch._foreach_lerp_(list(trained.values()), centers, LR * phase.prox)
                    if kept:
                        torch._foreach_addcmul_(moved, list(found.values()), [kept[k] for k in found], value=-LR)
                    else:
                        torch._foreach_add_(moved, list(found.values()), alpha=-LR)
                    for k, d, inputs in factored:
                        trained[k].addmm_(d.T, inputs, alpha=-LR)
                    factored.clear()

        def run() -> None:
            for x, y in clients:
                with torch.no_grad():
                    torch._foreach_copy_(list(params.values()), list(start.values()))
                for phase in phases:
                    for v in params.values():
                        v.requires_grad_(False)
                    is_factored = by_hand and phase.mask is None
                    large = [k for k in params if is_factored and phase.trains(k)]
                    with (
                        winograd.inside(net) if by_hand else nullcontext(),
                        factors.factored_updates(net, large) as factored,
                    ):
                        epoch(x, y, phase, factored)

        return run

    return {
        "contiguous": made(torch.contiguous_format),
        "channels_last": made(torch.channels_last),
        "channels_last, by hand": made(torch.channels_last, by_hand=True),
    }


def fused(clients: Clients, batch: int) -> dict[str, Round]:
    """Networks of two dense layers, a few clients at a time, with a gradient written by hand."""
    w1, w2 = torch.randn(200, 784) * 0.03, torch.randn(10, 200) * 0.05
    x, y = torch.stack([x.flatten(1) for x, _ in clients]), torch.stack([y for _, y in clients])

    def run(chunk: int) -> None:
        for xs, ys in zip(x.split(chunk), y.split(chunk), strict=True):
            k, n = ys.shape
            order = torch.stack([torch.randperm(n) for _ in range(k)])
            biases = torch.zeros(k, 1, 200), torch.zeros(k, 1, 10)
            layers = w1.repeat(k, 1, 1), biases[0], w2.repeat(k, 1, 1), biases[1]
            fused_epoch(xs[torch.arange(k)[:, None], order], ys.gather(1, order), batch, *layers)

    def run_ahead() -> None:
        k, n = y.shape
        order = torch.stack([torch.randperm(n) for _ in range(k)])
        moved = torch.empty(5, *w1.shape)
        one_pass(x[torch.arange(k)[:, None], order], y.gather(1, order), batch, w1, w2.repeat(k, 1, 1), moved)

    ways: dict[str, Round] = {f"{k} clients per chunk": partial(run, k) for k in (5, 10)}
    return ways | {"all steps in one pass": run_ahead}


@torch.no_grad()
def fused_epoch(x: Tensor, y: Tensor, batch: int, u: Tensor, a: Tensor, v: Tensor, b: Tensor) -> None:
    """One epoch of all clients of a stack, in place: weights u and v with biases a and b move in the backward pass."""
    targets = F.one_hot(y, v.shape[1]).to(x.dtype)
    for xs, ys in zip(x.split(batch, 1), targets.split(batch, 1), strict=True):
        step = -LR / xs.shape[1]
        h = torch.baddbmm(a, xs, u.mT).relu_()
        d = torch.baddbmm(b, h, v.mT).softmax(-1).sub_(ys)  # of the outputs
        e = torch.bmm(d, v).mul_(h > 0)  # of the hidden units, before v moves
        v.baddbmm_(d.mT, h, alpha=step)
        b.add_(d.sum(1, keepdim=True), alpha=step)
        u.baddbmm_(e.mT, xs, alpha=step)
        a.add_(e.sum(1, keepdim=True), alpha=step)


@torch.no_grad()
def one_pass(x: Tensor, y: Tensor, batch: int, u: Tensor, v: Tensor, moved: Tensor) -> None:
    """The same epoch, with the wide layer read and written once: its start `u` is that of all clients.

    Steps move it by products of gradients e and inputs x, of which the next steps need only products with x again.
    """
    k, n, _ = x.shape
    targets = F.one_hot(y, v.shape[1]).to(x.dtype)
    a, b = x.new_zeros(k, 1, len(u)), x.new_zeros(k, 1, v.shape[1])
    hidden = torch.matmul(x, u.T)
    moves = torch.empty_like(hidden)
    for first in range(0, n, batch):
        here = slice(first, first + batch)
        h = hidden[:, here]
        if first:
            h.baddbmm_(torch.bmm(x[:, here], x[:, :first].mT), moves[:, :first])
        h.add_(a).relu_()
        d = torch.baddbmm(b, h, v.mT).softmax(-1).sub_(targets[:, here]).mul_(-LR / h.shape[1])
        e = torch.bmm(d, v).mul_(h > 0)
        v.baddbmm_(d.mT, h)
        b.add_(d.sum(1, keepdim=True))
        a.add_(e.sum(1, keepdim=True))
        moves[:, here] = e
    for first in range(0, k, len(moved)):
        some = slice(first, first + len(moved))
        torch.baddbmm(u.expand(len(x[some]), *u.shape), moves[some].mT, x[some], out=moved[: len(x[some])])


def usual(clients: Clients, module: nn.Module, batch: int, algorithm: str) -> dict[str, Round]:
    """As PFLlib does it: client after client, a DataLoader over a list, deep copies of models, torch.optim."""
    lists: list[Any] = [list(zip(x, y, strict=True)) for x, y in clients]
    server = copy.deepcopy(module)
    models = [copy.deepcopy(module) for _ in clients]
    personal = [copy.deepcopy(module) for _ in clients]
    masks = [{k: torch.rand_like(v) < 0.3 for k, v in module.named_parameters()} for _ in clients]

    def epoch(net: nn.Module, client: int, phase: Phase) -> None:
        for name, v in net.named_parameters():
            v.requires_grad_(phase.trains(name))
        optimizer = torch.optim.SGD((v for v in net.parameters() if v.requires_grad), lr=LR)
        criterion = nn.CrossEntropyLoss()
        centers = dict(server.named_parameters())
        trained = {k: v for k, v in net.named_parameters() if v.requires_grad}
        kept = {k: (m == phase.mask).float() for k, m in masks[client].items()} if phase.mask is not None else {}
        for x, y in DataLoader(lists[client], batch_size=batch, shuffle=True):
            optimizer.zero_grad()
            criterion(net(x), y).backward()
            for name, v in trained.items():
                if v.grad is not None and phase.prox:
                    v.grad.add_(v.data - centers[name].data, alpha=phase.prox)
                if v.grad is not None and kept:
                    v.grad.mul_(kept[name])
            optimizer.step()

    def receive(client: int) -> None:
        for (name, old), new in zip(models[client].named_parameters(), server.parameters(), strict=True):
            if algorithm == "FedRep" and name.startswith("out"):
                continue
            own = masks[client][name] if algorithm == "FedSelect" else None
            old.data = new.data.clone() if own is None else torch.where(own, old.data, new.data)

    def grow(client: int) -> None:
        """The entries that changed most become the client's own."""
        for (name, v), old in zip(models[client].named_parameters(), server.parameters(), strict=True):
            change = (v.data - old.data).abs().masked_fill(masks[client][name], -1).flatten()
            masks[client][name].view(-1)[change.topk(change.numel() // 100).indices] = True

    def run() -> None:
        for client, net in enumerate(models):
            receive(client)
            for phase in PHASES[algorithm]:
                epoch(personal[client] if phase.prox else net, client, phase)
            if algorithm == "FedSelect":
                grow(client)
        uploaded = [copy.deepcopy(net) for net in models]
        total = sum(map(len, lists))
        for v in server.parameters():
            v.data.zero_()
        for net, samples in zip(uploaded, map(len, lists), strict=True):
            for v, new in zip(server.parameters(), net.parameters(), strict=True):
                v.data += new.data * (samples / total)

    return {"usual": run}
