"""Own code that changed, or that nobody else can import: never old figures, and never without a word."""

from __future__ import annotations

import linecache
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

import fedtailor as ft
from fedtailor import algorithms
from fedtailor.algorithms.local import Local
from fedtailor.core.algorithm import Algorithm
from fedtailor.errors import RunError
from fedtailor.experiments import runner
from fedtailor.experiments.config import CompareConfig, parse
from fedtailor.experiments.store import RunFolder
from fedtailor.serving.export import export, read_safetensors
from fedtailor.serving.onboard import onboard
from fedtailor.studies.compare import run_grid
from fedtailor.studies.explain import explain
from fedtailor.tables.fit import fit
from fedtailor.tables.serve import personal
from tests.made_sites import make_sites
from tests.small import DIGITS, config, one_after_the_other, stop_after

ALGORITHM = """
from dataclasses import dataclass
from fedtailor.algorithms.local import Local
from fedtailor.core.algorithm import Algorithm
from own_method_parts import constants


@dataclass(frozen=True)
class Mine(Algorithm):
    epochs: int = 1
    client_init, local, round, personal = Local.client_init, Local.local, Local.round, Local.personal
"""
MODEL = """
from torch import nn
from {helpers}.layers import Dense


class Net(nn.Module):
    head = ("out",)

    def __init__(self, shape, outputs):
        super().__init__()
        self.out = Dense(shape[0], outputs)

    def forward(self, x):
        return self.out(x)
"""
LAYERS = "from torch.nn import Linear as Dense\nfrom . import sizes\n"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder in which modules are found, and nobody's classes are known."""
    monkeypatch.setattr(algorithms, "_registered", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    one_after_the_other(monkeypatch)


def own_model(name: str) -> Path:
    """A module with a model that needs two others; returns one that it knows only through another."""
    Path(f"{name}_parts").mkdir()
    for file, text in {"__init__": "", "layers": LAYERS, "sizes": "WIDTH = 3\n"}.items():
        Path(f"{name}_parts/{file}.py").write_text(text)
    Path(f"{name}.py").write_text(MODEL.format(helpers=f"{name}_parts"))
    return Path(f"{name}_parts/sizes.py")


def tables(model: str, **more: Any) -> dict[str, Any]:
    made = {"source": "folder", "path": "sites", "target": "outcome", "test": 0.2, "val": 0.2}
    return {"rounds": 3, "data": made, "model": {"name": model}, "checkpoint": {"seconds": 0}} | more


def test_a_run_does_not_go_on_with_other_code() -> None:
    make_sites(Path("sites"), sites=2, rows=20)
    needed = own_model("own_net_a")
    folder = Path("run")
    with pytest.raises(KeyboardInterrupt):
        runner.start(parse(tables("own_net_a:Net")), folder, None, stop_after(1))
    was = needed.read_text()
    needed.write_text("WIDTH = 4\n")
    with pytest.raises(RunError, match=r"model.name.*own_net_a:Net.*own_net_a_parts/sizes.py"):
        runner.resume(folder)
    assert len(RunFolder(folder).metrics()) == 1
    needed.write_text(was)
    assert runner.resume(folder).results is not None
    Path("own_net_a.py").write_text(MODEL.format(helpers="own_net_a_parts") + "\n# other\n")
    with pytest.raises(RunError, match=r"own_net_a.py"):
        runner.resume(folder)


def test_a_finished_run_serves_with_a_changed_file_and_says_so() -> None:
    sites = make_sites(Path("sites"), sites=2, rows=20)
    needed = own_model("own_net_b")
    made = tables("own_net_b:Net", algorithm={"name": "fedselect"})
    runner.start(parse(made), Path("run"))
    explain(Path("run"))
    (file, _) = export(Path("run"), "s0", "safetensors")
    read_safetensors(file)
    needed.write_text("WIDTH = 4\n")
    words = r"model.name.*own_net_b:Net.*own_net_b_parts/sizes.py"
    for use in (lambda: personal(Path("run"), "s0"), lambda: read_safetensors(file)):
        (note,) = use().notes
        assert re.search(words, note)
    export(Path("run"), "s0", "torch")
    with pytest.raises(RunError, match=words):  # a newcomer would be trained with other code
        onboard(Path("run"), sites / "s1.csv", "late")


def test_a_model_with_other_parameters_does_not_serve() -> None:
    make_sites(Path("sites"), sites=2, rows=20)
    own_model("own_net_d")
    runner.start(parse(tables("own_net_d:Net")), Path("run"))
    file, text = Path("own_net_d.py"), Path("own_net_d.py").read_text()
    file.write_text(text + "\n\nclass Unrelated(Net):\n    pass\n")
    sys.modules.pop("own_net_d")
    assert personal(Path("run"), "s0").notes
    layer = "Dense(shape[0], outputs)"
    others = {f"{layer[:-1]}, bias=False)": "out.bias", "Dense(shape[0] + 1, outputs)": "out.weight"}
    for other, name in others.items():
        file.write_text(text.replace(layer, other))
        sys.modules.pop("own_net_d")
        with pytest.raises(RunError, match=name):
            personal(Path("run"), "s0")
    file.write_text(text.replace("self.out", "self.last").replace('("out",)', '("last",)'))
    sys.modules.pop("own_net_d")
    with pytest.raises(RunError, match=r"last"):
        personal(Path("run"), "s0")


def test_a_comparison_does_not_show_old_figures_of_changed_code() -> None:
    Path("own_method_parts").mkdir()
    Path("own_method_parts/constants.py").write_text("A = 1\n")
    Path("own_method.py").write_text(ALGORITHM)
    entries = ["local", {"name": "own_method:Mine", "label": "Mine"}]
    grid: CompareConfig = parse(
        DIGITS | {"rounds": 1, "compare": {"algorithms": entries, "seeds": [0, 1], "workers": 1}}, CompareConfig
    )
    ran: list[str] = []

    def again() -> list[str]:
        ran.clear()
        run_grid(grid, Path("grid"), None, lambda cell, round, rounds: ran.append(cell))
        return ran

    again()
    times = {p.parent.name: p.stat().st_mtime_ns for p in Path("grid").glob("*/results.json")}
    Path("own_method_parts/constants.py").write_text("A = 2\n")
    words = (
        r"grid: the code of algorithm.name own_method:Mine changed \(own_method_parts/constants.py\) since mine-seed0"
    )
    with pytest.raises(RunError, match=f"{words}, mine-seed1 ran; remove these folders .* --fresh .* --out"):
        again()
    for seed in (0, 1):
        shutil.rmtree(f"grid/mine-seed{seed}")
    again()
    later = {p.parent.name: p.stat().st_mtime_ns for p in Path("grid").glob("*/results.json")}
    assert {name for name in times if times[name] != later[name]} == {"mine-seed0", "mine-seed1"}


LOADER = """
import torch
from fedtailor.core.random import stream
from fedtailor import FederatedData, Rows


def load(seed, scale=1.0):
    rng = stream(seed, "own loader")
    x = torch.from_numpy(rng.normal(size=(60, 4))) * scale
    rows = Rows(x, (x[:, 0] > 0).long(), torch.tensor([0, 30, 60]))
    return FederatedData("own", "classification", ("a", "b"), rows, rows, rows, 2)
"""


def test_a_changed_loader_is_noticed_by_runs_and_comparisons() -> None:
    Path("own_loader.py").write_text(LOADER)
    task = {
        "rounds": 3,
        "data": {"source": "own_loader:load"},
        "model": {"name": "linear"},
        "checkpoint": {"seconds": 0},
    }
    with pytest.raises(KeyboardInterrupt):
        runner.start(parse(task), Path("run"), None, stop_after(1))
    made: CompareConfig = parse(task | {"compare": {"algorithms": ["local"], "workers": 1}}, CompareConfig)
    run_grid(made, Path("grid"), None, lambda *step: None)
    Path("own_loader.py").write_text(LOADER.replace("scale=1.0", "scale=2.0"))
    words = r"the code of data.source own_loader:load changed \(own_loader.py\)"
    with pytest.raises(RunError, match=words):
        runner.resume(Path("run"))
    with pytest.raises(RunError, match=words):
        run_grid(made, Path("grid"), None, lambda *step: None)


def test_a_fit_does_not_show_old_figures_of_changed_code() -> None:
    make_sites(Path("sites"), sites=2, rows=20)
    needed = own_model("own_net_c")
    source = {"source": "folder", "path": "sites", "target": "outcome"}
    given: dict[str, Any] = {"algorithm": "ditto", "rounds": 1, "values": {"model.name": "own_net_c:Net"}}
    record = fit(source, Path("fit"), **given)
    assert fit(source, Path("fit"), **given) == record
    needed.write_text("WIDTH = 4\n")
    with pytest.raises(RunError, match=r"model.name.*own_net_c:Net.*--out"):
        fit(source, Path("fit"), **given)


@dataclass(frozen=True)
class Namesake(Algorithm):
    """Predicts with the first model, and is called as one of the package."""

    title: ClassVar[str] = "FedAvg"

    def round(self, fed, server):
        return server

    def personal(self, me, server):
        return me.model.params


def test_a_class_of_ones_own_is_not_taken_for_one_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithms.register(Namesake)
    with pytest.raises(KeyboardInterrupt):
        runner.start(config("algorithm.name=fedavg"), Path("run"), None, stop_after(2))
    monkeypatch.setattr(algorithms, "_registered", {})  # as in another process
    with pytest.raises(RunError, match=r"^run: algorithm.name fedavg ") as refused:
        runner.resume(Path("run"))
    assert refused.value.code == "run.changed"


def typed(text: str, cell: str, keep: bool = True) -> type[Algorithm]:
    """A class as a notebook makes it; a console does not keep what was typed."""
    if keep:
        linecache.cache[cell] = (len(text), None, text.splitlines(keepends=True), cell)
    sys.modules.setdefault("a_notebook", ModuleType("a_notebook"))
    names: dict[str, Any] = {"__name__": "a_notebook"}
    exec(compile(text, cell, "exec"), names)  # noqa: S102 - the text is below
    kind: type[Algorithm] = names["Typed"]
    return kind


TYPED = """
from dataclasses import dataclass
from fedtailor.core.algorithm import Algorithm


@dataclass(frozen=True)
class Typed(Algorithm):
    strength: float = 1.0

    def round(self, fed, server):
        return server

    def personal(self, me, server):
        return {k: self.strength * v for k, v in me.model.params.items()}
"""


@pytest.mark.parametrize("new", [TYPED.replace("= 1.0", "= 2.0"), TYPED.replace("self.strength * v", "v + 1")])
def test_a_class_of_a_notebook_is_looked_after_too(new: str) -> None:
    algorithms.register(typed(TYPED, "<cell 1>"))
    with pytest.raises(KeyboardInterrupt):
        runner.start(config("algorithm.name=typed"), Path("run"), None, stop_after(2))
    algorithms.register(typed(new, "<cell 2>"))
    with pytest.raises(RunError, match=r"algorithm.name"):
        runner.resume(Path("run"))
    algorithms.register(typed(TYPED, "<cell 3>"))
    assert runner.resume(Path("run")).results is not None


def test_code_that_cannot_be_read_is_said() -> None:
    algorithms.register(typed(TYPED, "<console>", keep=False))
    folder = runner.start(config("algorithm.name=typed", "rounds=1"), Path("run"))
    assert folder.about["code"]["algorithm.name"]["files"] is None
    (note,) = [note for note in folder.about["notes"] if note.startswith("algorithm.name: ")]
    assert "typed" in note


PROGRAM = """
import sys
from dataclasses import dataclass
import fedtailor as ft
from fedtailor.algorithms.local import Local
from fedtailor.core.algorithm import Algorithm

print("read", file=sys.stderr)


@dataclass(frozen=True)
class Mine(Algorithm):
    epochs: int = 1
    client_init, local, round, personal = Local.client_init, Local.local, Local.round, Local.personal


{guard}ft.run(Mine(epochs=2), "digits", rounds=1, settings={{"model.hidden": [4]}}, out="run", progress=False)
"""


def run_program(name: str, guard: str) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(PROGRAM.format(guard=guard))
    done = subprocess.run([sys.executable, name], check=False, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("read") == 1  # the program is not run once more to import its class


def test_a_class_of_a_program_serves_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    run_program("here/my_program_for_a_test.py", 'if __name__ == "__main__":\n    ')
    assert RunFolder(Path("run")).config.algorithm.name == "my_program_for_a_test:Mine"
    with pytest.raises(RunError, match=r"'my_program_for_a_test'.*PYTHONPATH"):
        ft.load("run").personal("client-00")  # type: ignore[union-attr]
    monkeypatch.syspath_prepend("here")
    assert vars(ft.load("run").personal("client-00").algorithm) == {"epochs": 2}  # type: ignore[union-attr]


def test_a_program_that_trains_when_it_is_imported_does_not() -> None:
    run_program("my_other_program.py", "")
    with pytest.raises(RunError, match=r'my_other_program.*__name__.*"__main__"'):
        ft.load("run").personal("client-00")  # type: ignore[union-attr]


def test_a_class_that_nobody_can_import_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Inner(Algorithm):
        client_init, local, round, personal = Local.client_init, Local.local, Local.round, Local.personal
        epochs: int = 1

    run = ft.run(Inner, "digits", rounds=1, settings={"model.hidden": [4]}, out="run", progress=False)
    assert run.config.algorithm.name == "inner"
    run.personal("client-00")
    monkeypatch.setattr(algorithms, "_registered", {})  # as in another process
    words = 'no algorithm "inner".*; it was a class of the program that began the run .*: call fedtailor.alg'
    for use in (lambda: run.personal("client-00"), lambda: runner.resume(Path("run"))):
        with pytest.raises(RunError, match=words):
            use()
