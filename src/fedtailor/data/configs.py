"""The options of each data source. TOML keys, command-line options and the reference pages derive from these fields."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedtailor.errors import DataError

Corruption = Literal[
    "mixed",
    "gaussian-noise",
    "shot-noise",
    "impulse-noise",
    "speckle-noise",
    "gaussian-blur",
    "defocus-blur",
    "contrast",
    "brightness",
    "saturate",
    "jpeg",
    "pixelate",
]


STANDARDISE = "Standardise numeric columns by all training rows (pooled) or each client's."


class SourceConfig(BaseModel):
    """Base of all sources: immutable; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int | None = Field(default=None, ge=0, description="Seed of partition and splits; none: the run's seed.")


class SplitConfig(SourceConfig):
    """How each client's samples are split into train, val and test."""

    test: float = Field(default=0.25, description="Fraction of each client's samples kept for the final test.")
    val: float = Field(default=0.1, description="Fraction of each client's samples used to select models.")
    max_samples: int | None = Field(default=None, ge=1, description="Maximum samples per client.")
    max_train: int | None = Field(
        default=None, ge=1, description="Maximum training samples per client; val and test are not reduced."
    )

    @model_validator(mode="after")
    def _check_fractions(self) -> SplitConfig:
        if not (self.test >= 0 and self.val >= 0 and self.test + self.val < 1):
            raise DataError(
                f"data.test = {self.test} and data.val = {self.val} leave nothing to train on; "
                "both must be at least 0 and their sum below 1"
            )
        return self


class PartitionConfig(SplitConfig):
    """How pooled samples are distributed over clients."""

    clients: int = Field(default=10, description="Number of clients the samples are dealt to.")
    partition: Literal["iid", "dirichlet", "classes", "quantity"] = Field(
        default="dirichlet",
        description="How samples are dealt: equally, by label proportions, by whole classes, or in unequal amounts.",
    )
    alpha: float = Field(default=0.5, description="Concentration of the Dirichlet draws; smaller is more skewed.")
    classes_per_client: int = Field(default=2, description='Distinct classes of each client under partition "classes".')
    samples_per_client: int | None = Field(
        default=None,
        ge=1,
        description='Samples of each client under partition "classes"; all by default.',
    )
    sizes: Literal["lognormal", "dirichlet"] = Field(
        default="lognormal", description='Distribution of the client sizes under partition "quantity".'
    )
    sigma: float = Field(default=1.0, ge=0, description="Spread of the log-normal client sizes; 0 makes them equal.")
    min_samples: int = Field(default=4, ge=1, description='Minimum samples per client ("dirichlet", "quantity").')
    permuted: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Fraction of clients with permuted labels, all by the same permutation (concept shift).",
    )
    corruption: Corruption | None = Field(
        default=None,
        description='Corrupt all images as in CIFAR-10-C, "mixed": a different corruption per client (feature shift).',
    )
    severity: int | None = Field(
        default=None, ge=1, le=5, description="Severity of the corruption; drawn per client by default."
    )

    @model_validator(mode="after")
    def _check_partition(self) -> PartitionConfig:
        if not 0 < self.alpha < math.inf:
            raise DataError(f"data.alpha = {self.alpha}: must be above 0 (0.1 is strong skew, 100 almost none)")
        if self.clients < 1:
            raise DataError(f"data.clients = {self.clients}: must be at least 1")
        if self.classes_per_client < 1:
            raise DataError(f"data.classes_per_client = {self.classes_per_client}: must be at least 1")
        if self.severity is not None and self.corruption is None:
            raise DataError('data.severity requires data.corruption, such as "mixed"')
        return self


class DigitsConfig(PartitionConfig):
    """1797 handwritten digits of 8x8 pixels that come with scikit-learn."""

    source: Literal["digits"] = Field(default="digits", description="Name of the source.")


class MnistConfig(PartitionConfig):
    """MNIST: 70000 handwritten digits of 28x28 pixels."""

    source: Literal["mnist"] = Field(default="mnist", description="Name of the source.")
    use: Literal["all", "train", "test"] = Field(default="all", description="Which canonical part is pooled and dealt.")


