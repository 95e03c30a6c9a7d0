"""Settings of strangers, on every engine that can take them, each equal to a loop in plain PyTorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor
from torch.nn import functional as F

import fedtailor as ft
from fedtailor import FederatedData
from fedtailor.api import Run
from fedtailor.errors import DataError
from tests.world import plain

ENGINES = ("loop", "vmap", "wire", "pool")
SIZES = {"ada": 9, "bo": 14, "cy": 9}
ROUNDS = 3


def arrays(targets: Any, *, task: str = "auto", seed: int = 0, **options: Any) -> FederatedData:
    """Four features for each client, and the targets that `targets(rng, x)` makes."""
    clients = {}
    for name, n in SIZES.items():
        rng = np.random.default_rng([seed, n, len(name)])
        x = rng.normal(size=(n, 4)).astype(np.float32)
        parts: dict[str, Any] = {"train": x, "val": rng.normal(size=(8, 4)), "test": rng.normal(size=(12, 4))}
        clients[name] = {s: (v.astype(np.float32), targets(rng, v)) for s, v in parts.items()}
    return ft.federated(clients, task=task, name="made", **options)


def trained(data: FederatedData, model: str, engine: str, out: Path, **settings: Any) -> Run:
    """FedAvg with one step on the whole data a round."""
    keys = {"model.name": f"tests.world.plain:{model}", "local.batch_size": 0, "local.lr": 0.1, "local.kernels": "off"}
    keys |= {"federation.workers": 2} if engine == "pool" else {}
    return ft.run("fedavg", data, engine=engine, rounds=ROUNDS, settings=keys | settings, out=out, progress=False)


def assert_as_plain(run: Run, wanted: dict[str, Tensor], tolerance: float = 2e-6) -> None:
    for client in run.clients:
        params = run.folder.personal(client, "last")
        for name, value in wanted.items():
            assert torch.allclose(params[name], value.detach(), atol=tolerance, rtol=1e-5), (client, name)


def sentences(seed: int = 0) -> FederatedData:
    """Token ids of unequal length, and a label."""
    clients = {}
    for name, n in SIZES.items():
        rng = np.random.default_rng([seed, n])
        texts = [rng.integers(1, 400, size=rng.integers(2, 7)) for _ in range(n + 12)]
        clients[name] = (texts, np.array([len(t) % 3 for t in texts]))
    return ft.federated(clients, name="sentences", outputs=3)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_encoder_with_dropout_and_an_attention_mask(engine: str, tmp_path: Path) -> None:
    data = sentences()
    assert set(data.shape) == {"input_ids", "attention_mask"}
    run = trained(data, "Encoder", engine, tmp_path / "run")
    module = plain.begun(plain.Encoder, data.shape, 3)
    loss = lambda o, y: F.cross_entropy(o, y, reduction="none")  # noqa: E731
    assert_as_plain(run, plain.fedavg(module, data, loss, rounds=ROUNDS, lr=0.1))
    ids, mask = (data.test.first(3)[k] for k in ("input_ids", "attention_mask"))
    assert run.personal("ada").predict_proba({"input_ids": ids, "attention_mask": mask}).shape == (3, 3)


@pytest.mark.parametrize("engine", ENGINES)
def test_several_labels_at_once(engine: str, tmp_path: Path) -> None:
    data = arrays(lambda rng, x: (x[:, :3] + rng.normal(size=(len(x), 3)) > 0).astype(np.float32), task="multilabel")
    names = ["auroc", "macro_f1", "average_precision", "log_loss"]
    run = trained(data, "Layered", engine, tmp_path / "run", **{"evaluation.metrics": names})
    module = plain.begun(plain.Layered, data.shape, 3)
    loss = lambda o, y: F.binary_cross_entropy_with_logits(o, y, reduction="none").mean(-1)  # noqa: E731
    assert_as_plain(run, wanted := plain.fedavg(module, data, loss, rounds=ROUNDS, lr=0.1))
    module.load_state_dict({k: v.detach() for k, v in wanted.items()})
    x, y = data.test.of(1)
    scores, target = module(x).detach().sigmoid().numpy(), y.numpy()
    found = {name: run.results["last"]["clients"][name][1] for name in names}
    assert run.results["metric"] == "auroc"
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(target, scores, average="macro"), abs=1e-5)
    assert found["macro_f1"] == pytest.approx(sk.f1_score(target, scores > 0.5, average="macro", zero_division=0))
    assert found["average_precision"] == pytest.approx(sk.average_precision_score(target, scores), abs=1e-5)
    assert found["log_loss"] == pytest.approx(
        np.mean([sk.log_loss(target[:, c], scores[:, c]) for c in range(3)]), abs=1e-5
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_quantiles_with_an_interval(engine: str, tmp_path: Path) -> None:
    data = arrays(lambda rng, x: x[:, :1] + rng.normal(size=(len(x), 1)).astype(np.float32), task="quantile")
    levels = [0.1, 0.5, 0.9]
    settings = {"task.name": "quantile", "task.quantiles": levels, "evaluation.metrics": ["pinball", "coverage", "mae"]}
    run = trained(data, "Layered", engine, tmp_path / "run", **settings)
    q = torch.tensor(levels)
    loss = lambda o, y: torch.maximum(q * (y - o), (q - 1) * (y - o)).mean(-1)  # noqa: E731
    module = plain.begun(plain.Layered, data.shape, 3)
    assert_as_plain(run, plain.fedavg(module, data, loss, rounds=ROUNDS, lr=0.1))
    outputs = module(data.test.of(0)[0]).detach()
    y = data.test.of(0)[1]
    inside = ((outputs[:, :1] <= y) & (y <= outputs[:, 2:])).double().mean()
    pinball = np.mean([sk.mean_pinball_loss(y[:, 0], outputs[:, i], alpha=a) for i, a in enumerate(levels)])
    clients = run.results["last"]["clients"]
    assert clients["coverage"][0] == pytest.approx(float(inside))
    assert clients["pinball"][0] == pytest.approx(pinball, abs=1e-5)
    assert run.personal("ada").predict(data.test.of(0)[0]).shape == (12, 3)


@pytest.mark.parametrize("engine", ENGINES)
def test_survival_with_a_concordance_index(engine: str, tmp_path: Path) -> None:
    def times(rng: np.random.Generator, x: Any) -> Any:
        return np.stack([rng.exponential(np.exp(-x[:, 0])), rng.random(len(x)) < 0.7], axis=1).astype(np.float32)

    data = arrays(times, task="survival")
    run = trained(data, "Layered", engine, tmp_path / "run")

    def cox(outputs: Tensor, y: Tensor) -> Tensor:
        terms = []
        for i in range(len(y)):
            at_risk = outputs[:, 0][y[:, 0] >= y[i, 0]]
            terms.append(y[i, 1] * (at_risk.exp().sum().log() - outputs[i, 0]))
        return torch.stack(terms)

    module = plain.begun(plain.Layered, data.shape, 1)
    assert_as_plain(run, plain.fedavg(module, data, cox, rounds=ROUNDS, lr=0.1))
    x, y = data.test.of(2)
    risk, right, pairs = module(x).detach()[:, 0], 0.0, 0
    for i in range(len(y)):
        for j in range(len(y)):
            if y[i, 1] and y[j, 0] > y[i, 0]:
                pairs += 1
                right += float(risk[i] > risk[j]) + 0.5 * float(risk[i] == risk[j])
    assert run.results["metric"] == "c_index"
    assert run.results["last"]["clients"]["c_index"][2] == pytest.approx(right / pairs)


@pytest.mark.parametrize("engine", ENGINES)
def test_adamw_with_a_cosine_and_warm_up(engine: str, tmp_path: Path) -> None:
    data = arrays(lambda rng, x: (x[:, 0] > 0).astype(np.int64), outputs=2)
    keys = {"local.optimizer": "adamw", "local.weight_decay": 0.01, "local.schedule": "cosine", "local.warmup": 2}
    keys |= {"rounds": 4}
    run = trained(data, "Layered", engine, tmp_path / "run", **keys)
    factors = {1: 0.5, 2: 1.0, 3: 1.0, 4: 0.0}  # grows over two rounds, then half a cosine over two
    module = plain.begun(plain.Layered, data.shape, 2)
    wanted = plain.fedavg(
        module,
        data,
        lambda o, y: F.cross_entropy(o, y, reduction="none"),
        rounds=4,
        lr=0.1,
        optimizer=lambda params, lr: torch.optim.AdamW(params, lr=lr, weight_decay=0.01),
        schedule=factors.__getitem__,
    )
    assert_as_plain(run, wanted, 1e-5)


class Pairs(torch.utils.data.Dataset[tuple[dict[str, Tensor], int]]):
    """Samples of two parts, made when they are asked for."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.seed, self.read = n, seed, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], int]:
        self.read += 1
        rng = np.random.default_rng([self.seed, i])
        left, right = (torch.from_numpy(rng.normal(size=k).astype(np.float32)) for k in (2, 3))
        return {"left": left, "right": right}, int(left[0] > 0)


