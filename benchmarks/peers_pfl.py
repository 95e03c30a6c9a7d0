"""FedAvg in pfl-research, as its quick start writes it; alone or under torchrun. See peers.py."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import os
import time
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.speed_tasks import LR, asked, network, noise, told


class WithLoss(nn.Module):
    """What pfl asks of a model: its loss and its metrics."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor, is_eval: bool = False) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"loss": Weighted(F.cross_entropy(self.net(x), y, reduction="sum").item(), len(y))}


class Clock(TrainingProcessCallback):
    """When each round ended."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        self.times.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    workload, task, rounds = asked()
    x, y = noise(task.clients * task.samples)

    def client(user: int) -> PyTorchTensorDataset:
        rows = slice(user * task.samples, (user + 1) * task.samples)
        return PyTorchTensorDataset((x[rows], y[rows]), user_id=user)

    net = WithLoss(network(workload))
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    data = FederatedDataset(client, get_user_sampler("minimize_reuse", list(range(task.clients))))
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, evaluation_frequency=10**6, train_cohort_size=task.cohort, val_cohort_size=0),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=task.batch),
        NNEvalHyperParams(local_batch_size=task.samples),
        [clock],
    )
    if os.environ.get("RANK", "0") == "0":
        told(clock.times)


if __name__ == "__main__":
    main()
