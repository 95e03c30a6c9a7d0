"""Every parser of bytes that others may have written, with good inputs to start from: for tests and tools/fuzz.py.

`feed` takes any bytes. It returns, or raises what is a mistake of ours: an error that is not for people, or, under
`limited`, one for want of memory.
"""

from __future__ import annotations

import gzip
import io
import json
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import torch

from fedtailor.cli.folder_commands import print_folder
from fedtailor.core import codec
from fedtailor.core.trees import Ragged
from fedtailor.data.files import read_idx, read_npz
from fedtailor.data.pickled_arrays import read_dict
from fedtailor.data.tabular.read import read_table
from fedtailor.errors import UserError
from fedtailor.experiments import runner
from fedtailor.experiments.config import CompareConfig, parse, read_toml
from fedtailor.experiments.store import ABOUT, CONFIG, METRICS, RESULTS, RunFolder, write_json
from fedtailor.flare.protocol import ENVELOPE
from fedtailor.flare.site import AUDIT, SERVER, read_site
from fedtailor.serving.export import export, read_safetensors
from tests.flare.test_site import SESSION, Asked
from tests.small import config

LIMIT = 100 * 2**20  # bytes that an input of a kilobyte may make us ask for
SEEDS = Path(__file__).parent / "seeds"  # inputs that once were too much


@dataclass(frozen=True)
class Parser:
    seeds: list[bytes]
    feed: Callable[[bytes], object]


@contextmanager
def limited(more: int = LIMIT) -> Iterator[None]:
    """No more memory than there is now and this: asking for it fails, whether it would be used or not."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _file(path: Path, read: Callable[[Path], object], *seeds: bytes) -> Parser:
    def feed(content: bytes) -> None:
        path.write_bytes(content)
        with suppress(UserError):
            read(path)

    return Parser(list(seeds), feed)


def _codec(folder: Path) -> Parser:
    tree = {"w": _tensor(3, 2), "deep": ({"b": _tensor(2)}, None), "few": Ragged((_tensor(9), _tensor(1).long()[0]))}

    def feed(content: bytes) -> None:
        with suppress(codec.BrokenMessage):
            codec.decode_header(content)
            codec.decode(content)

    return Parser([codec.encode({"op": "begin", "round": 1}, tree), codec.encode({}, None)], feed)


def _tensor(*shape: int) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).reshape(shape)


def _requests(folder: Path) -> Parser:
    asked = Asked(folder, budget={"requests_per_minute": 10**9, "calls_per_round": 10**9, "min_rows": 1})
    assert "error" not in asked.start()
    assert "error" not in asked.begin(1, 0)
    model, body = asked.experiment.model, asked.experiment.model.body
    evaluate = {"op": "evaluate", "round": 1, "splits": ["val"], "keep": ""}
    term = {"call": 0, "paths": ["w"], "weight": None}
    seeds = [
        codec.encode(asked.request(), (body,)),
        codec.encode(evaluate, asked.experiment.algorithm.server_init(model)),
        codec.encode({"op": "begin", "round": 2, "kept": 0, "needed": [0]}, None),
        codec.encode({"op": "restore", "kept": 0}, None),
        codec.encode({"op": "keep", "round": 1}, None),
        codec.encode({"round": 1, "call": 0}, (body,)),
        codec.encode({"round": 1, "sum": 0, "step": "keys", "term": term}, None),
    ]

    def feed(content: bytes) -> None:
        asked.number += 1
        reply = asked.site.answer(SERVER, ENVELOPE.pack(SESSION, asked.number) + content)
        answer = codec.decode_header(reply)
        wrong = "MemoryError" in str(answer) or "can't allocate" in (asked.folder / AUDIT).read_text()
        (asked.folder / AUDIT).write_text("")
        if wrong:
            raise MemoryError(answer)

    return Parser(seeds, feed)


NAMES = (CONFIG, ABOUT, METRICS, RESULTS, "checkpoint/manifest.json", "personal/last/index.json")


def _runs(folder: Path) -> Parser:
    """The first byte says which file of a run the rest is, and whether it is given a checksum that fits."""
    made = runner.start(config("rounds=1", "data.clients=2"), folder / "run").path
    whole = {name: (made / name).read_bytes() for name in NAMES}
    contents = {n: json.dumps(json.loads(whole[n])["content"]).encode() for n in NAMES if n.endswith(".json")}

    def feed(content: bytes) -> None:
        if not content:
            return
        name, fits = NAMES[content[0] % len(NAMES)], content[0] >= 128
        (made / name).write_bytes(content[1:])
        try:
            with suppress(ValueError, RecursionError):
                if fits and name in contents:
                    write_json(made / name, json.loads(content[1:]))
            for use in (_loaded, _shown):
                with suppress(UserError):
                    use(made)
        finally:
            (made / name).write_bytes(whole[name])

    plain = [bytes([i]) + whole[name] for i, name in enumerate(NAMES)]
    fits = [128 + (i - 128) % len(NAMES) for i in range(len(NAMES))]  # first bytes of those with a checksum
    fitting = [bytes([fits[i]]) + contents[n] for i, n in enumerate(NAMES) if n in contents]
    return Parser(plain + fitting, feed)


def _loaded(path: Path) -> None:
    run = RunFolder.open(path)
    clients = run.about["clients"]
    _ = run.config, run.results, run.metrics(), run.load_checkpoint(), run.personal(clients[0], "last")


def _shown(path: Path) -> None:
    with redirect_stdout(io.StringIO()):
        print_folder(path, True)


def _exported(folder: Path) -> Parser:
    made = runner.start(config("rounds=1", "data.clients=2"), folder / "run")
    (file, *_) = export(made.path, made.about["clients"][0], "safetensors", folder / "model.safetensors")
    return _file(folder / "given.safetensors", read_safetensors, file.read_bytes())


def _tables(folder: Path) -> Parser:
    text = b'a,"b ""c""",when\n1,x,2024-01-02\n2.5,,2024-01-03\n"3\n",y,\n'
    return _file(
        folder / "t.csv", read_table, text, b"a;b\n1,5;x\n2,5;y\n", "\ufeffa\tb\r\n1\t2\r\n3\t4\r\n".encode("utf-16")
    )