class FashionMnistConfig(PartitionConfig):
    """Fashion-MNIST: 70000 pieces of clothing of 28x28 pixels."""

    source: Literal["fashion-mnist"] = Field(default="fashion-mnist", description="Name of the source.")
    use: Literal["all", "train", "test"] = Field(default="all", description="Which canonical part is pooled and dealt.")


class Cifar10Config(PartitionConfig):
    """CIFAR-10: 60000 colour photographs of 32x32 pixels."""

    source: Literal["cifar10"] = Field(default="cifar10", description="Name of the source.")
    use: Literal["all", "train", "test"] = Field(default="all", description="Which canonical part is pooled and dealt.")


class Cifar100Config(PartitionConfig):
    """CIFAR-100: colour photographs of 32x32 pixels, 100 classes in 20 superclasses."""

    source: Literal["cifar100"] = Field(default="cifar100", description="Name of the source.")
    use: Literal["all", "train", "test"] = Field(default="all", description="Which canonical part is pooled and dealt.")
    members: int = Field(
        default=0,
        ge=0,
        le=5,
        description="Superclass shift: classes of each superclass per client, labels are superclasses; 0: partition.",
    )

    @model_validator(mode="after")
    def _check_members(self) -> Cifar100Config:
        if self.members and (self.permuted or self.corruption is not None):
            raise DataError("data.members: not with data.permuted or data.corruption, which are other shifts")
        return self


class MiniImageNetConfig(PartitionConfig):
    """Mini-ImageNet: photographs of 100 classes as thumbnails of 32x32 pixels."""

    source: Literal["mini-imagenet"] = Field(default="mini-imagenet", description="Name of the source.")
    use: Literal["all", "train", "test"] = Field(default="all", description="Which part of the file is pooled.")
    clients: int = Field(default=20, description="Number of clients the samples are dealt to.")
    partition: Literal["iid", "dirichlet", "classes", "quantity"] = Field(
        default="classes",
        description="How samples are dealt: equally, by label proportions, by whole classes, or in unequal amounts.",
    )
    classes_per_client: int = Field(
        default=10, description='Distinct classes of each client under partition "classes".'
    )


class PacsConfig(SplitConfig):
    """PACS: seven classes as paintings, cartoons, photographs and sketches, thumbnails of 32x32 pixels."""

    source: Literal["pacs"] = Field(default="pacs", description="Name of the source.")


class MixedShiftsConfig(SplitConfig):
    """Clients that differ in labels, inputs, classes or amounts, in two of these, or not at all."""

    source: Literal["mixed-shifts"] = Field(default="mixed-shifts", description="Name of the source.")
    images: Literal["digits", "fashion-mnist", "cifar10"] = Field(
        default="fashion-mnist", description="Which images are dealt."
    )
    use: Literal["all", "train", "test"] = Field(default="all", description="Which canonical part is dealt.")
    clients: int = Field(default=28, ge=1, description="Number of clients; of the seven kinds in turn.")
    samples: int = Field(default=400, ge=20, description="Images of a client, for training, validation and testing.")
    few: float = Field(
        default=0.15, gt=0, le=1, description='Fraction of its training and validation images that a "few" client has.'
    )
    alpha: float = Field(default=0.1, gt=0, description='Concentration of the classes of a "classes" client.')
    val: float = Field(default=0.15, description="Fraction of each client's samples used to select models.")


class QmnistConfig(SplitConfig):
    """MNIST images grouped by the person who wrote them."""

    source: Literal["qmnist"] = Field(default="qmnist", description="Name of the source.")
    use: Literal["all", "train", "test"] = Field(default="all", description="Which canonical part is pooled.")
    clients: int = Field(default=50, ge=1, description="Number of writers, picked by the seed.")
    min_samples: int = Field(default=50, ge=1, description="Minimum images per writer.")


