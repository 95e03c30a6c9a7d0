"""Masks from data to prediction: engines, MONAI's networks and losses, windows, files, pages, memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor import Model
from fedtailor.algorithms.fedavg import FedAvg
from fedtailor.core.experiment import Experiment
from fedtailor.core.segmentation import VOID, Segmentation
from fedtailor.data.sources.site_data import SiteData, load_site, write_prepared
from fedtailor.engines.attacked import Attack, with_flipped_labels
from fedtailor.errors import ConfigError, DataError
from fedtailor.metrics.evaluation import evaluate
from fedtailor.metrics.library import metrics_of
from fedtailor.metrics.memory import Live
from fedtailor.metrics.overlap import dice
from fedtailor.models.unet import UNet
from fedtailor.report.write import write
from fedtailor.serving.export import export, read_safetensors
from fedtailor.serving.predict import predict_file
from fedtailor.serving.predict_masks import write_masks
from fedtailor.tables.serve import personal
from fedtailor.training.augmentation import augment, augment_target
from fedtailor.training.solver import Solver

UNET: dict[str, Any] = {"model.name": "unet", "model.channels": [4, 8], "model.convolutions": 1}
LOCAL: dict[str, Any] = {"local.optimizer": "adam", "local.lr": 0.02, "local.batch_size": 4}


def squares(rows: int, *space: int, sign: float = 1.0, seed: int = 0) -> tuple[Any, Any]:
    """Bright, or dark, boxes in noise, and where they are."""
    rng = np.random.default_rng(seed)
    y: Any = np.zeros((rows, *space), np.uint8)
    for i in range(rows):
        corner = rng.integers(0, [n // 2 for n in space])
        y[(i, *(slice(a, a + n // 3) for a, n in zip(corner, space, strict=True)))] = 1
    return (sign * y + rng.normal(0, 0.2, y.shape)).astype(np.float32)[:, None], y


def sites(*space: int, rows: int = 12) -> ft.FederatedData:
    north, south = squares(rows, *space), squares(rows + 2, *space, sign=-1.0, seed=1)
    return ft.federated({"north": north, "south": south}, name="boxes")


def run(data: ft.FederatedData, out: Path, algorithm: str = "fedper", rounds: int = 2, **settings: Any) -> Any:
    every = UNET | LOCAL | {k.replace("__", "."): v for k, v in settings.items()}
    return ft.run(algorithm, data, rounds=rounds, settings=every, out=out, progress=False)


@pytest.mark.parametrize("space", [(12, 10), (6, 8, 7)])
def test_engines_agree(tmp_path: Path, space: tuple[int, ...]) -> None:
    data, found = sites(*space), {}
    for engine in ("loop", "vmap", "pool"):
        made = run(data, tmp_path / engine, federation__engine=engine, evaluation__metrics=["dice", "iou", "loss"])
        probabilities = made.personal("south").predict_proba(data.test.of(1)[0])
        found[engine] = (made.results["last"]["clients"]["loss"], probabilities)
    assert found["loop"][1].shape == (4, 2, *space)
    for engine in ("vmap", "pool"):
        assert found[engine][0] == pytest.approx(found["loop"][0], abs=1e-4)
        assert np.abs(found[engine][1] - found["loop"][1]).max() < 1e-3


def test_it_learns_where_the_boxes_are(tmp_path: Path) -> None:
    made = run(sites(12, 12, rows=30), tmp_path / "run", rounds=20, federation__engine="loop")
    assert min(made.results["last"]["clients"]["dice"]) > 0.8
    assert made.results["metric"] == "dice"


@pytest.mark.parametrize("engine", ["loop", "vmap", "pool"])
@pytest.mark.parametrize("criterion", ["torch", "monai"])
def test_a_loss_that_reduces_the_batch_trains_as_in_plain_torch(tmp_path: Path, engine: str, criterion: str) -> None:
    """One client, whole batches, SGD: the same steps by hand."""
    settings: dict[str, Any] = {"task__criterion": "torch.nn:CrossEntropyLoss"}
    loss: Any = nn.CrossEntropyLoss()
    if criterion == "monai":
        losses = pytest.importorskip("monai.losses", reason="needs MONAI, of the extra segmentation")
        options = {"to_onehot_y": True, "softmax": True}
        settings = {"task__criterion": "monai.losses:DiceCELoss", "task__criterion_options": options}
        loss = losses.DiceCELoss(**options)
    data = ft.federated({"north": squares(12, 8, 8)})
    settings |= {"local__optimizer": "sgd", "local__lr": 0.1, "local__batch_size": 0, "model__dtype": "float64"}
    if (criterion, engine) == ("monai", "vmap"):  # it writes into a tensor, which cannot be stacked
        with pytest.raises(ConfigError, match='engine = "loop"'):
            run(data, tmp_path / "run", "fedavg", rounds=3, federation__engine=engine, **settings)
        made = run(data, tmp_path / "auto", "fedavg", rounds=1, federation__engine="auto", **settings)
        assert made.folder.about["engine"] != "vmap"
        return
    made = run(data, tmp_path / "run", "fedavg", rounds=3, federation__engine=engine, **settings)
    net = UNet((1, 8, 8), 2, channels=(4, 8), convolutions=1).double()
    net.load_state_dict(_initial(data, tmp_path / "start", **settings))
    x, y = data.train.of(0)
    assert isinstance(x, Tensor)
    target = y.long() if criterion == "torch" else y[:, None].long()
    for _ in range(3):
        gradients = torch.autograd.grad(loss(net(x.double()), target), list(net.parameters()))
        with torch.no_grad():
            for v, g in zip(net.parameters(), gradients, strict=True):
                v.sub_(0.1 * g)
    trained = made.personal("north").params
    assert all(torch.allclose(trained[k], v, atol=1e-8) for k, v in net.state_dict().items())
    test_x, test_y = data.test.of(0)
    assert isinstance(test_x, Tensor)
    wanted = test_y.long() if criterion == "torch" else test_y[:, None].long()
    with torch.no_grad():
        each = [float(loss(net(test_x[i : i + 1].double()), wanted[i : i + 1])) for i in range(len(test_y))]
    assert made.results["last"]["clients"]["loss"] == pytest.approx([np.mean(each)], abs=1e-6)


def _initial(data: ft.FederatedData, out: Path, **settings: Any) -> dict[str, Tensor]:
    """What a run begins with: steps of size 1e-30 change nothing."""
    params = run(data, out, "fedavg", rounds=1, **(settings | {"local__lr": 1e-30})).personal("north").params
    return {k: v.clone() for k, v in params.items()}


def batch_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target.long())


class MeanOfBatch:
    kind, metrics, mixes, loss = "segmentation", ("dice",), True, staticmethod(batch_loss)


class MeanUnsaid:
    kind, metrics, loss = "segmentation", ("dice",), staticmethod(batch_loss)


def test_an_own_task_may_give_one_number_for_a_batch_if_it_says_so(tmp_path: Path) -> None:
    name = f"{__name__}:MeanOfBatch"
    made = run(sites(8, 8), tmp_path / "run", rounds=1, task__name=name, federation__engine="vmap")
    assert set(made.results["last"]["test"]) == {"dice"}
    with pytest.raises(ConfigError, match="one number per sample"):
        run(sites(8, 8), tmp_path / "other", rounds=1, task__name=name.replace("MeanOfBatch", "MeanUnsaid"))


class Denoise:
    kind, metrics = "own", ("loss",)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().flatten(1).mean(1)


class OneChannel(nn.Module):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.out = nn.Conv2d(shape[0], 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


def test_images_of_an_own_task_keep_their_channel_and_are_no_table(tmp_path: Path) -> None:
    x = squares(8, 6, 5)[0]
    data = ft.federated({"north": (x, x)}, task=f"{__name__}:Denoise", outputs=1)
    settings = {"model.name": OneChannel, "task.name": f"{__name__}:Denoise", "federation.engine": "loop"}
    made = ft.run("fedavg", data, rounds=1, settings=settings, out=tmp_path / "run", progress=False)
    assert made.personal("north").predict(x[:3]).shape == (3, 1, 6, 5)
    np.savez(tmp_path / "x.npz", x=x)
    with pytest.raises(DataError, match=r"\[8, 1, 6, 5\]"):
        predict_file(made.personal("north"), tmp_path / "x.npz")


def test_the_rows_of_a_site_are_kept_in_a_file(tmp_path: Path) -> None:
    data = sites(8, 8)
    write_prepared(tmp_path / "south.safetensors", data, 1)
    found = load_site(SiteData(path=tmp_path / "south.safetensors"), "south", seed=0)
    assert (found.task, found.outputs) == ("segmentation", 2)
    assert torch.equal(found.train.y, data.train.of(1)[1])


class Flat(nn.Module):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.out = nn.Linear(torch.Size(shape).numel(), outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1))


def test_a_model_that_gives_no_masks_is_refused(tmp_path: Path) -> None:
    settings = LOCAL | {"model.name": Flat, "model.head": ["out"]}
    with pytest.raises(ConfigError, match=r"\[rows, 2, 8, 8\].*\[2, 2\]"):
        ft.run("fedper", sites(8, 8), rounds=1, settings=settings, out=tmp_path / "run", progress=False)


def test_monais_network_trains_on_patches_and_is_validated_on_volumes(tmp_path: Path) -> None:
    """32-cubed patches, 64-cubed volumes, window by window; without code for the task."""
    nets: Any = pytest.importorskip("monai.networks.nets", reason="needs MONAI, of the extra segmentation")
    unet = nets.UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,), norm="instance")
    volumes = squares(1, 64, 64, 64, seed=3)
    each = {"train": squares(4, 32, 32, 32), "val": volumes, "test": volumes}
    data = ft.federated({"north": each, "south": each})
    settings = LOCAL | {"model.name": unet, "evaluation.window": [32, 32, 32], "federation.engine": "loop"}
    made = ft.run("fedavg", data, rounds=1, settings=settings, out=tmp_path / "run", progress=False)
    assert np.isfinite(made.results["last"]["clients"]["dice"]).all()
    inference: Any = pytest.importorskip("monai.inferers", reason="needs MONAI, of the extra segmentation")
    unet.load_state_dict(made.personal("north").params, strict=True)
    x = data.test.of(0)[0]
    with torch.no_grad():
        wanted = inference.sliding_window_inference(x, (32, 32, 32), 1, unet.eval(), overlap=0.25)
    found = made.personal("north").predict(volumes[0])
    assert found.shape == (1, 64, 64, 64)
    assert (found == wanted.argmax(1).numpy()).mean() > 0.9999  # ties of rounding


def folder_of(root: Path) -> Path:
    image: Any = pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra images")
    for k, site in enumerate(("north", "south")):
        x, y = squares(10, 12, 10, seed=k)
        for part in ("images", "masks"):
            (root / site / part).mkdir(parents=True)
        for i in range(10):
            grey = (x[i, 0] * 80 + 100).clip(0, 255).astype(np.uint8)
            image.fromarray(grey).save(root / site / "images" / f"{i}.png")
            image.fromarray(y[i] * 255).save(root / site / "masks" / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a folder of images and masks."""
    from fedtailor.experiments import runner
    from fedtailor.experiments.config import parse, with_values

    base = tmp_path_factory.mktemp("masks")
    folder_of(base / "scans")
    values = UNET | LOCAL | {"rounds": 3, "algorithm.name": "fedper", "data.path": str(base / "scans")}
    config = parse(with_values({"data": {"source": "image-masks", "colours": "grey"}}, values))
    return runner.start(config, base / "run").path


