"""Folders that fedtailor writes, and all of its own readers of their files: for tests and tools/damage.py."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console
from typer.testing import CliRunner

from fedtailor.cli.listing import print_run
from fedtailor.cli.main import app
from fedtailor.cli.records import run_record
from fedtailor.core.trees import items
from fedtailor.deploy.flare import audit
from fedtailor.deploy.flare.audit import SIZE
from fedtailor.deploy.flare.budget import Budget, Spent
from fedtailor.deploy.flare.policy import Policy
from fedtailor.deploy.flare.site import AUDIT, RUN
from fedtailor.deploy.flare.site_state import SiteState
from fedtailor.deploy.flare.standing import set_state, standing
from fedtailor.deploy.flare.sums import party
from fedtailor.errors import UserError
from fedtailor.experiments import runner
from fedtailor.experiments.config import parse
from fedtailor.experiments.store import FIT, RunFolder, read_json, read_tree
from fedtailor.report.reading import recorded
from fedtailor.serving.onboard import onboard
from fedtailor.serving.personal import sites_of
from fedtailor.serving.trees import TREES_FOLDER, Trees
from fedtailor.studies.compare import GRID
from fedtailor.studies.explain import explain
from fedtailor.studies.fit import fit
from tests.deploy.test_site import Asked
from tests.made_sites import make_sites
from tests.small import DIGITS

Reader = Callable[[Path], Any]
OUTSIDE = {  # nothing of fedtailor reads them again; or they are input, and nobody but their owner knows what is right
    "report.html": "a page for people",
    ".lock": "says who works on the run; the lock is the system's",
    "weights.csv": "for other programs",
    "site.toml": "the site's own input",
    "rows.safetensors": "the site's own input",
}
SMALL = 16_384  # bytes: of larger files places are drawn


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
    found = recorded(path)
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


def _shown(path: Path) -> str:
    with redirect_stdout(io.StringIO()) as out:
        print_run(Console(file=out, width=80), path, True)
    return out.getvalue()


def make_run(root: Path) -> tuple[Path, dict[str, Reader]]:
    """Of a method that keeps states, with what was learned about sharing."""
    tables = DIGITS | {"rounds": 2, "data": {"source": "digits", "clients": 2, "max_samples": 40}}
    runner.start(parse(tables | {"algorithm": {"name": "fedselect"}}), root / "run")
    explain(root / "run")
    return root / "run", OF_A_RUN


def make_comparison(root: Path) -> tuple[Path, dict[str, Reader]]:
    """Two methods, one seed."""
    import tomli_w

    about = {"algorithms": ["local"], "seeds": [0], "workers": 1}
    (root / "grid.toml").write_text(tomli_w.dumps(DIGITS | {"rounds": 1, "compare": about}))
    done = CliRunner().invoke(app, ["compare", str(root / "grid.toml"), "--out", str(root / "grid")])
    assert done.exit_code == 0, done.output
    readers: dict[str, Reader] = {"grid": lambda path: read_json(path / GRID), "show": _shown, "json": run_record}
    return root / "grid", readers | inside(OF_A_RUN, "local-seed0")


def make_fit(root: Path) -> tuple[Path, dict[str, Reader]]:
    """Two sites and a newcomer."""
    make_sites(root / "sites", sites=2, rows=40)
    made = root / "fit"
    fit({"source": "folder", "path": str(root / "sites"), "target": "outcome"}, made, algorithm="ditto", rounds=1)
    onboard(made, root / "sites/s1.csv", "late")
    readers: dict[str, Reader] = {"fit": lambda path: read_json(path / FIT), "show": _shown}
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
    set_state(made.folder, "paused")
    run, kit = made.folder / "run-1", made.file.parent / "kit"
    policy = Policy(algorithms=(), sends=(), sums_of=2, partners=("ada", "bo"))
    party(kit, policy, "ada", "run-1", 0, run).opened.claim(1, ("ada", "bo"))
    states = lambda path: [plain(SiteState(path / "run-1/states").read(r)) for r in (0, 1)]  # noqa: E731

    def personal(path: Path) -> Any:
        about = read_json(path / "run-1/personal/last.json")
        return about, plain(read_tree(path / "run-1/personal", about))

    return made.folder, {
        "standing": standing,
        "run": lambda path: read_json(path / "run-1" / RUN),
        "spent": lambda path: vars(Spent(Budget(), path / "run-1", 3)),
        "sums": lambda path: sorted(party(kit, policy, "ada", "run-1", 0, path / "run-1").opened.cohort),
        "states": states,
        "personal": personal,
        "record": lambda path: audit.told(path / AUDIT),
    }


MAKERS = {"run": make_run, "comparison": make_comparison, "fit": make_fit, "trees": make_trees, "site": make_site}

_seen: set[str] | None = None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _seen is not None and isinstance(args[0], str | Path):
        _seen.add(str(Path(args[0]).resolve()))


def opened_by(use: Callable[[], Any]) -> set[str]:
    """Files that are opened meanwhile."""
    global _seen
    if not hasattr(sys, "_fedtailor_hook"):
        sys.addaudithook(_hook)
        sys._fedtailor_hook = True  # type: ignore[attr-defined]
    _seen = set()
    try:
        use()
        return _seen
    finally:
        _seen = None


def places(length: int, most: int) -> list[int]:
    """All, or evenly spread ones with both ends."""
    if length <= most:
        return list(range(length))
    return sorted({0, 1, length - 2, length - 1} | {i * length // most for i in range(most)})


def changed(content: bytes, most: int) -> Iterator[tuple[str, bytes | None]]:
    """One bit of a byte, another one, and cut short, at these places; and no file."""
    for i in places(len(content), most):
        for bit in (1, 32):
            yield f"byte {i} ^ {bit}", content[:i] + bytes([content[i] ^ bit]) + content[i + 1 :]
        yield f"cut at {i}", content[:i]
    yield "no file", None


def outcome(use: Reader, path: Path) -> str:
    """What a reader gives, as text; an error for people is "named". Any other error is raised."""
    try:
        return json.dumps(use(path), default=str)
    except UserError:
        return "named"


def sweep(path: Path, readers: dict[str, Reader], most: int) -> tuple[Counter[str], list[str]]:
    """Damage every file; how often it was named or made no difference, and what passed in silence or broke."""
    wanted = {name: outcome(use, path) for name, use in readers.items()}
    assert "named" not in wanted.values(), wanted
    count, silent = Counter[str](), list[str]()
    reads = {name: opened_by(lambda use=use: use(path)) for name, use in readers.items()}  # type: ignore[misc]
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        content, where = file.read_bytes(), str(file.resolve())
        mine = [name for name in readers if where in reads[name]]
        if not mine and file.suffix == ".safetensors":  # some are opened by the library, which Python does not see
            mine = list(readers)
        if not mine:
            if file.name not in OUTSIDE and file.suffix not in (".tex", ".csv"):
                silent.append(f"{file.relative_to(path)}: nothing reads it")
            count["outside"] += 1
            continue
        for what, damaged in changed(content, most):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            for name in mine:
                try:
                    text = outcome(readers[name], path)
                except Exception as error:
                    silent.append(f"{file.relative_to(path)}, {what}, {name}: {type(error).__name__}: {error}")
                    continue
                if text == wanted[name] or text == "named":
                    count["no difference" if text == wanted[name] else "named"] += 1
                elif damaged is not None or not _is_missing(file):
                    silent.append(f"{file.relative_to(path)}, {what}, {name}: {text[:80]}")
        file.write_bytes(content)
    return count, silent


def _is_missing(file: Path) -> bool:
    """Files without which a folder is one that has not come so far, and says so."""
    return file.name in (
        "results.json", "manifest.json", "metrics.jsonl", "shares.json", "preparation.json", "newcomer.json",
        "index.json", "tables.json", "table.json", "standing.json", "spent.json", "sums.json", SIZE,
    )  # fmt: skip
