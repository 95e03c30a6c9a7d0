"""What every rank of tests/devices/test_two_units.py does. Run by torchrun, with a folder to write to."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from fedtailor.algorithms import make
from fedtailor.core.federation import Federation
from fedtailor.core.process_group import ProcessGroup
from fedtailor.core.trees import items
from fedtailor.engines import devices
from fedtailor.engines.ranks import Sharded, join, leave
from tests.devices import sim
from tests.devices.federations import CASES, experiment, federation, play


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ranks: ProcessGroup = join(60.0)
    device, _ = devices.find("auto", rank=devices.local_rank())
    apart = 0.0
    for algorithm in ("ditto", "fedavg", "pfedla"):
        fed = Federation(
            Sharded(experiment(make(algorithm, {}), CASES["classification"], str(device)), "vmap", 2, ranks),
            group=ranks,
        )
        fed.engine.start()
        found = dict(items(play(fed)))
        wanted = dict(items(play(federation(make(algorithm, {}), "classification"))))
        assert found.keys() == wanted.keys()
        assert {v.device for v in found.values()} == {device}
        apart = max(apart, *(float((found[k].cpu() - v).abs().max()) for k, v in wanted.items()))
    told = {"device": str(device), "allocations": [sim.allocations(0), sim.allocations(1)], "apart": apart}
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(told))
    leave(ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
