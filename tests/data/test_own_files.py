"""Images in folders or listed in a CSV, and sentences in tables: read as they are, and errors that name the file."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from zlib import crc32

import pytest
import torch

from fedtailor.data import load
from fedtailor.data.configs import ImageFolderConfig, TextConfig
from fedtailor.data.fingerprint import digest
from fedtailor.data.sources.image_folder import read_pixels
from fedtailor.errors import DataError

SHADES = {"dark": 40, "light": 200}


def images(root: Path, clients: tuple[str, ...] = ("east", "west"), each: int = 4) -> Path:
    """Squares of one shade, that of client, class and number."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra images")
    for c, client in enumerate(clients):
        for label, shade in SHADES.items():
            folder = root / client / label
            folder.mkdir(parents=True)
            for i in range(each):
                image.new("RGB", (6 + i, 4), (shade, shade + c, shade + i)).save(folder / f"{i}.png")
    return root


def test_a_folder_of_clients_classes_and_images(tmp_path: Path) -> None:
    root = images(tmp_path / "photos")
    (root / "east" / "dark" / "notes.txt").write_text("not an image")
    (root / ".cache").mkdir()
    data = load(ImageFolderConfig(path=root, size=8, val=0.25), seed=0)
    assert (data.name, data.clients, data.classes, data.shape) == (
        "photos",
        ("east", "west"),
        ("dark", "light"),
        (3, 8, 8),
    )
    assert [int(getattr(data, s).sizes.sum()) for s in ("train", "val", "test")] == [8, 4, 4]
    for client in range(2):
        x, y = data.train.of(client)
        pixels = ((x * 0.5 + 0.5) * 255).round()
        assert bool((pixels == pixels[..., :1, :1]).all())  # of one shade still
        assert pixels[:, 0, 0, 0].tolist() == [[40, 200][label] for label in y.tolist()]
        assert bool((pixels[:, 1, 0, 0] == pixels[:, 0, 0, 0] + client).all())