def test_a_torch_dataset_of_samples_with_two_parts(tmp_path: Path) -> None:
    sets = {name: Pairs(n + 10, n) for name, n in SIZES.items()}
    data = ft.federated(sets, name="pairs", outputs=2)
    runs = {e: trained(data, "TwoInputs", e, tmp_path / e) for e in ENGINES}
    module = plain.begun(plain.TwoInputs, data.shape, 2)
    wanted = plain.fedavg(module, data, lambda o, y: F.cross_entropy(o, y, reduction="none"), rounds=ROUNDS, lr=0.1)
    for run in runs.values():
        assert_as_plain(run, wanted)
    assert ft.load(tmp_path / "loop").personal("ada").params.keys() == wanted.keys()  # type: ignore[union-attr]


def test_a_dataset_may_be_read_batch_by_batch(tmp_path: Path) -> None:
    from fedtailor.experiments.building import assemble
    from fedtailor.experiments.config import parse
    from fedtailor.testing.federations import federate, run

    sets = {name: Pairs(n + 10, n) for name, n in SIZES.items()}
    config = parse({"model": {"name": "tests.world.plain:TwoInputs"}, "algorithm": {"name": "fedavg"}})
    servers = []
    for lazy in (False, True):
        experiment = assemble(config, ft.federated(sets, name="pairs", outputs=2, lazy=lazy))
        before = sum(s.read for s in sets.values())
        servers.append(run(federate(experiment.algorithm, experiment.data, experiment.model), 2))
        assert (sum(s.read for s in sets.values()) > before) is lazy
    assert all(torch.equal(servers[0][k], servers[1][k]) for k in servers[0])
    with pytest.raises(DataError, match="cannot be kept with a run"):
        trained(ft.federated(sets, outputs=2, lazy=True), "TwoInputs", "loop", tmp_path / "lazy")
    assert not (tmp_path / "lazy").exists()


def test_metrics_that_cannot_be_told_are_missing_not_zero(tmp_path: Path) -> None:
    data = arrays(
        lambda rng, x: (x[:, 0] > (9 if len(x) == 12 and rng.random() < 2 else 0)).astype(np.int64), outputs=2
    )
    run = trained(data, "Layered", "vmap", tmp_path / "run", **{"evaluation.metrics": ["accuracy", "auroc"]})
    assert all(math.isnan(v) for v in run.results["last"]["clients"]["auroc"])
    assert run.results["last"]["missing"]["auroc"]["clients"] == list(SIZES)
    assert "one class" in run.results["last"]["missing"]["auroc"]["reason"]
    assert run.results["last"]["test"]["auroc"]["clients"] == 0
