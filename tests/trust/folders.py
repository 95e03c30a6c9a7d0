"""Folders that fedtailor writes, and all of its own readers of their files: for tests and tools/damage.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedtailor.cli.folder_commands import folder_record
from fedtailor.core.trees import items
from fedtailor.errors import UserError
from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import FIT, RunFolder, read_json, read_tree, write_json
from fedtailor.flare.kits import RUNS
from fedtailor.flare.policy import (
    LEDGER,
    Budget,
    Policy,
    PrivacyAccount,
    RunNeed,
    RunUsage,
    SitePrivacy,
    make_party,
)
from fedtailor.flare.quotas import USED
from fedtailor.flare.server import SITES
from fedtailor.flare.site import RUN, SiteState, read_participation, set_participation
from fedtailor.report.recorded_run import read_run
from fedtailor.serving.onboard import onboard
from fedtailor.studies.compare import GRID, ROWS
from fedtailor.studies.explain import explain
from fedtailor.tables.boosted_trees import TREES_FOLDER, Trees
from fedtailor.tables.fit import fit
from fedtailor.tables.serve import sites_of
from tests.flare.sites import Authority
from tests.flare.test_site import Asked
from tests.made_sites import make_sites
from tests.small import DIGITS
from tests.trust.commands import Reader, command, reported, resumed, said


def plain(tree: Any) -> list[Any]:
    return [(path, leaf.tolist()) for path, leaf in items(tree)]


def _checkpoint(path: Path) -> Any:
    saved = RunFolder.open(path).load_checkpoint()
    return saved and [saved[0], {name: plain(tree) for name, tree in saved[1].items()}]


def _models(path: Path) -> Any:
    folder = RunFolder.open(path)
    kinds = [kind.name for kind in sorted((path / "personal").iterdir())]
    new = [name for name in sites_of(folder) if name not in folder.about["clients"]]
    models = {f"{kind}, {c}": plain(folder.personal(c, kind)) for kind in kinds for c in folder.about["clients"]}
    return models | {name: plain(folder.newcomer(name)) for name in new}


def _page(path: Path) -> Any:
    found = read_run(path)
    if found.unreadable:  # which the page says
        raise UserError("lines that cannot be read")
    return found.config.plain(), found.about, found.lines, found.results


def _shares(path: Path) -> Any:
    held = read_json(path / "shares.json") if (path / "shares.json").exists() else {}
    return held and [held, plain(read_tree(path, held["tensors"]))]


OF_A_RUN: dict[str, Reader] = {
    "config": lambda path: RunFolder.open(path).config.plain(),
    "about": lambda path: RunFolder.open(path).about,
    "results": lambda path: RunFolder.open(path).results,
    "rounds": lambda path: RunFolder.open(path).metrics(),
    "preparation": lambda path: str(RunFolder.open(path).preparation),
    "checkpoint": _checkpoint,
    "models": _models,
    "newcomers": lambda path: [read_json(file) for file in sorted(path.glob("newcomers/*/newcomer.json"))],
    "shares": _shares,
    "page": _page,
}


def inside(readers: dict[str, Reader], folder: str) -> dict[str, Reader]:
    """The same readers for a folder in a folder."""

    def below(use: Reader) -> Reader:
        return lambda path: use(path / folder)

    return {f"{folder}: {name}": below(use) for name, use in readers.items()}


def of_a_model(site: str, rows: str) -> dict[str, Reader]:
    """Commands that use the model of a site."""
    return {
        f"export {site}": command(
            "export", "{path}", "--site", site, "--to", "safetensors", "--out", "{out}", writes="model.safetensors"
        ),
        f"predict {site}": command(
            "predict", "{path}", f"{{beside}}/{rows}", "--site", site, "--out", "{out}", writes="predicted.csv"
        ),
    }


SHOWN = {
    "show": command("show", "{path}", "--clients"),
    "show --json": command("show", "{path}", "--json"),
    "report": reported,
}


def task(root: Path, algorithm: str) -> dict[str, Any]:
    """A run over two small tables."""
    if not (root / "sites").exists():
        make_sites(root / "sites", sites=2, rows=40)
    data = {"source": "folder", "path": str(root / "sites"), "target": "outcome"}
    return DIGITS | {"rounds": 2, "data": data, "model": {"hidden": [3]}, "algorithm": {"name": algorithm}}


def make_run(root: Path) -> tuple[Path, dict[str, Reader]]:
    """Of a method that keeps states, with what was learned about sharing."""
    runner.start(parse(task(root, "fedselect")), root / "run")
    explain(root / "run")
    commands = {"explain": command("explain", "{path}"), "resume": command("resume", "{path}", "--json")}
    return root / "run", OF_A_RUN | SHOWN | commands | of_a_model("s0", "sites/s0.csv")


def make_weights(root: Path) -> tuple[Path, dict[str, Reader]]:
    """Of a method that learns weights, which are in every round's line."""
    tables = task(root, "duw-fedavg")
    tables["algorithm"] |= {"outer_iterations": 1, "horizon": 1}
    runner.start(parse(tables), root / "run")
    return root / "run", OF_A_RUN | SHOWN | {"explain": command("explain", "{path}")}


def make_interrupted(root: Path) -> tuple[Path, dict[str, Reader]]:
    """A run that is gone on with."""
    runner.start(parse(task(root, "fedrep")), root / "run", until=1)
    functions = {name: OF_A_RUN[name] for name in ("config", "about", "rounds", "preparation", "checkpoint", "page")}
    return root / "run", functions | SHOWN | {"resume": resumed}


