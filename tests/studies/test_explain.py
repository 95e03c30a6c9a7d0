"""What overlaps of what is own."""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file

from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.studies.explain import explain, overlap_by_classes, overlaps


def test_overlap_by_layer() -> None:
    shares = {
        "a.weight": torch.tensor([[[0.0, 1.0]], [[0.0, 0.0]], [[1.0, 1.0]]]),
        "a.bias": torch.tensor([[1.0], [1.0], [0.0]]),
        "b": torch.ones(3, 4),
    }
    found = overlaps(shares)
    torch.testing.assert_close(found["a"], torch.tensor([[1, 0.5, 0], [0.5, 1, 0], [0, 0, 1]]).double())
    torch.testing.assert_close(found["b"], torch.ones(3, 3).double())  # nobody has anything there
    assert overlaps(shares | {"b": torch.full((3, 4), 0.3)}) == {}


def test_overlap_of_clients_with_and_without_a_class_in_common(tmp_path: Path) -> None:
    config = parse(
        {
            "rounds": 3,
            "data": {"source": "digits", "clients": 4, "partition": "classes", "classes_per_client": 3},
            "model": {"name": "mlp", "hidden": [8]},
            "algorithm": {"name": "fedselect", "alpha": 0.2},
        }
    )
    folder = runner.start(config, tmp_path / "run")
    found = overlap_by_classes(folder.path)
    assert set(found) == {"common", "none"}
    explain(folder.path)
    shares = load_file(folder.path / "shares.safetensors")
    masks = torch.cat([1 - v.flatten(1) for k, v in shares.items() if k.startswith("shares/")], 1).bool()
    each = [
        float((masks[i] & masks[j]).sum() / (masks[i] | masks[j]).sum()) for i in range(4) for j in range(4) if i < j
    ]
    seen = [v for v in found.values() if not math.isnan(v)]
    assert min(each) - 1e-9 <= min(seen) <= max(seen) <= max(each) + 1e-9
