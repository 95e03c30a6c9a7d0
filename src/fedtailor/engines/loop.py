"""`loop`: one client after the other, in this process. The reference that the other engines must equal."""

from __future__ import annotations

from fedtailor.core.experiment import Experiment
from fedtailor.engines.disk import Disk
from fedtailor.engines.inprocess import InProcess


def loop(experiment: Experiment, disk: Disk | None = None) -> InProcess:
    """Clients one after the other; an error names algorithm, function, client and round."""
    return InProcess(experiment, range(len(experiment.data.clients)), disk=disk)
