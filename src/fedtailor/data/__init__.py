"""Data sources: `load` turns a configuration into a federation's data."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fedtailor.data.configs import (
    Cifar10Config,
    Cifar100Config,
    Clinc150Config,
    DataConfig,
    DigitsConfig,
    DuwMnistConfig,
    ElectricityConfig,
    EyesConfig,
    FashionMnistConfig,
    FolderConfig,
    HeartDiseaseConfig,
    ImageFolderConfig,
    ImageMasksConfig,
    MiniImageNetConfig,
    MixedShiftsConfig,
    MnistConfig,
    OwnConfig,
    PacsConfig,
    PFLlibConfig,
    PolynomialConfig,
    QmnistConfig,
    SavedConfig,
    SchoolConfig,
    ShakespeareConfig,
    SitesConfig,
    SourceConfig,
    StanfordDogsConfig,
    TextConfig,
)

if TYPE_CHECKING:
    import torch

    from fedtailor.core.data import FederatedData

__all__ = ["SOURCES", "DataConfig", "SourceInfo", "has_validation", "load"]


@dataclass(frozen=True)
class SourceInfo:
    """A data source: its options, and the module in `sources` whose `load` reads it."""

    description: str
    config: type[SourceConfig]
    module: str

    @property
    def has_pixels(self) -> bool:
        """Whether samples are images of bytes; `load` then takes the `dtype` that pixels are scaled in."""
        return self.module in (
            "images",
            "image_folder",
            "cifar100",
            "thumbnails",
            "duw_data",
            "mixed_shifts",
            "mask_folder",
        )


# modules are strings so that listing the sources imports neither torch nor polars
SOURCES: dict[str, SourceInfo] = {
    "digits": SourceInfo("8x8 handwritten digits that come with scikit-learn; no files needed", DigitsConfig, "images"),
    "mnist": SourceInfo("MNIST, 28x28 handwritten digits", MnistConfig, "images"),
    "fashion-mnist": SourceInfo("Fashion-MNIST, 28x28 pieces of clothing", FashionMnistConfig, "images"),
    "cifar10": SourceInfo("CIFAR-10, 32x32 colour photographs", Cifar10Config, "images"),
    "cifar100": SourceInfo("CIFAR-100, 100 classes in 20 superclasses, 32x32", Cifar100Config, "cifar100"),
    "mini-imagenet": SourceInfo("Mini-ImageNet, 100 classes as 32x32 thumbnails", MiniImageNetConfig, "thumbnails"),
    "pacs": SourceInfo(
        "PACS, art, cartoons, photographs and sketches as 32x32 thumbnails: natural clients", PacsConfig, "thumbnails"
    ),
    "mixed-shifts": SourceInfo(
        "images of clients that differ in labels, inputs, classes, amounts or two of these",
        MixedShiftsConfig,
        "mixed_shifts",
    ),
    "qmnist": SourceInfo("MNIST digits grouped by writer (QMNIST): natural clients", QmnistConfig, "images"),
    "heart-disease": SourceInfo("UCI heart disease at four hospitals", HeartDiseaseConfig, "heart"),
    "school": SourceInfo("School, exam scores of pupils in 139 schools: natural clients", SchoolConfig, "school"),
    "clinc150": SourceInfo("CLINC150, requests to an assistant, 150 intents in 10 domains", Clinc150Config, "clinc"),
    "eyes": SourceInfo("retinal vessels at four eye clinics: segmentation", EyesConfig, "mask_folder"),
    "polynomial": SourceInfo("regression on cubic polynomials; no files needed", PolynomialConfig, "polynomial"),
    "electricity": SourceInfo(
        "hourly electricity loads of 203 meters (ECL): forecasting", ElectricityConfig, "electricity"
    ),
    "shakespeare": SourceInfo(
        "Shakespeare's plays by role, next-character prediction: natural clients", ShakespeareConfig, "shakespeare"
    ),
    "duw-mnist": SourceInfo("MNIST, distributed as in the DUW paper", DuwMnistConfig, "duw_data"),
    "stanford-dogs": SourceInfo(
        "features of 120 dog breeds, distributed like the DUW paper's five clients", StanfordDogsConfig, "duw_data"
    ),
    "folder": SourceInfo(
        "your own data: a folder with one CSV or Parquet file per client", FolderConfig, "table_folder"
    ),
    "image-folder": SourceInfo(
        "your own images: a folder client/class/image, or a CSV of paths", ImageFolderConfig, "image_folder"
    ),
    "image-masks": SourceInfo(
        "your own images with masks: a folder site/images, site/masks", ImageMasksConfig, "mask_folder"
    ),
    "text": SourceInfo("your own sentences and labels, in CSV or Parquet files", TextConfig, "text"),
    "pfllib": SourceInfo("a folder of PFLlib's generate scripts: train/0.npz, test/0.npz ...", PFLlibConfig, "pfllib"),
    "saved": SourceInfo("data that a program created, as ft.run saves it", SavedConfig, "saved_data"),
    "own": SourceInfo('data from a function of yours: data.source = "my.module:load"', OwnConfig, "load_function"),
    "sites": SourceInfo(
        "stays at the sites of a federation; for fedtailor federation submit", SitesConfig, "site_data"
    ),
}


def has_validation(config: DataConfig) -> bool:
    if isinstance(config, SavedConfig):
        from fedtailor.data.sources import saved_data

        return saved_data.validation_samples(config) > 0
    return isinstance(config, OwnConfig) or bool(getattr(config, "val", 0))


def load(config: DataConfig, *, seed: int, root: Path | None = None, dtype: torch.dtype | None = None) -> FederatedData:
    """Read the data of a configuration; files are looked for under `root`, FEDTAILOR_DATA or ~/.cache/fedtailor.

    Pixels are scaled in `dtype`, float32 if it is not given. Numbers of tables are in float64, as they were read.
    """
    source = SOURCES[config.source]
    width = {"dtype": dtype} if source.has_pixels and dtype is not None else {}
    data: FederatedData = import_module(f"fedtailor.data.sources.{source.module}").load(
        config, seed=seed, root=root, **width
    )
    return data
