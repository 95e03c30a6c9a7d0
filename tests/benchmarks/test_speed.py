"""The measurements of speed run, and the limits they compare with do what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.nn import functional as F

from benchmarks import peers, profile_rounds, records, speed, speed_page
from benchmarks.speed_core import Figure, Options, in_turns
from benchmarks.speed_limits import Workers, fused_epoch, one_pass, shares
from benchmarks.speed_tasks import LR, ConvNet

ROOT = Path(speed.__file__).parent.parent


class Here(Workers):
    """Workers without processes."""

    def load(self, make: Callable[..., dict[str, Callable[[], None]]], clients: Any, *args: Any) -> None:
        self.ways = make(clients, *args)

    def __call__(self, way: str) -> None:
        self.ways[way]()


def test_convnet_is_the_one_of_the_workload() -> None:
    assert sum(v.numel() for v in ConvNet().parameters()) == 582_026


def test_fused_epoch_is_sgd_of_every_client() -> None:
    x, y = torch.randn(3, 7, 5, dtype=torch.float64), torch.randint(4, (3, 7))
    layers = [torch.randn(3, *shape, dtype=torch.float64) for shape in ((6, 5), (1, 6), (4, 6), (1, 4))]
    fast = [v.clone() for v in layers]
    fused_epoch(x, y, 3, *fast)
    for client in range(3):
        u, a, v, b = own = [layer[client].clone().requires_grad_() for layer in layers]
        for rows in torch.arange(7).split(3):
            outputs = torch.relu(x[client, rows] @ u.T + a) @ v.T + b
            gradients = torch.autograd.grad(F.cross_entropy(outputs, y[client, rows]), own)
            with torch.no_grad():
                for layer, gradient in zip(own, gradients, strict=True):
                    layer -= LR * gradient
        for found, wanted in zip(fast, own, strict=True):
            torch.testing.assert_close(found[client], wanted.detach())


def test_one_pass_is_the_same_epoch() -> None:
    x, y = torch.randn(3, 7, 5, dtype=torch.float64), torch.randint(4, (3, 7))
    u, v = torch.randn(6, 5, dtype=torch.float64), torch.randn(3, 4, 6, dtype=torch.float64)
    biases = x.new_zeros(3, 1, 6), x.new_zeros(3, 1, 4)
    wanted = u.repeat(3, 1, 1), biases[0], v.clone(), biases[1]
    fused_epoch(x, y, 3, *wanted)
    moved = x.new_empty(3, 6, 5)
    one_pass(x, y, 3, u, v, moved)
    torch.testing.assert_close(moved, wanted[0])
    torch.testing.assert_close(v, wanted[2])


def test_every_client_is_shared_out_once_and_evenly() -> None:
    clients = [(torch.zeros(n), torch.zeros(n)) for n in (9, 1, 5, 4, 1)]
    assert [[len(x) for x, _ in share] for share in shares(clients, 2)] == [[9, 1], [5, 4, 1]]


def test_first_turn_does_not_count() -> None:
    now = 0.0
    lasts = iter([100.0, 1.0, 2.0, 9.0])

    def run() -> None:
        nonlocal now
        now += next(lasts)

    assert in_turns({"a": run}, 3, lambda: now) == {"a": 2.0}


@pytest.mark.parametrize("workload", ["A", "B", "C", "D", "F"])
def test_small_workloads_give_figures(workload: str) -> None:
    figures = list(speed.WORKLOADS[workload](Options(Here(), Here(), Here(), repeats=1, small=True)))
    assert figures
    assert all(f.ours > 0 and f.limit > 0 and f.workload.startswith(workload) for f in figures)


def test_command_writes_its_figures_and_the_page_shows_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.speed", "--small", "--workload", "B", "--repeats", "1", "--json"]
    told = subprocess.run(
        [*command, tmp_path / "speed.json"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    rows = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))
    assert [row["against"].endswith("kept") for row in rows] == [False, True, True]
    assert [row.get("goal") for row in rows] == [1.25, 1.25, None]
    for row in rows:
        assert row["ratio"] == row["ours_s"] / row["limit_s"]
        assert row["workload"] in told


def test_page_has_every_figure_and_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = [Figure(f"E: 100 of {n} clients", n / 1000, 0.1, "100", 1.15, clients=n) for n in (100, 1000)]
    figures = [
        Figure("A: net", 2.2, 2.0, "plain", 1.08, engine="pool"),
        Figure("E: memory", 3.5, 4.0, "4 GB", 1.0, "gb"),
        *grown,
    ]
    (tmp_path / "speed.json").write_text(json.dumps([f.row() for f in figures]), encoding="utf-8")
    rows = [
        {"workload": "A", "peer": "FedLab", "seconds": 3.09, "why": ""},
        {"workload": "A", "peer": "Flower", "seconds": None, "why": "not permitted"},
    ]
    (tmp_path / "peers.json").write_text(json.dumps(rows), encoding="utf-8")
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["speed_page", "--from", str(tmp_path), "--to", str(tmp_path)])
    speed_page.main()
    page = (tmp_path / "speed.md").read_text(encoding="utf-8")
    assert "| A: net | 2.2 s | 2 s | 1.10 | 1.08 | plain | pool |" in page
    assert "| E: memory | 3.5 GB | 4 GB | 0.88 | 1.00 | 4 GB |  |" in page
    assert "| FedLab | 3.090 |" in page
    assert "| Flower | not permitted |" in page
    picture = ElementTree.fromstring((tmp_path / "speed-growth.svg").read_text(encoding="utf-8"))
    (line,) = (element for element in picture if element.tag.endswith("polyline"))
    assert len(line.attrib["points"].split()) == 2


def test_a_framework_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers.measured("no-such-python", "FedLab", "A small 2", 9) == (
        None,
        "[Errno 2] No such file or directory: 'no-such-python'",
    )
    monkeypatch.setitem(peers.PEERS, "broken", (False, ("-c", "raise SystemExit('no wheel')"), ""))
    assert peers.measured(sys.executable, "broken", "A small 2", 9) == (None, "no wheel")
    monkeypatch.setitem(peers.PEERS, "works", (False, ("-c", "print('seconds 50 1 2 9')"), ""))
    assert peers.measured(sys.executable, "works", "A small 4", 9) == (2.0, "")


def test_inner_parts_do_not_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("benchmarks.profile_rounds.time.perf_counter", lambda: now)
    clock = profile_rounds.Clock()
    inner = clock.timed("inner", lambda: pass_time(3))

    def both() -> None:
        pass_time(1)
        inner()
        pass_time(1)

    clock.timed("outer", both)()
    pass_time(4)
    clock.switch()
    assert clock.spent == {"outer": 2, "inner": 3, profile_rounds.REST: 4}


@pytest.mark.parametrize("place", [place for places in profile_rounds.PARTS.values() for place in places])
def test_what_is_profiled_is_there(place: str) -> None:
    owner, name = profile_rounds.find(place)
    assert callable(getattr(owner, name))


def test_every_timed_function_is_there() -> None:
    for places in profile_rounds.PARTS.values():
        for owner, name in map(profile_rounds.find, places):
            assert callable(getattr(owner, name))
