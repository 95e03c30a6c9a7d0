"""A federation of sites without a network: the real two ends, joined by function calls that can be made to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedtailor.aggregation.identity import AUTHORITY, CERTIFICATE, KEY
from fedtailor.algorithms import algorithms
from fedtailor.core import codec
from fedtailor.core.algorithm import reply_names
from fedtailor.core.data import FederatedData
from fedtailor.core.federation import Federation
from fedtailor.core.trees import Tree, items, tree_map
from fedtailor.data.sources.site_data import write_prepared
from fedtailor.engines.inprocess import InProcess
from fedtailor.experiments.building import build_experiment
from fedtailor.experiments.config import RunConfig
from fedtailor.experiments.store import RunFolder, read_json, read_tree
from fedtailor.flare.protocol import ENVELOPE, PING
from fedtailor.flare.server import ROSTER
from fedtailor.flare.site import SERVER, SiteService, SiteState, read_site
from fedtailor.models import MODELS

POLICY: dict[str, Any] = {
    "algorithms": sorted(algorithms()),
    "models": sorted(MODELS),
    "sends": [],
    "metrics": True,
    "min_samples": 1,
    "budget": {"min_rows": 1, "decimals": 15},
}


def every_name() -> list[str]:
    """All that any algorithm sends."""
    return sorted({name for kind in algorithms().values() for name in reply_names(kind)} | {"gradients"})


def write_sites(root: Path, data: FederatedData, **policy: Any) -> dict[str, Path]:
    """A folder for each client with its prepared rows, its certificate and its site.toml."""
    made = {}
    authority = Authority()
    policy = {"partners": list(data.clients)} | policy
    for i, name in enumerate(data.clients):
        folder = root / name
        folder.mkdir(parents=True)
        write_prepared(folder / "rows.safetensors", data, i)
        authority.write_kit(folder / "kit", name)
        made[name] = folder / "site.toml"
        tables = {"data": {"path": "rows.safetensors"}, "policy": POLICY | {"sends": every_name()} | policy}
        made[name].write_text(tomli_w.dumps(tables))
    return made


class Authority:
    """Signs certificates, as that of a federation does."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._signed("authority", self.key)

    def _signed(self, name: str, key: ec.EllipticCurvePrivateKey, days: int = 10) -> x509.Certificate:
        subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, "authority"))
        now = datetime.now(UTC)
        is_authority = x509.BasicConstraints(ca=name == "authority", path_length=None)
        return (
            x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(days=20))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(is_authority, critical=True)
            .sign(self.key, hashes.SHA256())
        )

    def write_kit(self, kit: Path, name: str, days: int = 10) -> Path:
        """Certificate and key of a participant, as FLARE keeps them."""
        key = ec.generate_private_key(ec.SECP256R1())
        encoding, format = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        startup = kit / "startup"
        startup.mkdir(parents=True)
        (startup / CERTIFICATE).write_bytes(self._signed(name, key, days).public_bytes(encoding))
        (startup / KEY).write_bytes(key.private_bytes(encoding, format, serialization.NoEncryption()))
        (startup / AUTHORITY).write_bytes(self.certificate.public_bytes(encoding))
        return startup


class Sites:
    """A link to services in this process; `restart` is what a new job does to a site."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = dict(files)
        self.sites = tuple(files)
        self.services: dict[str, SiteService] = {}
        self.before: Callable[[str, dict[str, Any]], None] = lambda site, header: None
        self.after: Callable[[str, dict[str, Any]], None] = lambda site, header: None
        self.seen: list[tuple[str, bytes, bytes]] = []
        self.most = 0  # bytes that no answer exceeds
        self._lock = threading.Lock()
        self.restart()

    def restart(self, *names: str) -> None:
        """The process of a site's job begins anew: all that was in memory is gone."""
        for name in names or self.sites:
            self.services[name] = SiteService(read_site(self.files[name]), name)

    def limit(self, most: int) -> None:
        self.most = most

    def send(self, site: str, request: bytes, seconds: float) -> bytes:
        """Call the site, unless `before` raises; `after` may lose the reply."""
        ping = ENVELOPE.unpack_from(request)[1] == PING
        header = {"op": "ping"} if ping else codec.decode_header(request[ENVELOPE.size :])
        self.before(site, header)
        with self._lock:  # models draw their first values from torch's one generator: a process has one site
            reply = self.services[site].answer(SERVER, request)
            assert len(reply) <= (self.most or len(reply))  # or a real link would not have received it
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
        made[f"state of {name}"] = SiteState(private / "states").read(kept)
        if (private / "personal" / "last.json").exists():
            made[f"model of {name}"] = read_tree(private / "personal", read_json(private / "personal" / "last.json"))
    return dict(items(made))


def on_loop(config: RunConfig, missed: dict[int, set[str]] | None = None) -> dict[str, Any]:
    """The same on the loop engine, in which some clients miss some rounds."""
    setting = build_experiment(config)
    engine = InProcess(setting)
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
