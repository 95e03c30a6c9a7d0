"""FedAvg in FedLab, as its tutorials write it: a serial trainer and a standalone pipeline. See peers.py."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import sys
import time
from typing import Any
from unittest.mock import MagicMock

try:
    import torchvision  # noqa: F401
except RuntimeError:  # built for another torch; FedLab only needs it for data sets that are not used here
    sys.modules["torchvision"] = MagicMock()

from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.standalone import StandalonePipeline
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.speed_tasks import LR, asked, network, noise, told


def main() -> None:
    workload, task, rounds = asked()
    x, y = noise(task.clients * task.samples)

    class Data(FedDataset):
        def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> Any:
            rows = slice(id * task.samples, (id + 1) * task.samples)
            return DataLoader(TensorDataset(x[rows], y[rows]), batch_size=batch_size, shuffle=True)

    times = [time.perf_counter()]

    class Pipeline(StandalonePipeline):
        def evaluate(self) -> None:
            times.append(time.perf_counter())

    trainer = FedAvgSerialClientTrainer(network(workload), task.clients)
    trainer.setup_dataset(Data())
    trainer.setup_optim(1, task.batch, LR)
    Pipeline(FedAvgServerHandler(network(workload), rounds, task.cohort / task.clients), trainer).main()
    told(times)


if __name__ == "__main__":
    main()