def test_masks_are_written_as_files(trained: Path, tmp_path: Path) -> None:
    from PIL import Image

    images = trained.parent / "scans" / "north" / "images"
    model = personal(trained, "north")
    files = write_masks(model, trained, images, tmp_path / "out")
    assert [f.name for f in files] == [f"{i}.png" for i in range(10)]
    x = (
        np.stack([np.asarray(Image.open(images / f"{i}.png")) for i in range(10)]).astype(np.float32)[:, None] / 127.5
        - 1
    )
    assert np.array_equal(np.stack([np.asarray(Image.open(f)) for f in files]), model.predict(x))
    np.savez(tmp_path / "x.npz", x=x)
    (written,) = write_masks(model, trained, tmp_path / "x.npz", tmp_path / "masks.npz")
    assert np.array_equal(np.load(written)["mask"], model.predict(x))
    np.savez(tmp_path / "one.npz", image=x[0])
    (written,) = write_masks(model, trained, tmp_path / "one.npz", tmp_path / "one-mask.npz")
    assert np.array_equal(np.load(written)["mask"], model.predict(x[:1])[0])
    nibabel: Any = pytest.importorskip("nibabel", reason="needs nibabel, of the extra segmentation")
    nibabel.save(nibabel.Nifti1Image(x[0, 0], np.diag([2.0, 2.0, 3.0, 1.0])), tmp_path / "scan.nii.gz")
    (written,) = write_masks(model, trained, tmp_path / "scan.nii.gz", tmp_path / "scan-mask.nii.gz")
    mask = nibabel.load(written)
    assert np.array_equal(np.asarray(mask.dataobj), model.predict(x[:1])[0])
    assert mask.affine.diagonal().tolist() == [2.0, 2.0, 3.0, 1.0]


