"""`vmap`: clients stacked, so that one tensor operation serves many. For many small clients and dense models."""

from __future__ import annotations

from fedtailor.core.experiment import Experiment
from fedtailor.engines.disk import Disk
from fedtailor.engines.inprocess import InProcess
from fedtailor.training.kernels.structure import dense_layers

CACHED = 6 * 2**20  # bytes of parameters on which stacked autograd is fast
STACKED = 8 * CACHED  # dense layers cut a stack to the cache by themselves; what is left is to call them seldom
AT_MOST = 256


def vmap(experiment: Experiment, chunk: int = 0, disk: Disk | None = None) -> InProcess:
    """Stacks of clients of similar size, at most `chunk`; the shorter ones are padded and masked."""
    return InProcess(experiment, range(len(experiment.data.clients)), chunk=chunk or fitting(experiment), disk=disk)


def fitting(experiment: Experiment) -> int:
    """So many clients in a stack that their training is fast."""
    size = sum(v.nbytes for v in experiment.model.params.values())
    is_dense = bool(dense_layers(experiment.model)) and experiment.solver.is_plain
    return max(1, min(AT_MOST, (STACKED if is_dense else CACHED) // size))
