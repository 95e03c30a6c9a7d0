"""fit, predict, export and onboard, as a person types them."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from fedtailor.experiments.store import FIT, read_json
from fedtailor.tables import fit as fitting
from tests.cli.conftest import Call
from tests.made_sites import make_sites

Refused = Callable[..., str]
QUICK = ("--target", "outcome", "--rounds", "2", "--algorithm", "fedper", "--set", "model.name=mlp")


@pytest.fixture
def fitted(call: Call, tmp_path: Path) -> Path:
    """A fit of three sites in the folder "out"."""
    make_sites(tmp_path / "sites", sites=3, rows=40)
    code, _, err = call("fit", "sites", *QUICK, "--set", "model.hidden=[4]", "--out", "out")
    assert (code, err) == (0, "")
    return tmp_path / "out"


def test_fit_prints_every_site_what_is_shared_and_where(call: Call, tmp_path: Path) -> None:
    make_sites(tmp_path / "sites", sites=3, rows=40)
    code, out, err = call("fit", "sites", *QUICK)
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines() if "│" in line) <= 80
    record = read_json(tmp_path / "runs/sites-fit" / FIT)
    for name, row in record["sites"].items():
        line = next(line for line in out.splitlines() if f"│ {name} " in line)
        for key in ("alone", "common", "personal"):
            assert f"{100 * row[key]:.2f}" in line
        assert "FedPer" in line
    assert "FedPer" in out
    assert "models     runs/sites-fit" in out
    assert "runs/sites-fit/report.html" in out
    assert "Personal models for sites" in (tmp_path / "runs/sites-fit/report.html").read_text(encoding="utf-8")
    assert out.split("task       ")[1].startswith("sites: classification of outcome, model mlp, 2 rounds")
    assert call("show", "runs/sites-fit").out in out
    assert call("fit", "sites", *QUICK).out.count("runs/sites-fit-2") == 2


def test_one_file_with_a_column_that_names_the_site(call: Call, tmp_path: Path) -> None:
    folder = make_sites(tmp_path / "sites", sites=2, rows=30)
    parts = [pl.read_csv(f).with_columns(pl.lit(f.stem).alias("where")) for f in sorted(folder.iterdir())]
    pl.concat(parts).write_parquet(tmp_path / "all.parquet")
    code, out, err = call("fit", "all.parquet", "--client-column", "where", *QUICK)
    assert (code, err) == (0, "")
    assert "│ s1 " in out
    assert (tmp_path / "runs/all-fit" / FIT).exists()


def test_codes_of_sites_and_classes_keep_their_zeros(call: Call, tmp_path: Path) -> None:
    lines = [f"{code},{i},{i * i % 7},0{i % 2}" for code in ("007", "7") for i in range(30)]
    (tmp_path / "all.csv").write_text("\n".join(["site,a,b,outcome", *lines]) + "\n")
    code, out, err = call("fit", "all.csv", "--client-column", "site", *QUICK, "--out", "out")
    assert (code, err) == (0, "")
    assert "│ 007 " in out
    (tmp_path / "new.csv").write_text("a,b\n1,2\n,\n")
    assert call("predict", "out", "--site", "007", "new.csv").code == 0
    found = pl.read_csv(tmp_path / "new-predicted.csv", infer_schema=False)
    assert found.columns == ["a", "b", "prediction", "probability 00", "probability 01"]
    assert found["prediction"].is_in(["00", "01"]).all()


def test_predict_export_and_onboard(call: Call, fitted: Path, tmp_path: Path) -> None:
    files = {p: p.read_bytes() for p in fitted.rglob("*") if p.is_file()}
    (tmp_path / "new.csv").write_text("a,b,ward\n2,-2,north\n-2,2,west\n")
    code, out, err = call("predict", "out", "--site", "s1", "new.csv")
    assert (code, err) == (0, "")
    assert re.search(r'"ward".*\b1\b.*"west"', out)
    assert "wrote new-predicted.csv: 2 rows, predicted by FedPer for s1\n" in out
    assert pl.read_csv(tmp_path / "new-predicted.csv").columns[-3:] == [
        "prediction",
        "probability ill",
        "probability well",
    ]
    assert call("export", "out", "--site", "s1", "--to", "torch").out == "wrote s1.pt2\nwrote s1.preparation.json\n"
    late = make_sites(tmp_path / "late", sites=1, rows=40) / "s0.csv"
    shutil.rmtree(tmp_path / "sites")  # the files of the others are not needed
    code, out, err = call("onboard", "out", "--data", late, "--name", "fifth")
    assert (code, err) == (0, "")
    assert "out/fedper-seed0/newcomers/fifth" in out
    assert call("predict", "out", "--site", "fifth", "new.csv", "--out", "fifth.parquet").code == 0
    assert len(pl.read_parquet(tmp_path / "fifth.parquet")) == 2
    assert call("export", "out", "--site", "fifth", "--to", "safetensors", "--out", "deep/fifth.safetensors").code == 0
    assert {p: p.read_bytes() for p in files} == files  # nobody else was touched
    made = {p for p in fitted.rglob("*") if p.is_file()} - set(files)
    assert {p.parent.name for p in made} == {"fifth"}


def test_a_run_of_a_configuration_predicts_too(call: Call, tmp_path: Path) -> None:
    make_sites(tmp_path / "sites", sites=2, rows=30)
    (tmp_path / "sites.toml").write_text('rounds = 1\n[data]\nsource = "folder"\npath = "sites"\ntarget = "outcome"\n')
    assert call("run", "sites.toml", "--set", "model.hidden=[4]", "--out", "run").code == 0
    assert call("predict", "run", "--site", "s0", "sites/s1.csv").code == 0
    assert len(pl.read_csv(tmp_path / "s1-predicted.csv")) == 30


@pytest.mark.usefixtures("fitted")
def test_mistakes_name_what_to_do(refused: Refused, tmp_path: Path) -> None:
    assert re.search(r'"s7".*s0.*s1.*s2', refused("predict", "out", "--site", "s7", "sites/s0.csv"))
    assert re.search(
        r'"tflite": .*onnx, torch, safetensors', refused("export", "out", "--site", "s0", "--to", "tflite")
    )
    assert re.search(r"another fit.* --out", refused("fit", "sites", "--target", "outcome", "--out", "out"))
    assert re.search(r'"outcom".*"outcome"', refused("fit", "sites", "--target", "outcom"))
    assert "sites: is a file" not in refused("fit", "nowhere", "--target", "outcome")
    assert "data.client_column" in refused("fit", "sites/s0.csv", "--target", "outcome")
    assert "--set lr: expected KEY=VALUE" in refused("fit", "sites", "--target", "outcome", "--set", "lr")
    assert not (tmp_path / "runs").exists()
    assert "p.json" in refused("predict", "out", "--site", "s0", "sites/s0.csv", "--out", "p.json")
    assert not (tmp_path / "p.json").exists()


def test_interrupt_says_how_to_go_on(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_sites(tmp_path / "my sites", sites=2, rows=30)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fitting, "choose_models", interrupt)
        code, _, err = call("fit", "my sites", *QUICK, "--set", "model.hidden=[4]")
    assert code == 130
    again = shlex.split(err.split("continue with: ")[1])
    assert again[:2] == ["fedtailor", "fit"]
    assert "unfinished fit" in call("show", "runs/my sites-fit").err
    assert "not finished" in call("predict", "runs/my sites-fit", "--site", "s0", "my sites/s0.csv").err
    assert "not finished" in call("onboard", "runs/my sites-fit", "--data", "my sites/s0.csv", "--name", "x").err
    assert call("report", "runs/my sites-fit").code == 0  # on what there is
    code, out, err = call(*again[1:])
    assert (code, err) == (0, "")
    assert "models     runs/my sites-fit" in out


def test_update_says_what_changed_and_every_command_uses_it(call: Call, refused: Refused, tmp_path: Path) -> None:
    make_sites(tmp_path / "sites", sites=2, rows=40, numbers=True)
    assert call("fit", "sites", "--target", "outcome", "--out", "out").code == 0
    assert "nothing to update: " in call("update", "out").out
    new = make_sites(tmp_path / "new", sites=1, rows=20, numbers=True) / "s0.csv"
    assert "--site" in refused("update", "out", "--rows", new)
    code, out, err = call("update", "out", "--rows", new, "--site", "s1")
    assert (code, err) == (0, "")
    told = read_json(tmp_path / "out/update-1" / FIT)["update"]
    assert (told["changed"], told["sites"]["s1"]["rows_after"]) == (["s1"], 60)
    line = next(line for line in out.split("changed sites")[1].splitlines() if "│ s1 " in line)
    for key in ("before", "after"):
        assert f"{told['sites']['s1'][key]:.4g}" in line
    assert "unchanged  1 sites" in out
    assert "models     out/update-1\nreport     out/report.html" in out
    assert call("show", "out").out in out
    assert call("update", "out/update-1", "--json").out.startswith("{")
    assert "no space" not in call("predict", "out", "--site", "s1", new).out
    assert "data, or new ones with --rows" in refused("update", "out", "--rows", new, "--site", "s1", "--data", "sites")


ROW = "1.0,2.0,north,ill\n-1.0,0.5,south,well\n"
MESSY: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "empty": ("", ("s1.csv: empty file", "put the client's rows there or remove it")),
    "duplicate header": (
        "a,b,a,outcome\n1,1,1,ill\n1,1,1,ill\n",
        ('s1.csv: column "a" appears more than once', "rename"),
    ),
    "column misspelt": (
        "a,b,wardd,outcome\n1,1,north,ill\n2,2,south,well\n",
        ('s1.csv: column "ward" is missing', 'data.ignore=["ward"]'),
    ),
    "target missing": ("a,b,ward\n1,1,north\n2,2,south\n", ('s1.csv: no target column "outcome"',)),
    "text among numbers": (
        "a,b,ward,outcome\n1,high,north,ill\n2,2,south,well\n",
        ('"b" has the text "high" in data row 1',),
    ),
    "wrong separator": (
        "a b ward outcome\n1 1 north ill\n2 2 south ill\n",
        ("a single one", "separate columns by comma"),
    ),
    "ragged": ("a,b,ward,outcome\n" + ROW + "1,2\n", ("line 4 has 2 fields, the header has 4",)),
    "not text": (b"\xff\x00\x81", ("s1.csv: not UTF-8",)),
    "dates for numbers": (
        "a,b,ward,outcome\n2024-01-01,1,north,ill\n2024-01-02,2,south,well\n",
        ("but dates in s1.csv",),
    ),
}


@pytest.mark.parametrize("case", MESSY)
def test_a_messy_file_is_named_and_nothing_is_written(refused: Refused, tmp_path: Path, case: str) -> None:
    make_sites(tmp_path / "sites", sites=3, rows=20)
    content, parts = MESSY[case]
    (tmp_path / "sites/s1.csv").write_bytes(content.encode() if isinstance(content, str) else content)
    before = sorted(tmp_path.rglob("*"))
    message = refused("fit", "sites", "--target", "outcome")
    for part in parts:
        assert part in message
    assert sorted(tmp_path.rglob("*")) == before
