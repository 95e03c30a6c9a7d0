"""Where data sets are on disk, and how they are fetched: verified by checksum, complete or not at all."""

from __future__ import annotations

import hashlib
import os
import tarfile
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError

from fedtailor.data.files import expand_home
from fedtailor.errors import DataError, nearest

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in total where known


_CHUNK = 1 << 20


_TIMEOUT = 60  # seconds without a byte


@dataclass(frozen=True)
class RemoteFile:
    """A file to download into `folder`, with its checksum as `md5:...` or `sha256:...`."""

    url: str
    folder: str
    checksum: str
    unpacks_to: tuple[str, ...] = ()  # members of a .tar.gz to keep instead of the archive

    @property
    def file(self) -> str:
        return self.url.rsplit("/", 1)[1]


def _idx_files(base: str, folder: str, sums: dict[str, str]) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(base + file, folder, "md5:" + md5) for file, md5 in sums.items())


# the md5 sums are those torchvision publishes for the same files
_MNIST = _idx_files(
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "MNIST/raw",
    {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
)


_HEART = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"


REMOTES: dict[str, tuple[RemoteFile, ...]] = {
    "mnist": _MNIST,
    "fashion-mnist": _idx_files(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "FashionMNIST/raw",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "cifar10": (
        RemoteFile(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "cifar-10-batches-bin",
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
            (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
        ),
    ),
    "qmnist": (
        *_MNIST,
        *_idx_files(
            "https://raw.githubusercontent.com/facebookresearch/qmnist/master/",
            "QMNIST/raw",
            {
                "qmnist-train-labels-idx2-int.gz": "0058f8dd561b90ffdd0f734c6a30e5e4",
                "qmnist-test-labels-idx2-int.gz": "5b5b05890a5e13444e108efe57b788aa",
            },
        ),
    ),
    "heart-disease": tuple(
        RemoteFile(f"{_HEART}processed.{hospital}.data", "heart_disease", "sha256:" + sha256)
        for hospital, sha256 in {
            "cleveland": "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
            "hungarian": "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
            "switzerland": "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
            "va": "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
        }.items()
    ),
}


def fetch(
    name: str, root: Path | None = None, base_url: str | None = None, progress: Progress | None = None
) -> list[Path]:
    """Download the files of a data set that are not there yet; `base_url` replaces the official address."""
    if name not in REMOTES:
        raise DataError(f'nothing to download for "{name}"; {nearest(name, REMOTES)}')
    return [path for remote in REMOTES[name] for path in _fetch(remote, data_root(root), base_url, progress)]


def _fetch(remote: RemoteFile, root: Path, base_url: str | None, progress: Progress | None) -> list[Path]:
    folder = root / remote.folder
    wanted = [folder / file for file in remote.unpacks_to or (remote.file,)]
    archive = bool(remote.unpacks_to)
    if all(path.is_file() and (archive or _checksum(path, remote.checksum) == remote.checksum) for path in wanted):
        return wanted
    url = remote.url if base_url is None else f"{base_url.rstrip('/')}/{remote.file}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _temporary(folder / remote.file) as part:
            _stream(url, part, remote.file, progress)
            checksum = _checksum(part, remote.checksum)
            if checksum != remote.checksum:
                raise DataError(
                    f"{remote.file}: wrong checksum, expected {remote.checksum}, found {checksum}; try again later "
                    f"(from {url})"
                )
            if archive:
                _unpack(part, remote)
            else:
                os.replace(part, wanted[0])
    except (OSError, HTTPException) as e:
        if isinstance(e, HTTPError):
            e.close()  # it holds the connection
        raise DataError(f"{remote.file}: cannot be fetched from {url} to {folder} ({e}); nothing was changed") from e
    return wanted


def _stream(url: str, part: Path, file: str, progress: Progress | None) -> None:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise DataError(f"{url}: not an http or https address")
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as response, part.open("xb") as out:
        length = response.headers.get("Content-Length")
        total = int(length) if length is not None and length.isdecimal() else None
        done = 0
        while chunk := response.read(_CHUNK):
            out.write(chunk)
            done += len(chunk)
            if progress is not None:
                progress(file, done, total)
    if total is not None and done != total:
        raise DataError(f"{file}: the connection ended after {done} of {total} bytes (from {url}); try again")


def _unpack(archive: Path, remote: RemoteFile) -> None:
    """Copy out the known members one by one; names inside the archive never become paths."""
    folder = archive.parent
    members = {f"{remote.folder}/{file}": folder / file for file in remote.unpacks_to}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for info in tar:
                target = members.get(info.name)
                content = tar.extractfile(info) if target is not None and info.isreg() else None
                if target is None or content is None:
                    continue
                with _temporary(target) as part:
                    with part.open("xb") as out:
                        while chunk := content.read(_CHUNK):
                            out.write(chunk)
                    os.replace(part, target)
                del members[info.name]
    except (tarfile.TarError, EOFError) as e:
        raise DataError(f"{remote.file}: cannot be unpacked ({e})") from e
    if members:
        raise DataError(f"{remote.file}: does not contain {', '.join(members)}")


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A path beside the target, so that renaming is atomic; removed in any case."""
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def _checksum(path: Path, like: str) -> str:
    kind = like.split(":", 1)[0]
    with path.open("rb") as f:
        return f"{kind}:{hashlib.file_digest(f, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()}"


def data_root(root: Path | None = None) -> Path:
    """The folder that holds data sets: as given, else FEDTAILOR_DATA, else the user's cache."""
    if root is not None:
        return root
    if os.environ.get("FEDTAILOR_DATA"):
        return expand_home(os.environ["FEDTAILOR_DATA"])
    return Path.home() / ".cache" / "fedtailor"


def locate(root: Path, relative: str, source: str) -> Path:
    """Path of a file of a data set; a `.gz` file may also be unpacked."""
    path = root / relative
    for candidate in (path, path.with_suffix("") if path.suffix == ".gz" else path):
        if candidate.is_file():
            return candidate
    fetch = f'run "fedtailor download {source}" or ' if source in REMOTES else ""
    why = "" if fetch else "; there is no address to download it from"
    raise DataError(
        f"{path}: not found; {fetch}set FEDTAILOR_DATA to the folder that holds {Path(relative).parts[0]}{why}"
    )
