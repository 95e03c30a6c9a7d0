"""A search in place of examples: a server, or a site, that says anything in any order.

    python -m tests.trust.lying --seconds 600
    python -m tests.trust.lying --seconds 600 --site

The server talks to three sites in two worlds. In the second, rows have moved from one site to another, so that the sums
that the algorithm declares are the same, and what every single site has is not. Whatever the server says, it must hear
the same in both: every sum that opens, every refusal, every length. It may also start runs again, or under other names,
with another configuration for some sites. What a lying site may do is in `lying_sites.py`. Seconds are those of the
processor.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from fedtailor.core import codec
from fedtailor.core.data import FederatedData, Rows
from fedtailor.core.trees import Tree, items
from fedtailor.experiments.building import assemble
from fedtailor.experiments.config import RunConfig
from fedtailor.flare.protocol import ENVELOPE, PROTOCOL, config_for, data_schema, promise
from fedtailor.flare.site import SERVER, SiteService, read_site
from fedtailor.version import __version__
from tests.flare.sites import write_sites
from tests.flare.test_site import SESSION
from tests.small import config
from tests.trust.lying_sites import FAST, Judge, search_site
from tests.trust.lying_sites import NAMES as NAMES_OF_SETTINGS
from tests.trust.test_sums import Refusal
from tests.trust.test_sums import Server as Protocol

NAMES = ("ada", "bo", "cy")
PATHS = ("0", "1")
ROWS, FEATURES = 24, 3
Header = dict[str, Any]


def data_of(world: int) -> FederatedData:
    """Whole numbers, whose squares sum up exactly; in world 1 the last rows of two sites have changed places."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-4, 5, (3, ROWS, FEATURES), generator=draw, device="cpu").double()
    y = torch.randint(-4, 5, (3, ROWS, 1), generator=draw, device="cpu").double()
    if world:
        for v in (x, y):
            v[0, 9:], v[1, 9:] = v[1, 9:].clone(), v[0, 9:].clone()
    rows = Rows(x.flatten(0, 1), y.flatten(0, 1), torch.arange(4, device="cpu") * ROWS)

    def few() -> Rows:
        return Rows(x[:, :12].flatten(0, 1) * 0, y[:, :12].flatten(0, 1) * 0, torch.arange(4, device="cpu") * 12)

    return FederatedData("rows", "regression", NAMES, rows, few(), few(), 1)


def run_config(*settings: str) -> RunConfig:
    return config(
        "algorithm.name=jointls",
        "algorithm.personal_features=[]",
        "data={source='sites'}",
        "model={name='linear', dtype='float64'}",
        "privacy.secure_sum=true",
        "rounds=3",
        *settings,
    )


class World:
    """Three sites as they are, and all that they ever sent."""

    def __init__(self, root: Path, world: int) -> None:
        self.root, self.data, self.config = root, data_of(world), run_config()
        self.experiment = assemble(self.config, self.data)
        self.runs: dict[tuple[str, ...], tuple[RunConfig, Any]] = {}
        self.files = write_sites(root, self.data, sums_of=3, metrics=False)
        self.begin()

    def begin(self) -> None:
        """As new: nothing is remembered."""
        for file in self.files.values():
            shutil.rmtree(file.parent / "private", ignore_errors=True)
        self.sites = {i: SiteService(read_site(file), name) for i, (name, file) in enumerate(self.files.items())}
        self.numbers = dict.fromkeys(self.sites, 0)
        self.masked: list[bytes] = []
        self.adverts: list[bytes] = []
        for i in self.sites:
            assert not any("error" in answer for answer in self.start(i))

    def start(self, site: int, run: str = "run-1", settings: Sequence[str] = (), **changes: Any) -> list[Header]:
        """What a site answers to hello and to a start, which may have another configuration."""
        made, what = self.run_of(tuple(settings))
        hello: Header = {"op": "hello", "protocol": PROTOCOL, "version": __version__, "run": run}
        hello |= {
            "algorithm": "jointls",
            "model": "linear",
            "rounds": made.rounds,
            "seed": changes.pop("seed", made.seed),
        }
        about = {"schema": data_schema(self.data), "promise": what, "first": 0}
        start = {"op": "start", "config": config_for(made, site), "client": site, "cohort": list(NAMES)}
        answers = [self.ask(site, header)[0] for header in (hello, start | about | changes)]
        return [{k: v for k, v in answer.items() if k != "condition"} for answer in answers]  # time, and room on a disk

    def run_of(self, settings: tuple[str, ...]) -> tuple[RunConfig, Any]:
        """A run's configuration and promise."""
        if settings not in self.runs:
            made = run_config(*settings)
            self.runs[settings] = made, promise(assemble(made, self.data))
        return self.runs[settings]

    def ask(self, site: int, header: Header, tree: Tree = None) -> tuple[Header, Tree]:
        self.numbers[site] += 1
        return codec.decode(self.raw(site, self.numbers[site], header, tree))

    def raw(self, site: int, number: int, header: Header, tree: Tree = None) -> bytes:
        return self.sites[site].answer(SERVER, ENVELOPE.pack(SESSION, number) + codec.encode(header, tree))

    def heard(self, site: int, header: Header, tree: Tree) -> Any:
        """What a server can know of an answer: all of it, but the bits of keys, shares and masks."""
        answer, reply = self.ask(site, header, tree)
        step = header.get("step")
        if isinstance(reply, torch.Tensor) and step == "mask":
            self.masked.append(reply.numpy().tobytes())
        if isinstance(reply, torch.Tensor) and step == "keys":
            self.adverts.append(reply.numpy().tobytes()[4:68])
        return {k: v for k, v in answer.items() if k != "transcript"}, _form(
            reply, is_signed=step in ("keys", "confirm")
        )

    def total(
        self, number: int, round: int, call: int, paths: list[str], weight: str | None, lies: dict[str, Any]
    ) -> Any:
        """A whole secure sum; the numbers that open, or the first refusal."""
        server = Protocol({i: _Line(self, i) for i in self.sites}, round=round)  # type: ignore[misc]
        for step, change in lies.items():
            server.lies[step] = lambda client, header, tree, change=change: (  # type: ignore[misc]
                header | (change["header"] if client in change["clients"] else {}),
                tree,
            )
        term = {"call": call, "paths": paths, "weight": weight}
        try:
            return server.total(range(3), number=number, term=term)
        except Refusal as why:
            return str(why)
        except (ValueError, KeyError, AttributeError) as error:  # the lies of this server do not fit each other
            return type(error).__name__