class HeartDiseaseConfig(SplitConfig):
    """Heart disease at four hospitals: present or absent."""

    source: Literal["heart-disease"] = Field(default="heart-disease", description="Name of the source.")
    standardise: Literal["client", "pooled", "none"] = Field(default="pooled", description=STANDARDISE)


class SchoolConfig(SplitConfig):
    """School: exam scores of pupils in 139 schools."""

    source: Literal["school"] = Field(default="school", description="Name of the source.")
    test: float = Field(default=0.15, description="Fraction of each client's samples kept for the final test.")
    val: float = Field(default=0.15, description="Fraction of each client's samples used to select models.")
    standardise: Literal["client", "pooled", "none"] = Field(default="client", description=STANDARDISE)


class Clinc150Config(SplitConfig):
    """CLINC150: short requests to an assistant, 150 intents in 10 domains."""

    source: Literal["clinc150"] = Field(default="clinc150", description="Name of the source.")
    clients: int = Field(default=10, ge=1, description='Number of clients; 10 for "domain".')
    partition: Literal["domain", "domains", "intents"] = Field(
        default="domain", description="A domain each; or Dirichlet proportions of domains, or of intents."
    )
    alpha: float = Field(default=0.5, gt=0, description="Concentration of the Dirichlet draws; smaller is more skewed.")
    length: int = Field(
        default=16, ge=2, description="Tokens of a sentence: longer ones are cut, shorter padded with 0."
    )
    tokenizer: Path | None = Field(
        default=None, description="A tokenizer.json of the model's; without one, words by their hash."
    )
    vocabulary: int = Field(default=8192, ge=2, description="Number of hashes, without a tokenizer.")


class PolynomialConfig(SourceConfig):
    """Regression on cubic polynomials that differ between clients in one to three coefficients."""

    source: Literal["polynomial"] = Field(default="polynomial", description="Name of the source.")
    layout: Literal["iid", "sorted"] = Field(
        default="iid",
        description='"iid": every client draws x from U(0,1), equal sizes; '
        '"sorted": each owns an interval of x, unequal sizes.',
    )
    setting: Literal[1, 2, 3] = Field(default=1, description="Number of coefficients, from the highest, that differ.")
    clients: int = Field(default=10, ge=1, description="Number of clients.")
    samples: int = Field(default=1000, ge=1, description="Number of samples of all clients together.")
    noise: float = Field(default=0.1, ge=0, description="Standard deviation of the noise on training targets.")
    drawn: int | None = Field(
        default=None,
        ge=0,
        description="Seed of x, sizes and shifts if it is not the run's, which then draws the noise only; "
        '42 with layout "sorted" is the Learn2pFed paper\'s.',
    )
    evaluate: Literal["in-sample", "fresh"] = Field(
        default="in-sample",
        description='Test at the training x or, with layout "iid", at fresh x; targets without noise.',
    )

    @model_validator(mode="after")
    def _check_evaluate(self) -> PolynomialConfig:
        if self.layout == "sorted" and self.evaluate == "fresh":
            raise DataError(
                'data.evaluate = "fresh" with data.layout = "sorted" would test outside every client\'s interval; '
                'use evaluate = "in-sample" or layout = "iid"'
            )
        return self


class ElectricityConfig(SourceConfig):
    """Hourly loads of electricity meters: forecast the next hour."""

    source: Literal["electricity"] = Field(default="electricity", description="Name of the source.")
    window: int = Field(default=3, ge=1, description="Hours of history that a forecast sees.")
    clients: int = Field(default=0, ge=0, description="Number of meters, the most distinct ones; 0: all.")
    test: float = Field(
        default=0.1, gt=0, lt=0.5, description="Fraction of the hours, the last ones, held out for the test."
    )
    val: float = Field(default=0.1, ge=0, lt=0.5, description="Fraction of the rest, its last hours, to select models.")
    scale: Literal["standard", "unit"] = Field(
        default="standard",
        description='Scaling by each meter\'s training hours: to mean 0 and deviation 1; or "unit", to 0..1.',
    )
    distinct: Literal["profile", "tsne"] = Field(
        default="profile",
        description='How to find the most distinct: by daily profiles; or "tsne", by places in a plane (paper).',
    )


