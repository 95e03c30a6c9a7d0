"""What a secure sum costs: bytes and seconds of a round that only sums, against the same round with plain replies.

    python benchmarks/secure_sum.py [--json FILE]

4 and 20 clients, models of 60 000 and 600 000 numbers in float32, through the bytes of the `wire` engine. Clients do
not train. "lost" is a client that cannot be reached once its masks are agreed on. Clients and server take turns in one
process; times are of the processor, at a client the mean over clients, and the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fedtailor.aggregation.secure import Secure
from fedtailor.core import codec
from fedtailor.core.algorithm import COUNT, MODEL, Algorithm, on_client
from fedtailor.core.context import ClientContext
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.experiment import Experiment
from fedtailor.core.federation import Federation
from fedtailor.core.reduce import Aggregation
from fedtailor.core.trees import Params, Tree
from fedtailor.engines.wire import Site, Wire
from fedtailor.models import build
from fedtailor.training.solver import Solver

ROUNDS = 3


@dataclass(frozen=True)
class Echo(Algorithm):
    """Clients send back what they were sent."""

    @on_client(sends=(MODEL.weighted_by(COUNT), COUNT))
    def echo(self, me: ClientContext, w: Params) -> tuple[Tree, Tree]:
        return {}, (w, me.n)

    def round(self, fed: Federation, w: Params) -> Params:
        mean: Params = fed.mean(*fed.map(self.echo, w))
        return mean


@dataclass(frozen=True)
class Measured:
    """One row of the table; bytes and seconds are of one round."""

    clients: int
    parameters: int
    sum: str
    trips: int
    up: int  # bytes of one client
    down: int
    client_seconds: float
    server_seconds: float


class Clock(Wire):
    """The wire engine with a clock at the clients, and one client that may be lost."""

    def __init__(self, setting: Experiment, lost: int | None) -> None:
        super().__init__(setting)
        self.at_clients = 0.0
        for site in self.sites:
            site.handle = self._timed(site, site.client == lost)  # type: ignore[method-assign]

    def _timed(self, site: Site, is_lost: bool) -> Any:
        def handle(request: bytes) -> bytes:
            if is_lost and codec.decode(request)[0].get("step") == "mask":
                raise ConnectionResetError("lost")
            begun = time.process_time()
            reply = Site.handle(site, request)
            self.at_clients += time.process_time() - begun
            return reply

        return handle


def task(clients: int, features: int) -> FederatedData:
    """One sample each: there is nothing to learn."""
    rows = Rows(torch.zeros(clients, features), torch.zeros(clients, dtype=torch.int64), torch.arange(clients + 1))
    empty = Rows(rows.x[:0], rows.y[:0], torch.zeros(clients + 1, dtype=torch.int64))
    return FederatedData("zeros", "classification", tuple(f"c{i}" for i in range(clients)), rows, empty, empty, 10)


def measure(clients: int, parameters: int, kind: str) -> Measured:
    """Rounds of one kind of sum."""
    data = task(clients, parameters // 10 - 1)
    model = build("linear", data.shape, 10, seed=0, options={}, dtype=torch.float32)
    is_secure = kind != "plain"
    slots = Aggregation(reduction=Secure()) if is_secure else Aggregation()
    setting = Experiment(Echo(), model, data, Solver(), 0, aggregation=slots)
    engine = Clock(setting, lost=1 if kind == "secure, one lost" else None)
    engine.start()
    fed = Federation(engine)
    assert sum(v.numel() for v in model.params.values()) == parameters
    inside, outside = [], []
    for round in range(ROUNDS):
        engine.at_clients, begun = 0.0, time.process_time()
        mean = fed.run_round(round, range(clients), model.params)
        took = time.process_time() - begun
        inside.append(engine.at_clients / clients)
        outside.append(took - engine.at_clients)
        for name, value in mean.items():
            torch.testing.assert_close(value, model.params[name], rtol=0, atol=1e-7)
    traffic = fed.traffic
    return Measured(
        clients,
        parameters,
        kind,
        traffic.trips // ROUNDS,
        traffic.up // ROUNDS // clients,
        traffic.down // ROUNDS // clients,
        statistics.median(inside),
        statistics.median(outside),
    )


def table(rows: list[Measured]) -> str:
    """As Markdown."""
    lines = [
        "| clients | parameters | sum | trips | up, kB per client | down, kB per client | ms at a client "
        "| ms at the server |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.clients} | {r.parameters:,} | {r.sum} | {r.trips} | {r.up / 1000:,.1f} | {r.down / 1000:,.1f} "
        f"| {1000 * r.client_seconds:,.1f} | {1000 * r.server_seconds:,.1f} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(clients, parameters, kind)
        for clients in (4, 20)
        for parameters in (60_000, 600_000)
        for kind in ("plain", "secure", "secure, one lost")
    ]
    print(table(rows))
    if wanted.json:
        wanted.json.write_text(json.dumps([asdict(r) for r in rows], indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
