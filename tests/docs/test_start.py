"""Pages for those who come new: other libraries, the gallery, agents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedtailor.algorithms import algorithms
from fedtailor.cli.main import app
from fedtailor.experiments.config import parse, read_toml
from tests.docs.pages import ROOT, run_page


@pytest.mark.parametrize(("page", "made"), [("from-pfllib", "runs/pfllib/table.md"), ("from-fl-bench", "runs/flbench")])
def test_other_libraries(page: str, made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(ROOT / f"docs/how-to/{page}.md", monkeypatch)
    assert Path(made).exists()


PFLLIB = {  # options of its main.py at commit d832e76, and the values that its model and algorithm branches know
    *("-go", "-dev", "-did", "-data", "-ncl", "-m", "-lbs", "-lr", "-ld", "-ldg", "-gr", "-tc", "-ls", "-algo", "-jr"),
    *("-rjr", "-nc", "-pv", "-t", "-eg", "-sfn", "-ab", "-dlg", "-dlgg", "-bnpc", "-nnc", "-ften", "-fd", "-vs", "-ml"),
    *("-fs", "-cdr", "-tsr", "-ssr", "-ts", "-tth", "-bt", "-lam", "-mu", "-K", "-lrp", "-M", "-itk", "-alk", "-sg"),
    *("-al", "-pls", "-tau", "-fte", "-dlr", "-L", "-nd", "-glr", "-hd", "-se", "-lf", "-slr", "-et", "-s", "-p"),
    *("-mlr", "-Ts", "-Te", "-mo", "-klw", "-fsb", "-ca", "-cmss"),
}
PFLLIB_MODELS = {"MLR", "CNN", "DNN", "ResNet18", "ResNet10", "ResNet34", "AlexNet", "GoogleNet", "MobileNet", "LSTM"}
PFLLIB_ALGORITHMS = {
    *("FedAvg", "Local", "FedMTL", "PerAvg", "pFedMe", "FedProx", "FedFomo", "FedAMP", "APFL", "FedPer", "Ditto"),
    *("FedRep", "FedPHP", "FedBN", "FedROD", "FedProto", "FedDyn", "MOON", "FedBABU", "APPLE", "FedGen", "SCAFFOLD"),
    *("FD", "FedALA", "FedPAC", "LG-FedAvg", "FedGC", "FML", "FedKD", "FedPCL", "FedCP", "GPFL", "FedNTD", "FedGH"),
    *("FedDBE", "FedCAC", "PFL-DA", "FedLC", "FedAS", "FedCross"),
}


def test_options_of_pfllib_are_those_of_its_parser() -> None:
    page = (ROOT / "docs/how-to/from-pfllib.md").read_text(encoding="utf-8")
    command = re.search(r"python main\.py (.*)", page)
    assert command is not None
    given = command[1].split()
    assert set(given[::2]) <= PFLLIB
    values = dict(zip(given[::2], given[1::2], strict=True))
    assert values["-m"] in PFLLIB_MODELS
    assert values["-algo"] in PFLLIB_ALGORITHMS
    table = page.split("## Equivalent terms")[1].split("##")[0]
    assert set(re.findall(r"`(-\w+)", table)) <= PFLLIB
    ours = {name.replace("-", "").lower() for name in algorithms()}
    names = {"PerAvg": "perfedavg", "LG-FedAvg": "lgfedavg"}
    not_ours = {n for n in PFLLIB_ALGORITHMS if names.get(n, n.lower().replace("-", "")) not in ours}
    missing = page.split("## Methods that are not included")[1]
    assert not {n for n in not_ours if n not in missing}


FL_BENCH = {  # src/server at commit 06e658b
    *("adcol", "apfl", "ccvr", "cfl", "ditto", "elastic", "fedadmm", "fedah", "fedala", "fedap", "fedas", "fedavg"),
    *("fedavgm", "fedbabu", "fedbn", "feddyn", "fedem", "fedfed", "fedfomo", "fedgen", "fediir", "fedlc", "fedmd"),
    *("fedopt", "fedpac", "fedper", "fedproto", "fedprox", "fedrep", "fedrod", "fedsr", "floco", "flute", "knnper"),
    *("lgfedavg", "local", "metafed", "moon", "pefll", "perfedavg", "pfedfda", "pfedhn", "pfedla", "pfedme"),
    *("pfedsim", "scaffold"),
}


def test_methods_of_fl_bench_are_here_or_named_with_the_reason() -> None:
    page = (ROOT / "docs/how-to/from-fl-bench.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page.split("## Methods that are not included")[1], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == FL_BENCH - {name.replace("-", "") for name in algorithms()}


def test_flower(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/how-to/from-flower.md", monkeypatch)
    assert "model      net:Net" in capsys.readouterr().out


def test_agents(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(ROOT / "docs/agents.md", monkeypatch)
    assert 0 < float(capsys.readouterr().out.strip().splitlines()[-1]) <= 1
    assert Path("runs/agent/report.html").exists()


def test_every_picture_is_there_and_the_run_of_the_gallery_is_that_of_the_pictures() -> None:
    page = (ROOT / "docs/gallery.md").read_text(encoding="utf-8")
    for image in re.findall(r"\]\((images/[^)]+)\)", page):
        assert (ROOT / "docs" / image).stat().st_size > 20_000, image
    script = (ROOT / "tools/pictures.sh").read_text(encoding="utf-8")
    assert re.search(r"--set.*algorithm\.name=learn2pfed-net.*--set.*rounds=10", script)
    Path("shared.toml").write_text(page.split("```toml\n# shared.toml\n")[1].split("```")[0])
    demo = {k: v for k, v in read_toml(ROOT / "configs/demo.toml").items() if k != "compare"}
    demo |= {"rounds": 10, "algorithm": {"name": "learn2pfed-net"}}
    assert parse(read_toml(Path("shared.toml"))) == parse(demo)


def test_the_short_page_for_agents_names_what_exists() -> None:
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    known = {name.rstrip("_") for name in known} | {"federation"}
    assert set(re.findall(r"`fedtailor ([a-z]+)", text)) <= known
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / target).exists(), target