class ShakespeareConfig(SplitConfig):
    """Shakespeare's plays: every role is a client that predicts the next character of its lines."""

    source: Literal["shakespeare"] = Field(default="shakespeare", description="Name of the source.")
    clients: int = Field(default=100, ge=1, description="Number of roles, picked by the seed.")
    min_characters: int = Field(default=2000, gt=80, description="Minimum characters spoken by a role.")
    stride: int = Field(default=8, ge=1, description="Characters from one window of 80 to the next.")


class DuwMnistConfig(SourceConfig):
    """MNIST, distributed as in the DUW paper; the test set is class-balanced."""

    source: Literal["duw-mnist"] = Field(default="duw-mnist", description="Name of the source.")
    environment: Literal["I", "II", "III", "IV", "two"] = Field(
        default="II", description="Image lists: an environment of five clients, or the two clients of Figure 2."
    )
    val: float = Field(default=0.0, ge=0, lt=1, description="Fraction of each client's samples used to select models.")
    max_train: int | None = Field(default=None, ge=1, description="Maximum training samples per client.")


class StanfordDogsConfig(SourceConfig):
    """Features of 120 dog breeds, distributed like the DUW paper's five clients; the test set is class-balanced."""

    source: Literal["stanford-dogs"] = Field(default="stanford-dogs", description="Name of the source.")
    val: float = Field(default=0.0, ge=0, lt=1, description="Fraction of each client's samples used to select models.")
    max_train: int | None = Field(default=None, ge=1, description="Maximum training samples per client.")
    components: int = Field(
        default=0, ge=0, le=1280, description="Features projected onto so many principal axes; 0: all 1280 as they are."
    )


class FolderConfig(SplitConfig):
    """A folder with one CSV or Parquet file per client, or one such file with a column that names the client."""

    source: Literal["folder"] = Field(default="folder", description="Name of the source.")
    path: Path = Field(description="Folder with one .csv, .tsv, .csv.gz, .tsv.gz or .parquet file per client.")
    target: str = Field(description="Column to predict.")
    client_column: str | None = Field(
        default=None, description="Column that names the client, if path is one file that holds all of them."
    )
    task: Literal["auto", "classification", "regression", "count"] = Field(
        default="auto",
        description="What is predicted: a class, a number, a count (Poisson), or what the target column looks like.",
    )
    target_scale: Literal["plain", "log"] = Field(
        default="plain",
        description="log: fit the logarithm of a positive number; predictions are medians, in its units.",
    )
    ignore: tuple[str, ...] = Field(default=(), description="Columns to leave out.")
    without: tuple[str, ...] = Field(default=(), description="Sites to leave out; fedtailor leave sets it.")
    categorical: tuple[str, ...] = Field(
        default=(), description="Columns to treat as categories even if they are numbers."
    )
    missing: Literal["median", "error"] = Field(
        default="median", description="Fill missing numbers with the client's training median, or stop."
    )
    standardise: Literal["client", "pooled", "none"] = Field(default="pooled", description=STANDARDISE)
    standardise_target: bool = Field(
        default=True, description="Standardise a regression target over all training rows."
    )


class ImageFolderConfig(SplitConfig):
    """Images in a folder client/class/image, or in a CSV of paths."""

    source: Literal["image-folder"] = Field(default="image-folder", description="Name of the source.")
    path: Path = Field(description="Folder client/class/image; or a CSV with the columns client, label and path.")
    size: int = Field(default=32, ge=1, le=4096, description="Height and width that images are scaled to.")
    colours: Literal["rgb", "grey"] = Field(default="rgb", description="Three channels, or one.")


class EyesConfig(SplitConfig):
    """Retinal vessels at four clinics with their cameras and annotators: DRIVE, STARE, CHASE_DB1 and HRF."""

    source: Literal["eyes"] = Field(default="eyes", description="Name of the source.")
    pooled: bool = Field(
        default=False, description="All training images at the first clinic: a reference, which is no federation."
    )