class _Line:
    def __init__(self, world: World, site: int) -> None:
        self.world, self.site = world, site

    def answer(self, header: Header, tree: Tree) -> tuple[Header, Tree]:
        answer, reply = self.world.ask(self.site, header, tree)
        if header["step"] == "mask" and reply is not None:
            self.world.masked.append(reply.numpy().tobytes())
        if header["step"] == "keys" and reply is not None:
            self.world.adverts.append(reply.numpy().tobytes()[4:68])
        return answer, reply


def _form(reply: Tree, *, is_signed: bool) -> Any:
    """Shapes and types; a signature has a few bytes more or less, by chance."""
    return [(path, "signed" if is_signed else list(v.shape), str(v.dtype)) for path, v in items(reply)]


small = st.integers(-1, 3)
sites_ = st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True)
extra = st.dictionaries(
    st.sampled_from(["sealed", "fraction_bits", "threshold", "cohort", "max_norm", "weight", "seed"]),
    st.one_of(st.integers(-1, 60), st.floats(1e-9, 1e9), st.booleans()),
    max_size=1,
)
paths_ = st.lists(st.sampled_from([*PATHS, "2", ""]), min_size=1, max_size=2)
weights = st.sampled_from([None, None, "0", "1", "2"])
lies_ = st.dictionaries(
    st.sampled_from(["keys", "deal", "mask", "confirm", "reveal"]),
    st.fixed_dictionaries(
        {
            "clients": sites_,
            "header": st.one_of(
                extra,
                st.fixed_dictionaries({"survivors": sites_}),
                st.fixed_dictionaries({"clients": sites_}),
                st.fixed_dictionaries({"round": small}),
                st.fixed_dictionaries({"dealers": sites_}),
                st.fixed_dictionaries({"signers": sites_}),
            ),
        }
    ),
    max_size=1,
)
runs = st.sampled_from(["run-1", "run-1", "run-2"])
configurations = st.sampled_from(
    [
        (),
        (),
        ("local.lr=1e-30",),
        ("federation.max_norm=1",),
        ("federation.max_norm=1e-9",),
        ("privacy.fraction_bits=8",),
        ("privacy.secure_sum=false",),
        ("rounds=9",),
        ("seed=1",),
    ]
)
changes_: st.SearchStrategy[Any] = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"first": st.integers(-1, 3)}),
    st.fixed_dictionaries({"cohort": st.lists(st.sampled_from([*NAMES, "di"]), max_size=4, unique=True)}),
    st.fixed_dictionaries({"client": st.integers(0, 3)}),
    st.fixed_dictionaries({"seed": st.integers(0, 2)}),
)
actions = st.one_of(
    st.tuples(st.just("start"), runs, sites_, configurations, changes_),
    st.tuples(st.just("start"), runs, st.just([0, 1, 2]), st.just(()), st.just({})),
    st.tuples(st.just("begin"), st.integers(-1, 4), sites_, small),
    st.tuples(st.just("begin"), st.integers(1, 3), st.just([0, 1, 2]), st.just(0)),
    st.tuples(st.just("call"), st.integers(1, 2), st.integers(0, 2), sites_, extra),
    st.tuples(st.just("call"), st.just(1), st.integers(0, 2), st.just([0, 1, 2]), st.just({})),
    st.tuples(st.just("sum"), st.integers(1, 6), st.integers(1, 2), st.integers(0, 2), paths_, weights, lies_),
    st.tuples(st.just("sum"), st.integers(1, 6), st.just(1), st.integers(0, 2), st.just(["0"]), st.none(), st.just({})),
    st.tuples(st.just("control"), st.sampled_from(["keep", "restore", "finish", "evaluate", "again"]), small, sites_),
    st.tuples(st.just("step"), st.sampled_from(["keys", "mask", "confirm", "reveal"]), st.integers(1, 3), sites_),
)


