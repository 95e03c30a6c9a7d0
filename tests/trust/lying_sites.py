"""What one site of a federation may say, in any order: the plans of `lying.py --site`, and what must hold in each.

A plan is a list of lies. Each is told from the n-th answer of one kind on, once or always: another header or tree,
other bytes, an answer of before, none at all; or rows that nobody has, which the site then computes with honestly.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from fedtailor import data as sources
from fedtailor.core import codec
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.trees import Tree, tree_map
from fedtailor.data.sources.site_data import write_prepared
from fedtailor.errors import RunError
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.store import RunFolder
from fedtailor.flare import server as flare
from fedtailor.flare.protocol import ENVELOPE, PING
from tests.flare.sites import Sites, tensors, write_sites
from tests.flare.test_flare import configured
from tests.small import config

Header = dict[str, Any]
Plan = list[tuple[Any, ...]]
LIAR = "client-01"
BOUND = 40.0  # the norm of a reply has that of its count in it
FAST = (Phase.generate,)  # what is found is shown as it was found: to make it smaller takes longer than the search
WORSE = 1.05  # than its own model alone: what a mixed model may be at a site
FEATURES, TRAIN, HELD = 2, 300, 2000

ODD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1, 2, 10**30, -(2**63), 1e308, "", "x", "\x1b[2J", [], {}, [[]], {"a": 1}]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
)
KEYS = st.sampled_from(
    ["round", "call", "kept", "error", "refused", "transcript", "samples", "schema", "condition", "op", "sum", "step"]
)
FACTORS = st.sampled_from(
    [0.0, -1.0, 0.5, 2.0, 10.0, -1e3, 1e5, 1e9, 1e30, 1e150, 1e308, math.nan, math.inf, -math.inf, 1e-9]
)
TREES = st.one_of(
    st.tuples(st.just("times"), FACTORS),
    st.tuples(st.just("leaf"), st.integers(0, 5), FACTORS),
    st.tuples(st.just("plus"), FACTORS),
    st.tuples(st.just("fill"), FACTORS),
    st.tuples(st.just("noise"), st.integers(0, 99), FACTORS),
    st.tuples(st.just("turn"), st.integers(0, 99)),
    st.tuples(st.just("type"), st.sampled_from(["float16", "float32", "float64", "int64", "bool", "uint8"])),
    st.tuples(st.just("shape"), st.sampled_from(["flat", "one more", "empty", "first", "turned"])),
    st.tuples(st.just("put"), st.sampled_from(["none", "dict", "tuple", "deep", "number", "twice"])),
)
SAID = st.one_of(
    TREES,
    TREES,
    st.tuples(st.just("key"), KEYS, ODD),
    st.tuples(st.just("without"), KEYS),
    st.tuples(st.just("bare")),
    st.tuples(st.just("bytes"), st.binary(max_size=40)),
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("flip"), st.floats(0, 1), st.integers(1, 255)),
    st.tuples(st.just("long"), st.integers(1, 2_000_000)),
    st.tuples(st.just("again"), st.integers(1, 9)),
    st.tuples(st.just("lost")),
    st.tuples(st.just("slow")),
)
KINDS = st.sampled_from(
    ["hello", "start", "begin", "call", "call", "call", "call", "back", "keep", "evaluate", "evaluate", "restore"]
)
STEPS = st.sampled_from(["keys", "deal", "mask", "confirm", "reveal"])
LIES = st.tuples(st.one_of(KINDS, STEPS), st.integers(0, 12), st.booleans(), SAID)
ROWS = st.tuples(
    st.just("rows"),
    st.sampled_from([1.0, 1e-3, 0.1, 3.0, 30.0, 1e3]),
    st.sampled_from([1.0, -1.0, 0.0, 0.1, 10.0, 1e3, 1e5]),
    st.sampled_from([0.0, 1.0, 100.0, 1e4]),
    st.integers(0, 99),
)
PLANS = st.lists(st.one_of(LIES, LIES, LIES, ROWS), min_size=1, max_size=4)


def regression(seed: int = 0) -> FederatedData:
    """Four sites with coefficients near common ones, and so many rows that chance decides little."""
    draw = torch.Generator().manual_seed(seed)
    names = tuple(f"client-{i:02}" for i in range(4))
    common = torch.randn(FEATURES, 1, generator=draw, dtype=torch.float64)
    own = [common + 0.3 * torch.randn(FEATURES, 1, generator=draw, dtype=torch.float64) for _ in names]
    parts = list[Rows]()
    for rows in (TRAIN, HELD, HELD):
        x = torch.randn(len(names), rows, FEATURES, generator=draw, dtype=torch.float64)
        noise = torch.randn(len(names), rows, 1, generator=draw, dtype=torch.float64)
        y = torch.stack([x[i] @ own[i] for i in range(len(names))]) + noise
        parts.append(Rows(x.flatten(0, 1), y.flatten(0, 1), torch.arange(len(names) + 1) * rows))
    train, val, test = parts
    return FederatedData("made", "regression", names, train, val, test, 1)


class Liar(Sites):
    """A link on which one site's answers follow a plan."""

    def __init__(self, files: dict[str, Path], plan: Plan) -> None:
        super().__init__(files)
        self.plan, self.told = plan, Counter[str]()
        self.said: list[bytes] = []

    def send(self, site: str, request: bytes, seconds: float) -> bytes:
        reply = super().send(site, request, seconds)
        self.seen.clear()
        if site != LIAR or ENVELOPE.unpack_from(request)[1] == PING:
            return reply
        asked = codec.decode_header(request[ENVELOPE.size :])
        kind = "call" if "function" in asked else asked.get("op", asked.get("step", "back"))
        self.told[kind] += 1
        self.said.append(reply)
        for of, first, always, lie in self.plan:
            at = self.told[kind] - 1
            if of == kind and (at >= first if always else at == first):
                reply = self.lied(lie, reply)
        return reply

    def lied(self, lie: tuple[Any, ...], reply: bytes) -> bytes:
        what, *about = lie
        if what == "lost":
            raise ConnectionResetError("lost")
        if what == "slow":
            raise TimeoutError("no reply")
        if what == "bytes":
            return bytes(about[0])
        if what == "cut":
            return reply[: int(about[0] * len(reply))]
        if what == "flip":
            at = min(int(about[0] * len(reply)), len(reply) - 1)
            return reply[:at] + bytes([reply[at] ^ about[1]]) + reply[at + 1 :] if reply else reply
        if what == "long":
            return reply + bytes(about[0])
        if what == "again":
            return self.said[-min(about[0], len(self.said))]
        try:
            header, tree = codec.decode(reply)
        except codec.BrokenMessage:  # an earlier lie of the plan broke it
            return reply
        if what == "key":
            header = header | {about[0]: about[1]}
        elif what == "without":
            header = {k: v for k, v in header.items() if k != about[0]}
        elif what == "bare":
            header = {}
        else:
            tree = changed(tree, what, about)
        try:
            return codec.encode(header, tree)
        except (TypeError, ValueError, OverflowError):  # no message says this
            return reply