class ImageMasksConfig(SplitConfig):
    """Images with masks in a folder site/images, site/masks: PNG and the like, .npz, or NIfTI."""

    source: Literal["image-masks"] = Field(default="image-masks", description="Name of the source.")
    path: Path = Field(description="Folder SITE/images/NAME.png and SITE/masks/NAME.png.")
    size: int = Field(default=0, ge=0, le=4096, description="Height and width that PNG images are scaled to; 0: as is.")
    colours: Literal["rgb", "grey"] = Field(default="rgb", description="Three channels, or one.")
    standardise: bool = Field(default=False, description="Scale each image to mean 0 and deviation 1.")
    subject: str = Field(
        default="",
        description="Regular expression: what it finds in a file's name is the person, whose images stay in one split.",
    )
    classes: tuple[str, ...] = Field(default=(), description="Names of the classes, 0 first; none: they are numbered.")


class TextConfig(SplitConfig):
    """Sentences with labels in tables: one file per client, or one file with a column that names the client."""

    source: Literal["text"] = Field(default="text", description="Name of the source.")
    path: Path = Field(description="Folder with one CSV or Parquet file per client, or one such file.")
    text: str = Field(default="text", description="Column of the sentences.")
    target: str = Field(default="label", description="Column to predict.")
    client_column: str | None = Field(
        default=None, description="Column that names the client, if path is one file that holds all of them."
    )
    length: int = Field(
        default=64, ge=2, description="Tokens of a sentence: longer ones are cut, shorter padded with 0."
    )
    tokenizer: Path | None = Field(
        default=None, description="A tokenizer.json of the model's; without one, words by their hash."
    )
    vocabulary: int = Field(default=8192, ge=2, description="Number of hashes, without a tokenizer.")


class PFLlibConfig(SourceConfig):
    """A folder that PFLlib's generate scripts wrote: train/0.npz, test/0.npz, one pair per client."""

    source: Literal["pfllib"] = Field(default="pfllib", description="Name of the source.")
    path: Path = Field(description="Folder with PFLlib's train and test folders.")
    val: float = Field(default=0.1, ge=0, lt=1, description="Fraction of its training data used to select models.")
    max_train: int | None = Field(default=None, ge=1, description="Maximum training samples per client.")


class SavedConfig(SourceConfig):
    """A federation's data that a program created, split and saved."""

    source: Literal["saved"] = Field(default="saved", description="Name of the source.")
    path: Path = Field(description="Folder that ft.run wrote, such as data in a run folder.")


class OwnConfig(SourceConfig):
    """Data from a function of the user's; further keys are its options."""

    model_config = ConfigDict(frozen=True, extra="allow")

    source: Literal["own"] = Field(default="own", description="Name of the source.")
    load: str = Field(description='Function load(seed, **options) that returns FederatedData: "package.module:load".')

    @field_validator("load")
    @classmethod
    def _check_load(cls, value: str) -> str:
        if ":" not in value:
            raise ValueError('must be "package.module:function"')
        return value


class SitesConfig(SourceConfig):
    """Data that stays at the sites of a federation; each site describes its own in its site.toml."""

    source: Literal["sites"] = Field(default="sites", description="Name of the source.")


DataConfig = Annotated[
    DigitsConfig
    | MnistConfig
    | FashionMnistConfig
    | Cifar10Config
    | Cifar100Config
    | MiniImageNetConfig
    | PacsConfig
    | MixedShiftsConfig
    | QmnistConfig
    | HeartDiseaseConfig
    | SchoolConfig
    | Clinc150Config
    | EyesConfig
    | PolynomialConfig
    | ElectricityConfig
    | ShakespeareConfig
    | DuwMnistConfig
    | StanfordDogsConfig
    | FolderConfig
    | ImageFolderConfig
    | ImageMasksConfig
    | TextConfig
    | PFLlibConfig
    | SavedConfig
    | OwnConfig
    | SitesConfig,
    Field(discriminator="source"),
]