def do(world: World, action: tuple[Any, ...], model: Tree) -> list[Any]:
    """What a server hears after it has said this."""
    kind, *rest = action
    if kind == "start":
        run, chosen, settings, changes = rest
        return [world.start(i, run, settings, **changes) for i in chosen]
    if kind == "begin":
        header = {"op": "begin", "round": rest[0], "kept": rest[2], "needed": []}
        return [world.heard(i, header, None) for i in rest[1]]
    if kind == "call":
        header = {"function": "local", "round": rest[0], "call": rest[1], "placed": [], "taped": False} | rest[3]
        return [world.heard(i, header, ()) for i in rest[2]]
    if kind == "sum":
        return [world.total(*rest)]
    if kind == "step":
        about: dict[str, Header] = {
            "keys": {"term": {"call": 0, "paths": ["0"], "weight": None}},
            "mask": {"dealers": [0, 1, 2]},
        }
        about |= {"confirm": {"survivors": [0, 1, 2]}, "reveal": {"signers": [0, 1, 2]}}
        header = {"round": 1, "sum": rest[1], "step": rest[0]} | about[rest[0]]
        tree = None if rest[0] in ("keys", "confirm") else torch.zeros(3, 148, dtype=torch.uint8, device="cpu")
        return [world.heard(i, header, tree) for i in rest[2]]
    name, round, chosen = rest
    if name == "again":
        return [len(world.raw(i, world.numbers[i], {"op": "finish"})) > 0 for i in chosen]
    headers = {
        "keep": {"op": "keep", "round": round},
        "restore": {"op": "restore", "kept": round},
        "finish": {"op": "finish"},
        "evaluate": {"op": "evaluate", "round": round, "splits": ["val"], "keep": ""},
    }
    return [world.heard(i, headers[name], model if name == "evaluate" else None) for i in chosen]


def compare(worlds: tuple[World, World], plan: list[tuple[Any, ...]]) -> int:
    """Both worlds say the same; returns how many sums opened."""
    for world in worlds:
        world.begin()
    model, opened = worlds[0].experiment.algorithm.server_init(worlds[0].experiment.model), 0
    for action in [("begin", 1, [0, 1, 2], 0), *plan]:
        first, second = (do(world, action, model) for world in worlds)
        assert first == second, (action, first, second)
        opened += sum(isinstance(one, list) for one in first)
    for world in worlds:
        assert len(set(world.masked)) == len(world.masked)
        assert len(set(world.adverts)) == len(world.adverts)
    return opened


QUIET = list(HealthCheck)


def search_server(worlds: tuple[World, World], seed: int, examples: int, length: int = 12) -> int:
    """Plans of a server that lies; returns how many sums opened in all."""
    opened = 0

    @seeded(seed)
    @settings(max_examples=examples, phases=FAST, database=None, deadline=None, suppress_health_check=QUIET)
    @given(st.lists(actions, min_size=4, max_size=length))
    def plans(plan: list[tuple[Any, ...]]) -> None:
        nonlocal opened
        opened += compare(worlds, plan)

    plans()
    return opened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--site", action="store_true", help="a site lies, not the server")
    wanted = parser.parse_args()
    os.fsync = lambda file: None  # type: ignore[assignment]  # nothing here outlives the process
    begun, plans, opened = time.process_time(), 0, 0
    until = begun + wanted.seconds
    with tempfile.TemporaryDirectory() as root:
        if wanted.site:
            judges = {name: Judge(name, Path(root)) for name in NAMES_OF_SETTINGS}
            done = dict.fromkeys(judges, 0)
            for seed in itertools.count():
                for name, judge in judges.items():
                    if time.process_time() > until:
                        ended = judges["tape"].ended
                        print(f"plans of a lying site: {done}: {ended} taped runs and no other ended; no bound passed")
                        return
                    search_site(judge, seed, 5)
                    done[name] += 5
                print(f"{time.process_time() - begun:.0f} s: {done}", flush=True)
        worlds = World(Path(root) / "0", 0), World(Path(root) / "1", 1)
        for seed in itertools.count():
            if time.process_time() > until:
                break
            opened += search_server(worlds, seed, 5, 20)
            plans += 5
            if plans % 50 == 0:
                print(f"{time.process_time() - begun:.0f} s: {plans} plans, {opened} sums opened", flush=True)
    print(f"{plans} plans of a lying server, {opened} sums opened: both worlds said the same")


if __name__ == "__main__":
    main()