def changed(tree: Tree, what: str, about: list[Any]) -> Tree:
    """A tree with other numbers, types, shapes or parts."""
    number = iter(range(1000))

    def of_floats(change: Any) -> Tree:
        return tree_map(lambda v: change(v) if v.is_floating_point() else v, tree)

    def noise(v: torch.Tensor) -> torch.Tensor:
        return torch.randn(v.shape, generator=torch.Generator().manual_seed(about[0]), dtype=torch.float64).to(v)

    if what == "times":
        return of_floats(lambda v: v * about[0])
    if what == "plus":
        return of_floats(lambda v: v + about[0])
    if what == "leaf":
        return tree_map(lambda v: v * about[1] if next(number) == about[0] and v.is_floating_point() else v, tree)
    if what == "fill":
        return of_floats(lambda v: torch.full_like(v, about[0]))
    if what == "noise":
        return of_floats(lambda v: v + about[1] * noise(v))
    if what == "turn":  # of the same size, and squares stay squares
        return of_floats(lambda v: noise(v) @ noise(v).mT if v.dim() == 2 and len(v) == v.shape[1] else noise(v))
    if what == "type":
        return tree_map(lambda v: v.to(getattr(torch, about[0])), tree)
    if what == "shape":
        forms = {
            "flat": lambda v: v.flatten(),
            "one more": lambda v: v[None],
            "empty": lambda v: v.flatten()[:0],
            "first": lambda v: v.flatten()[:1],
            "turned": lambda v: v.mT.contiguous() if v.dim() > 1 else v,
        }
        return tree_map(forms[about[0]], tree)
    deep: Tree = torch.zeros(1)
    for _ in range(30):
        deep = {"a": deep}
    return {
        "none": None,
        "dict": {"a": tree} if tree is not None else {},
        "tuple": (tree,) if tree is not None else (),
        "deep": deep,
        "number": torch.zeros(()),
        "twice": (tree, tree) if tree is not None else (),
    }[about[0]]


@dataclass
class Setting:
    """A federation, which is begun anew for every plan, and what it comes to without a liar."""

    name: str
    root: Path
    data: FederatedData
    config: RunConfig

    def __post_init__(self) -> None:
        self.files = write_sites(self.root / "sites", self.data)
        self.liar = self.data.clients.index(LIAR)

    def run(self, plan: Plan, config: RunConfig | None = None) -> RunFolder:
        shutil.rmtree(self.root / "server", ignore_errors=True)
        data = self.data
        for _, of_x, of_y, shift, seed in (lie for lie in plan if lie[0] == "rows"):
            data = forged(data, self.liar, of_x, of_y, shift, seed)
        write_prepared(self.files[LIAR].parent / "rows.safetensors", data, self.liar)
        for file in self.files.values():
            shutil.rmtree(file.parent / "private", ignore_errors=True)
        link = Liar(self.files, [lie for lie in plan if lie[0] != "rows"])
        return flare.coordinate(link, config or self.config, "run", self.root / "server", None)

    def mean(self) -> torch.Tensor:
        found = tensors(self.root / "server" / "run", self.root / "sites")
        return torch.cat([v.flatten() for k, v in found.items() if k.startswith("server")])