def _zipped(folder: Path) -> Parser:
    return _file(folder / "t.csv.gz", read_table, gzip.compress(b"a,b\n1,2\n3,4\n"), gzip.compress(b"0" * 10**5))


def _parquet(folder: Path) -> Parser:
    held = io.BytesIO()
    pl.DataFrame({"a": [1, 2], "b": ["x", None]}).write_parquet(held)
    return _file(folder / "t.parquet", read_table, held.getvalue())


def _idx(folder: Path) -> Parser:
    images = b"\0\0\x08\x03" + struct.pack(">III", 2, 3, 3) + bytes(18)
    packed, plain = folder / "images.gz", folder / "images"

    def feed(content: bytes) -> None:
        packed.write_bytes(content)
        plain.write_bytes(content)
        for path in (packed, plain):
            with suppress(UserError):
                read_idx(path, 3)

    return Parser([images, gzip.compress(images)], feed)


def _npz(folder: Path) -> Parser:
    held, packed = io.BytesIO(), io.BytesIO()
    np.savez(held, x=np.zeros((2, 3)), y=np.arange(2))
    np.savez_compressed(packed, x=np.zeros((2, 3), np.uint8), y=np.arange(2))
    return _file(folder / "a.npz", lambda path: read_npz(path, ("x", "y")), held.getvalue(), packed.getvalue())


def _pickled(folder: Path) -> Parser:
    held = io.BytesIO()
    np.savez_compressed(held, data=np.array({"x": np.zeros((2, 3), np.float32), "y": np.arange(2)}, dtype=object))
    return _file(folder / "0.npz", read_dict, held.getvalue())


def _configs(folder: Path) -> Parser:
    data, method = b'rounds = 2\n[data]\nsource = "digits"\n', b'[algorithm]\nname = "fedrep"\n'
    text = data + b"[model]\nhidden = [8]\n" + method + b"[compare]\nseeds = [0]\n"
    return _file(folder / "c.toml", lambda path: parse(read_toml(path), CompareConfig, str(path)), text)


def _site_files(folder: Path) -> Parser:
    data = b'[data]\npath = "d.csv"\ntarget = "y"\nclasses = ["a"]\nnumeric = ["x"]\n'
    text = data + b'[policy]\nalgorithms = ["fedavg"]\nsends = ["model"]\n'
    return _file(folder / "site.toml", read_site, text)


PARSERS: dict[str, Callable[[Path], Parser]] = {
    "codec": _codec,
    "requests": _requests,
    "runs": _runs,
    "tables": _tables,
    "idx": _idx,
    "npz": _npz,
    "zipped-tables": _zipped,
    "parquet": _parquet,
    "exported": _exported,
    "pickled-arrays": _pickled,
    "configs": _configs,
    "site-files": _site_files,
}


def fresh(name: str, folder: Path) -> Parser:
    """A parser, in a folder of its own."""
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / name).mkdir(parents=True)
    return PARSERS[name](folder / name)