def test_the_command_predicts_masks(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from fedtailor.cli.main import app

    monkeypatch.chdir(tmp_path)
    images = trained.parent / "scans" / "south" / "images"
    done = CliRunner().invoke(app, ["predict", str(trained), str(images / "3.png"), "--site", "south"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "3-mask.png").is_file()
    other = CliRunner().invoke(
        app, ["predict", str(trained), str(images / "3.png"), "--site", "south", "--out", "mask.csv"]
    )
    assert other.exit_code != 0
    assert not (tmp_path / "mask.csv").exists()


def test_the_page_shows_image_truth_and_prediction(trained: Path, tmp_path: Path) -> None:
    page = write(trained, tmp_path / "page.html").read_text()
    pictures = re.findall(r'<img src="data:image/png;base64,[^"]{200,}" alt="([^"]*)">', page)
    assert [text.rpartition(" ")[2] for text in pictures] == ["north", "south"]


def test_a_site_may_be_held_out_by_name(trained: Path, tmp_path: Path) -> None:
    made = run(sites(8, 8), tmp_path / "run", rounds=1, evaluation__unseen=["south"])
    assert made.folder.about["clients"] == ["north"]
    assert made.results["unseen"]["names"] == ["south"]
    with pytest.raises(ConfigError, match=r'unseen.*"sout".*south'):
        run(sites(8, 8), tmp_path / "other", rounds=1, evaluation__unseen=["sout"])


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_exports_give_the_same_masks(trained: Path, tmp_path: Path, to: Any) -> None:
    ending = {"safetensors": "safetensors", "torch": "pt2"}[to]
    (file,) = export(trained, "north", to, tmp_path / f"model.{ending}")
    x = squares(2, 12, 10)[0]
    wanted = personal(trained, "north")
    if to == "safetensors":
        assert np.array_equal(read_safetensors(file).predict(x), wanted.predict(x))
    else:
        found = torch.export.load(file).module()(torch.from_numpy(x))
        assert np.allclose(found.detach().numpy(), wanted.predict_proba(x), atol=1e-5)


def test_masks_move_with_their_images() -> None:
    """A mask that is the image, as numbers, is so after a crop and a flip; what comes in from outside is void."""
    x = torch.arange(1.0, 1 + 3 * 2 * 12 * 11).reshape(3, 2, 12, 11) % 200
    y = x[:, 0].to(torch.uint8)
    offsets, flips = torch.tensor([[0, 0], [4, 4], [8, 3]]), torch.tensor([1, 0, 1])
    moved, mask = augment(x, offsets, flips)[:, 0], augment_target(y, x, offsets, flips)
    assert torch.equal(torch.where(mask == VOID, 0, mask), moved.to(torch.uint8))
    assert (mask == VOID).flatten(1).any(1).tolist() == [True, False, True]
    assert torch.equal(augment_target(torch.arange(3), x, offsets, flips), torch.arange(3))


def test_flipped_masks_keep_what_is_void() -> None:
    y = np.array([[[0, 1], [VOID, 1]]] * 4, np.uint8)
    data = ft.federated({"a": (np.zeros((4, 1, 2, 2), np.float32), y), "b": (np.zeros((4, 1, 2, 2), np.float32), y)})
    flipped = with_flipped_labels(data, Attack("label-flip", 0.5, 1.0, 0))
    rows = {tuple(v.flatten().tolist()) for v in flipped.train.y}
    assert rows == {(0, 1, VOID, 1), (1, 0, VOID, 0)}


@pytest.mark.parametrize("window", [(), (8, 8, 8)])
def test_dice_of_volumes_keeps_no_outputs(window: tuple[int, ...]) -> None:
    """Memory of four times as many volumes is the same, and at most twice that of plain torch."""
    peaks = []
    for rows in (24, 96):
        each = {"train": squares(2, 8, 8, 8), "val": squares(rows, 16, 16, 16)}
        data, task = ft.federated({"north": each}), Segmentation()
        model = Model(UNet((1, 8, 8, 8), 2, channels=(2, 4), convolutions=1))
        metrics = metrics_of(task, ("dice", "iou", "loss"))
        experiment = Experiment(
            FedAvg(), model, data, Solver(), 0, task=task, metrics=metrics, evaluation_batch=4, window=window
        )
        with Live() as live:
            values = evaluate(experiment, [0], model.params, ["val"], is_stacked=False)["val"]
        peaks.append(live.peak)
        assert set(values) == {"dice", "iou", "loss"}
    assert peaks[1] < 1.1 * peaks[0]
    x, y = data.val.of(0)
    assert isinstance(x, Tensor)
    with Live() as plain, torch.no_grad():
        for i in range(0, len(x), 4):
            at = torch.arange(i, i + 4)
            dice(model.module(x[at]), y[at]).sum()
    assert window or peaks[1] < 2 * plain.peak