def make_comparison(root: Path) -> tuple[Path, dict[str, Reader]]:
    """One method, one seed."""
    import tomli_w

    about = {"algorithms": ["local"], "seeds": [0], "workers": 1}
    tables = {k: v for k, v in task(root, "local").items() if k != "algorithm"}
    (root / "grid.toml").write_text(tomli_w.dumps(tables | {"rounds": 1, "compare": about}))
    said(["compare", str(root / "grid.toml"), "--out", str(root / "grid")])
    readers: dict[str, Reader] = {"grid": lambda path: read_json(path / GRID), "json": folder_record}
    readers["rows"] = lambda path: read_json(path / ROWS)
    return root / "grid", readers | SHOWN | inside(OF_A_RUN, "local-seed0")


def make_fit(root: Path) -> tuple[Path, dict[str, Reader]]:
    """Two sites and a newcomer."""
    make_sites(root / "sites", sites=2, rows=40)
    made = root / "fit"
    fit({"source": "folder", "path": str(root / "sites"), "target": "outcome"}, made, algorithm="ditto", rounds=1)
    onboard(made, root / "sites/s1.csv", "late")
    readers: dict[str, Reader] = {"fit": lambda path: read_json(path / FIT)}
    readers |= SHOWN | of_a_model("s0", "sites/s0.csv") | of_a_model("late", "sites/s1.csv")
    for folder in sorted(p.name for p in made.iterdir() if (p / "run.json").exists()):
        readers |= inside(OF_A_RUN, folder)
    return made, readers


def make_trees(root: Path) -> tuple[Path, dict[str, Reader]]:
    """Boosted trees, as a fit keeps them."""
    import torch

    whole = {name: torch.tensor([0, 0, 0]) for name in ("feature", "missing_left")}
    numbers = {name: torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64) for name in ("threshold", "value")}
    ways = {"left": torch.tensor([1, 1, 2]), "right": torch.tensor([2, 1, 2])}
    first = {"root": torch.tensor([0]), "output": torch.tensor([0]), "baseline": torch.zeros(1, dtype=torch.float64)}
    (root / TREES_FOLDER).mkdir()
    Trees(**whole, **numbers, **ways, **first).save(root / TREES_FOLDER / "s0.safetensors")
    read = lambda path: plain(vars(Trees.read(path / "s0.safetensors", 1, 1)))  # noqa: E731
    return root / TREES_FOLDER, {"trees": read}


def make_site(root: Path) -> tuple[Path, dict[str, Reader]]:
    """A site that has kept a round, told metrics, spent epsilon, helped to open a sum and been paused once."""
    privacy = {"epsilon": 20.0, "noise": 2.0}
    made = Asked(root, budget={"min_rows": 1, "decimals": 15, "privacy": privacy})
    made.start()
    made.begin(1, 0)
    made.call()
    made.ask({"op": "keep", "round": 1})
    server = made.experiment.algorithm.server_init(made.experiment.model)
    made.ask({"op": "evaluate", "round": 1, "splits": ["val"], "keep": "last"}, server)
    set_participation(made.folder, "paused")
    site = made.file.parent
    policy = Policy(algorithms=(), sends=(), sums_of=2, partners=("ada", "bo"))
    make_party(site / "kit", policy, "ada", "run-1", 0, made.folder / "run-1").opened.claim(1, ("ada", "bo"))

    def personal(path: Path) -> Any:
        about = read_json(path / "private/run-1/personal/last.json")
        return about, plain(read_tree(path / "private/run-1/personal", about))

    def identity(path: Path) -> Any:
        read = make_party(path / "kit", policy, "ada", "run-1", 0, path / "private/run-1")
        assert read.identity is not None
        return read.identity.name, read.identity.certificate.hex(), sorted(read.opened.cohort), read.opened.round

    def spent(path: Path) -> Any:
        account = PrivacyAccount(SitePrivacy(**privacy), path / "private")
        known = RunUsage(Budget(), path / "private/run-1", RunNeed(0, 3, 1, 18))
        return (
            account._replies(),
            known.evaluations,
            known.calls,
            sorted(known.begun),
            read_json(path / "private" / LEDGER),
        )

    return site, {
        "quotas": lambda path: read_json(path / "private" / USED),
        "standing": lambda path: read_participation(path / "private"),
        "run": lambda path: read_json(path / "private/run-1" / RUN),
        "spent": spent,
        "identity and sums": identity,
        "states": lambda path: [plain(SiteState(path / "private/run-1/states").read(r)) for r in (0, 1)],
        "personal": personal,
        "audit": command("federation", "audit", "{path}"),
        "audit --json": command("federation", "audit", "{path}", "--json"),
        "status": command("federation", "status", "{path}", "--json"),
        "models": command("federation", "personal", "{path}"),
    }


def make_server(root: Path) -> tuple[Path, dict[str, Reader]]:
    """A server with a run, as its operator sees it."""
    Authority().write_kit(root / "server/kit", "server")
    path = runner.start(parse(task(root, "fedavg")), root / "server" / RUNS / "run").path
    write_json(path / SITES, {"s0": {"seen": 1.0, "asked": 1.0}})
    (root / "server/kit/startup/client.key").unlink()  # FLARE's
    return root / "server", {"status": command("federation", "status", "{path}", "--json")} | inside(
        OF_A_RUN, "runs/run"
    )


MAKERS = {
    "run": make_run,
    "weights": make_weights,
    "interrupted": make_interrupted,
    "comparison": make_comparison,
    "fit": make_fit,
    "trees": make_trees,
    "site": make_site,
    "server": make_server,
}
