"""An encoder with dropout on real sentences: CLINC150's rows as token ids and a mask."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fedtailor as ft
from tests.world import plain
from tests.world.test_settings import ENGINES, ROUNDS, assert_as_plain, trained

FILE = Path(os.environ.get("FEDTAILOR_DATA", "none")) / "clinc150" / "data_full.json.gz"
pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not FILE.exists(), reason="needs the real data under FEDTAILOR_DATA"),
]


def sentences() -> ft.FederatedData:
    """Three clients with the intents of their own; words are numbered as they come."""
    with gzip.open(FILE, "rt", encoding="utf-8") as file:
        rows = json.load(file)["train"]
    intents = sorted({intent for _, intent in rows})[:6]
    words: dict[str, int] = {}
    clients = {}
    for i, name in enumerate(("ada", "bo", "cy")):
        own = [(text, intents.index(intent)) for text, intent in rows if intent in intents[i : i + 4]][: 60 + i]
        ids = [np.array([words.setdefault(w, len(words) % 398 + 1) for w in text.split()]) for text, _ in own]
        clients[name] = (ids, np.array([label for _, label in own]))
    return ft.federated(clients, name="clinc", outputs=6)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_numbers_of_a_plain_loop(engine: str, tmp_path: Path) -> None:
    data = sentences()
    assert bool((data.train.x["attention_mask"] == 0).any()), "nothing is padded"
    run = trained(data, "Encoder", engine, tmp_path / "run")
    module = plain.begun(plain.Encoder, data.shape, 6)
    wanted = plain.fedavg(module, data, lambda o, y: F.cross_entropy(o, y, reduction="none"), rounds=ROUNDS, lr=0.1)
    assert_as_plain(run, wanted)
    first = plain.begun(plain.Encoder, data.shape, 6).state_dict()
    assert not torch.equal(wanted["out.weight"], first["out.weight"])
