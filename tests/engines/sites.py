"""A federation of sites without a network: the real two ends, joined by function calls that can be made to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedtailor.algorithms import algorithms
from fedtailor.core import codec
from fedtailor.core.algorithm import sent_names
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Tree, items, tree_map
from fedtailor.data.federated import FederatedData
from fedtailor.data.site import write_prepared
from fedtailor.engines.flare.messages import ENVELOPE, PING
from fedtailor.engines.flare.server import ROSTER
from fedtailor.engines.flare.site import SERVER, SiteService, read_site
from fedtailor.engines.flare.vault import Vault
from fedtailor.engines.loop import loop
from fedtailor.models import MODELS
from fedtailor.runs.assemble import setting_of
from fedtailor.runs.config import RunConfig
from fedtailor.runs.store import RunFolder, read_json, read_tree

POLICY: dict[str, Any] = {
    "algorithms": sorted(algorithms()),
    "models": sorted(MODELS),
    "sends": [],
    "min_samples": 1,
}


def every_name() -> list[str]:
    """All that any algorithm sends."""
    return sorted({name for kind in algorithms().values() for name in sent_names(kind)} | {"gradients"})


def write_sites(root: Path, data: FederatedData, **policy: Any) -> dict[str, Path]:
    """A folder for each client with its prepared rows and its site.toml."""
    made = {}
    for i, name in enumerate(data.clients):
        folder = root / name
        folder.mkdir(parents=True)
        write_prepared(folder / "rows.safetensors", data, i)
        made[name] = folder / "site.toml"
        tables = {"data": {"path": "rows.safetensors"}, "policy": POLICY | {"sends": every_name()} | policy}
        made[name].write_text(tomli_w.dumps(tables))
    return made


class Sites:
    """A link to services in this process; `restart` is what a new job does to a site."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = dict(files)
        self.sites = tuple(files)
        self.services: dict[str, SiteService] = {}
        self.before: Callable[[str, dict[str, Any]], None] = lambda site, header: None
        self.after: Callable[[str, dict[str, Any]], None] = lambda site, header: None
        self.seen: list[tuple[str, bytes, bytes]] = []
        self._lock = threading.Lock()
        self.restart()

    def restart(self, *names: str) -> None:
        """The process of a site's job begins anew: all that was in memory is gone."""
        for name in names or self.sites:
            self.services[name] = SiteService(read_site(self.files[name]), name)

    def send(self, site: str, request: bytes, seconds: float) -> bytes:
        """Call the site, unless `before` raises; `after` may lose the reply."""
        ping = ENVELOPE.unpack_from(request)[1] == PING
        header = {"op": "ping"} if ping else codec.decode_header(request[ENVELOPE.size :])
        self.before(site, header)
        with self._lock:  # models draw their first values from torch's one generator: a process has one site
            reply = self.services[site].answer(SERVER, request)
            self.seen.append((site, request, reply))
        self.after(site, header)
        return reply


def tensors(run: Path, sites: Path) -> dict[str, Any]:
    """Everything that a run has made: at the server, and in the folder of each site."""
    saved = RunFolder(run).load_checkpoint()
    assert saved is not None
    roster = read_json(run / ROSTER)
    made: dict[str, Any] = {"server": saved[1]["state"]["server"]}
    for name, kept in zip(roster["clients"], saved[1]["state"]["clients"]["kept"].tolist(), strict=True):
        private = sites / name / "private" / roster["run"]
        made[f"state of {name}"] = Vault(private / "states").read(kept)
        if (private / "personal" / "last.json").exists():
            made[f"model of {name}"] = read_tree(private / "personal", read_json(private / "personal" / "last.json"))
    return dict(items(made))


def on_loop(config: RunConfig, missed: dict[int, set[str]] | None = None) -> dict[str, Any]:
    """The same on the loop engine, in which some clients miss some rounds."""
    setting = setting_of(config)
    engine = loop(setting)
    engine.start()
    fed = Federation(engine, config.federation.limits)
    server = setting.algorithm.server_init(setting.model)
    for round in range(1 - setting.algorithm.preparation, config.rounds + 1):
        away = (missed or {}).get(round, set())
        cohort = [i for i, name in enumerate(setting.data.clients) if name not in away]
        if cohort:
            server = fed.run_round(round, cohort, server)
    rows = engine.get_states()
    made: dict[str, Tree] = {"server": server}
    found = engine.evaluate(range(len(setting.data.clients)), config.rounds, server, ["test"])
    for i, ((_, _, stack), name) in enumerate(zip(found, setting.data.clients, strict=True)):
        made[f"state of {name}"] = tree_map(lambda v, i=i: v[i : i + 1], rows)
        made[f"model of {name}"] = {k: v[0] for k, v in stack.items()}
    return dict(items(made))