def test_a_list_of_paths_is_the_same_data(tmp_path: Path) -> None:
    root = images(tmp_path / "photos")
    with (tmp_path / "photos.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "client", "label", "taken"])
        for path in sorted(root.rglob("*.png")):
            rows.writerow([path.relative_to(tmp_path), path.parts[-3], path.parts[-2], "today"])
    listed = load(ImageFolderConfig(path=tmp_path / "photos.csv", colours="grey"), seed=0)
    folder = load(ImageFolderConfig(path=root, colours="grey"), seed=0)
    assert listed.shape == (1, 32, 32)
    assert torch.equal(listed.train.x, folder.train.x)
    assert torch.equal(listed.test.y, folder.test.y)


def test_a_photograph_taken_sideways_is_upright(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra images")
    root = images(tmp_path / "photos")
    held = image.new("L", (8, 8), 0)
    held.paste(255, (0, 0, 8, 4))  # the upper half is white
    turned = image.Exif()
    turned[0x0112] = 3  # upside down
    held.save(root / "east" / "dark" / "9.png", exif=turned)
    found = read_pixels(root / "east" / "dark" / "9.png", ImageFolderConfig(path=root, size=8, colours="grey"))
    assert found[0, :4].max() == 0
    assert found[0, 4:].min() == 255


def test_a_changed_image_is_noticed(tmp_path: Path) -> None:
    config = ImageFolderConfig(path=images(tmp_path / "photos"))
    before = digest(config)
    assert digest(config) == before
    one, other = (tmp_path / "photos" / "east" / label / "0.png" for label in SHADES)
    one.write_bytes(other.read_bytes())
    assert digest(config) != before


def test_images_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    root = images(tmp_path / "photos")
    with pytest.raises(DataError, match="client/class/image"):
        load(ImageFolderConfig(path=tmp_path / "nowhere"), seed=0)
    with pytest.raises(DataError, match=r"east.*client/class/image"):
        load(ImageFolderConfig(path=root / "east"), seed=0)
    (root / "east" / "dark" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n nonsense")
    with pytest.raises(DataError, match=r"broken\.png"):
        load(ImageFolderConfig(path=root), seed=0)
    (tmp_path / "list.csv").write_text("client,label,path\neast,dark,gone.png\neast,light,gone.png\n")
    with pytest.raises(DataError, match=r"gone\.png: no such image"):
        load(ImageFolderConfig(path=tmp_path / "list.csv"), seed=0)
    (tmp_path / "list.csv").write_text("client,class,path\neast,dark,gone.png\n")
    with pytest.raises(DataError, match=r'list\.csv: no column "label"'):
        load(ImageFolderConfig(path=tmp_path / "list.csv"), seed=0)
    with pytest.raises(DataError, match='all images are of the class "only"'):
        load(ImageFolderConfig(path=single_class(tmp_path / "one")), seed=0)


def single_class(root: Path) -> Path:
    source = images(root / "all")
    (root / "some" / "east").mkdir(parents=True)
    (source / "east" / "dark").rename(root / "some" / "east" / "only")
    return root / "some"


def sentences(root: Path) -> Path:
    """A file for each of two shops."""
    root.mkdir()
    for shop in ("north", "south"):
        lines = [f"{'good' if i % 2 else 'bad'} tea at {shop} {i},{'like' if i % 2 else 'hate'}" for i in range(10)]
        (root / f"{shop}.csv").write_text("review,verdict\n" + "\n".join(lines) + "\n")
    return root


def test_sentences_are_rows_of_hashed_words(tmp_path: Path) -> None:
    config = TextConfig(path=sentences(tmp_path / "shops"), text="review", target="verdict", length=6, vocabulary=100)
    data = load(config, seed=0)
    assert (data.clients, data.classes) == (("north", "south"), ("hate", "like"))
    x, y = data.train.of(1)
    words = [1 + crc32(w.encode()) % 99 for w in ("bad", "good", "tea", "at", "south")]
    assert x[:, 0].tolist() == [words[label] for label in y.tolist()]
    assert x[0, 1:4].tolist() == words[2:]
    assert bool((x[:, 5] == 0).all())  # five words, then padding


def test_one_file_with_a_column_for_the_client(tmp_path: Path) -> None:
    folder = sentences(tmp_path / "shops")
    rows = ["shop;review;verdict"]
    for file in sorted(folder.iterdir()):
        rows += [f"{file.stem};" + ";".join(line.rsplit(",", 1)) for line in file.read_text().splitlines()[1:]]
    (tmp_path / "all.csv").write_text("\n".join(rows) + "\n")
    config = TextConfig(path=folder, text="review", target="verdict")
    many = load(config, seed=3)
    one = load(config.model_copy(update={"path": tmp_path / "all.csv", "client_column": "shop"}), seed=3)
    assert torch.equal(one.train.x, many.train.x)
    assert torch.equal(one.test.y, many.test.y)


def test_the_tokenizer_of_a_model_reads_the_sentences(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 1, "good": 2, "bad": 3, "tea": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    path = sentences(tmp_path / "shops")
    config = TextConfig(path=path, text="review", target="verdict", length=4, tokenizer=tmp_path / "tokenizer.json")
    x, y = load(config, seed=0).train.of(0)
    assert x.tolist() == [[3 - label, 4, 1, 1] for label in y.tolist()]


def test_sentences_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    path = sentences(tmp_path / "shops")
    with pytest.raises(DataError, match=r'north\.csv.*"revew".*"review"'):
        load(TextConfig(path=path, text="revew", target="verdict"), seed=0)
    with pytest.raises(DataError, match=r"data\.client_column"):
        load(TextConfig(path=path / "north.csv", text="review", target="verdict"), seed=0)
    (path / "north.csv").write_text("review,verdict\nfine,like\n,hate\n")
    with pytest.raises(DataError, match=r'north\.csv.*\b2\b.*"review"'):
        load(TextConfig(path=path, text="review", target="verdict"), seed=0)
    (tmp_path / "bad.json").write_text(json.dumps({"no": "tokenizer"}))
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError, match=r"data\.tokenizer.*bad\.json"):
        load(
            TextConfig(
                path=sentences(tmp_path / "again"), text="review", target="verdict", tokenizer=tmp_path / "bad.json"
            ),
            seed=0,
        )
