"""CLINC150: domains or Dirichlet mixes as clients, words by hash or by a tokenizer's file; and the real files."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedtailor.data import load
from fedtailor.data.configs import Clinc150Config
from fedtailor.errors import DataError


def write(root: Path, **parts: Any) -> Path:
    folder = root / "clinc150"
    folder.mkdir()
    domains = {"travel": ["translate", "visa"], "banking": ["pin", "balance"]}
    sentences = {
        part: [[f"{part} {intent} please {i}", intent] for own in domains.values() for intent in own for i in range(n)]
        for part, n in (("train", 6), ("val", 2), ("test", 4))
    }
    content = sentences | {"oos_train": [["tell me a joke", "oos"]]} | parts
    (folder / "data_full.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    (folder / "domains.json").write_text(json.dumps(domains), encoding="utf-8")
    return root


def test_a_domain_is_a_client(tmp_path: Path) -> None:
    data = load(Clinc150Config(clients=2, length=5), seed=0, root=write(tmp_path))
    assert data.clients == ("banking", "travel")
    assert data.classes == ("balance", "pin", "translate", "visa")
    assert data.train.x.dtype == torch.int64
    assert data.train.x.shape[1] == 5
    assert [sorted(set(data.train.of(i)[1].tolist())) for i in range(2)] == [[0, 1], [2, 3]]
    assert int(data.train.sizes.sum() + data.val.sizes.sum() + data.test.sizes.sum()) == 48
    x = data.train.x
    assert bool(((x >= 0) & (x < 8192)).all())
    assert bool((x[:, 4] == 0).all())  # four words, then padding
    assert bool((x[:, :4] > 0).all())


def test_the_same_word_has_the_same_number_everywhere(tmp_path: Path) -> None:
    data = load(Clinc150Config(clients=2), seed=0, root=write(tmp_path))
    please = {int(x[2]) for x in torch.cat([data.train.x, data.test.x])}
    assert len(please) == 1


def test_dirichlet_mixes(tmp_path: Path) -> None:
    root = write(tmp_path)
    for partition in ("domains", "intents"):
        config = Clinc150Config(clients=3, partition=partition, alpha=1.0)
        one, again = load(config, seed=1, root=root), load(config, seed=1, root=root)
        assert one.clients == ("client-00", "client-01", "client-02")
        assert torch.equal(one.train.x, again.train.x)


def test_a_tokenizer_of_a_model(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 1, "train": 2, "pin": 3, "please": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    data = load(Clinc150Config(clients=2, length=3, tokenizer=path), seed=0, root=write(tmp_path))
    assert set(data.train.x[:, 2].tolist()) == {4}
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"data\.tokenizer.*tokenizer\.json"):
        load(Clinc150Config(clients=2, tokenizer=path), seed=0, root=tmp_path)


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    root = write(tmp_path, train=[["hello", "nose"]])
    with pytest.raises(DataError, match=r"data_full\.json\.gz: .*nose"):
        load(Clinc150Config(clients=2), seed=0, root=root)
    (tmp_path / "b").mkdir()
    other = write(tmp_path / "b")
    with pytest.raises(DataError, match=r"data\.clients = 10"):
        load(Clinc150Config(), seed=0, root=other)


@pytest.mark.data
def test_the_real_files() -> None:
    data = load(Clinc150Config(), seed=0)
    assert len(data.clients) == 10
    assert data.outputs == 150
    assert int(data.train.sizes.sum() + data.val.sizes.sum() + data.test.sizes.sum()) == 22_500
    assert len(set(data.test.of(0)[1].tolist())) == 15
