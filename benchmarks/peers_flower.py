"""FedAvg in Flower's simulation, as its PyTorch quick start writes it. See peers.py: never outside a namespace."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import os
import time
from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.speed_tasks import LR, Task, asked, network, noise, told

client_app, server_app = ClientApp(), ServerApp()


@cache
def images(task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    return noise(task.clients * task.samples)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    workload, task, _ = asked()
    net = network(workload)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = images(task)
    first = int(context.node_config["partition-id"]) * task.samples
    rows = slice(first, first + task.samples)
    optimizer, criterion = torch.optim.SGD(net.parameters(), lr=LR), nn.CrossEntropyLoss()
    for xs, ys in DataLoader(TensorDataset(x[rows], y[rows]), batch_size=task.batch, shuffle=True):
        optimizer.zero_grad()
        criterion(net(xs), ys).backward()
        optimizer.step()
    counted = MetricRecord({"num-examples": task.samples, "steps": -(-task.samples // task.batch)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": counted}), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    workload, task, rounds = asked()
    times: list[float] = []
    strategy = FedAvg(fraction_train=task.cohort / task.clients, fraction_evaluate=0.0)
    result = strategy.start(
        grid,
        ArrayRecord(network(workload).state_dict()),
        num_rounds=rounds,
        evaluate_fn=lambda number, arrays: times.append(time.perf_counter()),
    )
    if len(result.train_metrics_clientapp) == rounds:  # otherwise clients failed, which ends nothing here
        told(times)


def main() -> None:
    from benchmarks.peers_flower import client_app, server_app  # by a name that workers can import

    _, task, _ = asked()
    one_core = {"client_resources": {"num_cpus": 1.0, "num_gpus": 0.0}}
    stock = "stock" in os.environ["TASK"].split()
    run_simulation(server_app, client_app, task.clients, backend_config=None if stock else one_core)


if __name__ == "__main__":
    main()
