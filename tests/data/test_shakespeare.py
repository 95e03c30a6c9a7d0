"""Shakespeare by role: windows of a role's own lines, cut in time; and models that read integers, on every engine."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtailor.algorithms import make
from fedtailor.core.data import FederatedData
from fedtailor.core.model import Model
from fedtailor.core.random import torch_stream
from fedtailor.data import load
from fedtailor.data.configs import ShakespeareConfig
from fedtailor.errors import ConfigError, DataError
from fedtailor.experiments.building import build_experiment
from fedtailor.experiments.config import parse
from tests.helpers import F64, OTHERS, assert_equal, everything, federate, run

FILE = "shakespeare/playshakespeare_by_role.json.gz"
LINES = [
    "To be, or not to be: that is the question.",
    "Whether 'tis nobler in the mind to suffer",
    "Words, words, words.",
]
PLAYS: dict[str, Any] = {
    "Hamlet": {"Hamlet": LINES * 5, "Ghost": ["Mark me."], "Horatio": LINES[:2] * 4},
    "Macbeth": {"Macbeth": ["Is this a dagger which I see before me?"] * 12},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / FILE).write_bytes(gzip.compress(json.dumps(PLAYS).encode()))
    return tmp_path


def read(root: Path, **options: Any) -> FederatedData:
    return load(ShakespeareConfig(**({"clients": 3, "min_characters": 200} | options)), seed=0, root=root)


def texts(data: FederatedData, rows: Tensor) -> list[str]:
    return ["".join(data.classes[i] for i in row) for row in rows.tolist()]


def test_windows_and_the_character_after_each(root: Path) -> None:
    data = read(root, stride=3)
    assert data.clients == ("Hamlet: Hamlet", "Hamlet: Horatio", "Macbeth: Macbeth")  # the ghost says too little
    assert data.classes == tuple(sorted(set("".join(s for p in PLAYS.values() for r in p.values() for s in r) + "\n")))
    assert (data.outputs, data.shape, data.train.x.dtype) == (len(data.classes), (80,), torch.int64)
    for i, said in enumerate((LINES * 5, LINES[:2] * 4, PLAYS["Macbeth"]["Macbeth"])):
        text = "\n".join(said)
        ends = range(80, len(text), 3)
        x = [t for rows in (data.train, data.val, data.test) for t in texts(data, rows.of(i)[0])]
        y = [t for rows in (data.train, data.val, data.test) for t in texts(data, rows.of(i)[1][:, None])]
        assert x == [text[end - 80 : end] for end in ends]  # training, validation, test: in the order of the lines
        assert y == [text[end] for end in ends]
        assert len(data.test.of(i)[0]) == int(len(ends) * 0.25 + 0.5)


def test_limits(root: Path) -> None:
    whole, some = read(root, stride=1), read(root, stride=1, max_samples=40)
    for i in range(3):
        kept = [t for rows in (some.train, some.val, some.test) for t in texts(some, rows.of(i)[0])]
        there = [t for rows in (whole.train, whole.val, whole.test) for t in texts(whole, rows.of(i)[0])]
        assert kept == [there[k * len(there) // 40] for k in range(40)]  # over all of its lines
    assert read(root, max_train=5).train.sizes.tolist() == [5, 5, 5]
    two = read(root, clients=2)
    assert two.clients == read(root, clients=2).clients
    assert set(two.clients) < set(whole.clients)
    assert two.classes == whole.classes


@pytest.mark.parametrize(
    ("options", "message"),
    [({"clients": 4}, "data.clients = 4: only 3 of 4 roles"), ({"min_characters": 10**6}, "only 0 of 4 roles")],
)
def test_what_cannot_be_is_refused(root: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(root, **options)


@pytest.mark.parametrize("content", [b"no JSON", b'["a list"]', b'{"play": ["no roles"]}', b'{"play": {"role": [1]}}'])
def test_damaged_files_are_named(root: Path, content: bytes) -> None:
    (root / FILE).write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=r"playshakespeare_by_role\.json\.gz.*JSON"):
        read(root)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"playshakespeare_by_role\.json\.gz"):
        read(tmp_path)


class Reader(nn.Module):
    """The mean of embeddings."""

    head = ("out",)

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(outputs, 4)
        self.out = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(x).mean(-2)))


@pytest.mark.parametrize("name", ["fedrep", "fedeq", "ditto", "knn-per"])
def test_integers_on_every_engine(root: Path, name: str) -> None:
    data = read(root, max_samples=12).to(F64)
    with torch_stream("reader"):
        model = Model(Reader(data.shape, data.outputs).to(F64), head=["out"])
    found = []
    for engine in ("loop", *OTHERS):
        fed = federate(make(name, {}), data, model, engine)
        found.append(everything(fed, run(fed, 2)))
        assert fed.record.faults == []
    for other in found[1:]:
        assert_equal(other, found[0])


def test_a_model_that_does_not_read_is_refused(root: Path) -> None:
    data = {"source": "shakespeare", "clients": 3, "min_characters": 200}
    with pytest.raises(ConfigError, match=r"model\.name"):
        build_experiment(parse({"data": data}), root)
    build_experiment(parse({"data": data, "model": {"name": "tests.data.test_shakespeare:Reader"}}), root)


@pytest.mark.data
def test_real_roles() -> None:
    data = load(ShakespeareConfig(max_samples=50), seed=0)
    assert (len(data.clients), data.outputs, data.shape) == (100, 85, (80,))
    assert int(data.train.x.max()) < 85
    assert len(set(data.clients)) == 100
    assert "of the 473 roles" in data.notes[0]