def forged(data: FederatedData, client: int, of_x: float, of_y: float, shift: float, seed: int) -> FederatedData:
    """One client's training rows: other coefficients, other scales."""
    draw = torch.Generator().manual_seed(seed)
    x, y = data.train.x, data.train.y.clone()
    assert isinstance(x, torch.Tensor)
    at = slice(*data.train.starts[client : client + 2].tolist())
    x = x.clone()
    x[at] = (x[at] * of_x).to(x)
    if y.is_floating_point():
        other = torch.randn(x[at].flatten(1).shape[1], y.shape[1], generator=draw, dtype=torch.float64)
        noise = torch.randn(y[at].shape, generator=draw, dtype=torch.float64)
        y[at] = (of_y * ((x[at].double().flatten(1) @ other) / of_x + seed % 3 * noise) + shift).to(y)
    else:
        y[at] = y[at][torch.randperm(len(y[at]), generator=draw)]
    return replace(data, train=Rows(x, y, data.train.starts))


def without_rows(made: RunConfig) -> RunConfig:
    plain: RunConfig = made.model_copy(update={"data": config("data={source='sites'}").data})
    return plain


def of_sites(*settings: str) -> RunConfig:
    return config(
        *settings,
        "model={name='linear', dtype='float64'}",
        "rounds=1",
        "data={source='sites'}",
        "federation.silence=0.2",
        "federation.deadline=5",
    )


def mixed_config(*, keep_own: bool) -> RunConfig:
    guard = f"algorithm.keep_own={str(keep_own).lower()}"
    return of_sites("algorithm.name=mixedmodel", "algorithm.effects=diagonal", guard)


def setting(name: str, root: Path) -> Setting:
    """One of NAMES, with the sites' folders under `root`."""
    if name == "mixed":
        return Setting(name, root / name, regression(), mixed_config(keep_own=True))
    algorithm, *options = OF[name]
    made = configured(algorithm, *options)
    return Setting(name, root / name, sources.load(made.data, seed=made.seed), without_rows(made))


OF: dict[str, tuple[str, ...]] = {
    "mean": ("fedavg", "rounds=1", f"federation.max_norm={BOUND}", "evaluation.every=1"),
    "private": ("fedrep", "rounds=2"),
    "tape": ("learn2pfed", "rounds=4", "evaluation.every=4"),
    "late": ("fedrep", "rounds=3", "federation.goal=3", "federation.late=buffer"),
    "sealed": ("fedavg", "rounds=4", "privacy.secure_sum=true", "evaluation.every=4"),
}
NAMES = (*OF, "mixed")


class Judge:
    """Runs plans in one setting, and says what must not be."""

    def __init__(self, name: str, root: Path) -> None:
        self.setting = setting(name, root)
        self.honest = self.setting.run([])
        self.ended = 0  # runs that had no usable round
        if name == "mean":
            self.wanted = self.setting.mean()
        if name == "mixed":
            self.alone = self.others(self.setting.run([], of_sites("algorithm.name=linearalone")))

    def others(self, folder: RunFolder) -> list[float]:
        """Each other site's error on rows that nobody has trained on."""
        assert folder.results is not None
        found = folder.results["last"]["clients"][folder.results["metric"]]
        names = folder.about["clients"]
        return [v for v, name in zip(found, names, strict=True) if name != LIAR]

    def check(self, plan: Plan) -> None:
        try:
            folder = self.setting.run(plan)
        except RunError:
            if self.setting.name != "tape":
                raise
            self.ended += 1  # a taped round needs all: what remains open, on the page of trust
            return
        assert folder.results is not None
        assert [name for name in folder.about["clients"] if name != LIAR] == ["client-00", "client-02", "client-03"]
        if self.setting.name == "mean":
            sizes = self.setting.data.train.sizes.tolist()
            most = 2 * BOUND * sizes[self.setting.liar] / sum(sizes)
            moved = float((self.setting.mean() - self.wanted).norm())
            assert moved <= most * (1 + 1e-5), (moved, most)
        if self.setting.name == "mixed":
            for found, alone in zip(self.others(folder), self.alone, strict=True):
                assert found <= WORSE * alone, (found, alone)


def search_site(judge: Judge, seed: int, examples: int) -> None:
    """Plans of a site that lies."""

    @seeded(seed)
    @settings(
        max_examples=examples,
        phases=FAST,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(PLANS)
    def plans(plan: Plan) -> None:
        judge.check(plan)

    plans()
