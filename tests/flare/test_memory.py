"""What a long federation leaves in memory: nothing for each round."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtailor.experiments.store import json_text
from fedtailor.flare.nvidia import SharedTimer
from fedtailor.flare.operate import start_command
from tests.flare.test_site import Asked

numbers = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(numbers, lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner))


@given(values)
def test_text_is_that_of_the_library(value: Any) -> None:
    assert json_text(value) == json.dumps(value, indent=1)


def test_tuples_and_other_keys_are_written_as_by_the_library() -> None:
    value = {None: (), True: (1, [2.5, float("inf")]), 1.5: {}, "é": "\u2028"}
    assert json_text(value) == json.dumps(value, indent=1)


def unreachable(work: Any) -> int:
    """Objects that only a collection can free."""
    gc.collect()
    gc.disable()
    try:
        work()
        return gc.collect()
    finally:
        gc.enable()


def test_files_leave_no_cycles(tmp_path: Path) -> None:
    """In a process of its own: here other tests' threads may leave some."""
    program = """
import gc, sys
from pathlib import Path
from fedtailor.experiments.store import read_json, write_json

def work():
    for _ in range(20):
        write_json(Path(sys.argv[1]), {"a": [1, {"b": None}]})
        read_json(Path(sys.argv[1]))

work()
gc.collect()
gc.disable()
work()
print(gc.collect())
"""
    command = [sys.executable, "-c", program, str(tmp_path / "a.json")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["0"]


def test_a_site_leaves_no_cycles_after_a_round(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    asked.start()
    server = asked.experiment.algorithm.server_init(asked.experiment.model)

    def a_round(number: int) -> None:
        assert "error" not in asked.begin(number, number - 1)
        assert "error" not in asked.call(number)[0]
        assert "error" not in asked.ask({"op": "keep", "round": number})[0]
        assert "error" not in asked.ask({"op": "evaluate", "round": number, "splits": ["val"], "keep": ""}, server)[0]

    def two_more() -> None:
        a_round(2)
        a_round(3)

    a_round(1)
    assert unreachable(two_more) < 50


def test_timers_share_a_thread() -> None:
    calls: list[int] = []
    timers = [SharedTimer(0.05 + 0.001 * (i % 7), calls.append, (i,)) for i in range(300)]
    late = SharedTimer(60, calls.append, (-1,))
    broken = SharedTimer(0.01, lambda: 1 / 0)
    before = threading.active_count()
    for timer in [late, broken, *timers]:
        timer.start()
    timers[0].cancel()
    assert threading.active_count() <= before + 1
    until = time.monotonic() + 20
    while len(calls) < 299 and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(calls) == list(range(1, 300))
    assert calls[:40] == sorted(calls[:40], key=lambda i: (i % 7, i))
    late.cancel()


def test_received_streams_start_no_threads() -> None:
    pytest.importorskip("nvflare")
    from nvflare.fuel.f3.streaming.byte_receiver import RxTask

    from fedtailor.flare import nvidia  # noqa: F401

    before = threading.active_count()
    tasks = [RxTask(i, "site", SimpleNamespace()) for i in range(50)]
    for task in tasks:
        task._schedule_remove_task(30.0)
    assert threading.active_count() <= before + 1
    for task in tasks:
        RxTask.rx_task_map[task.origin, task.sid] = task
        task._remove_task()
        assert task.cleanup_timer is None
    assert not RxTask.rx_task_map


def test_old_cycles_are_collected_in_every_round() -> None:
    """In a process of its own: what is set aside stays so."""
    program = """
import gc, torch
from fedtailor.flare.nvidia import GarbageCollector

class Cycle:
    alive = 0
    def __init__(self):
        self.me = self
        Cycle.alive += 1
    def __del__(self):
        Cycle.alive -= 1

def a_round(number):
    kept = [Cycle() for _ in range(3000)]
    gc.collect(1)
    gc.collect(1)  # they are old now
    del kept
    gc.collect(1)
    before = Cycle.alive
    collector.note(number)
    return before, Cycle.alive

gc.disable()  # but for what is asked for here
collector = GarbageCollector()
first, second = a_round(1), a_round(2)
third = a_round(3)
print(*first, *second, *third, gc.get_freeze_count() > 50_000)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3000", "3000", "6000", "0", "3000", "0", "True"]


def test_participants_are_started_with_few_arenas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kit/startup").mkdir(parents=True)
    (tmp_path / "kit/startup/sub_start.sh").touch()
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    assert start_command("server", tmp_path).environment["MALLOC_ARENA_MAX"] == "2"
    monkeypatch.setenv("MALLOC_ARENA_MAX", "5")
    assert start_command("server", tmp_path).environment["MALLOC_ARENA_MAX"] == "5"


def test_a_site_imports_only_what_its_run_needs(tmp_path: Path) -> None:
    """They would take a second and a hundred megabytes at every site."""
    program = """
import sys
from pathlib import Path
import fedtailor.flare.nvidia, fedtailor.flare.site
assert not {"scipy", "pandas", "sympy", "sklearn"} & set(sys.modules), "imported with the site"
from fedtailor.experiments.building import assemble
from fedtailor.flare.protocol import config_for
from tests.flare.test_site import Asked
before = set(sys.modules)
asked = Asked(Path(sys.argv[1]))
assert "error" not in asked.start(), asked
assert "error" not in asked.begin(1, 0)
assert "error" not in asked.call()[0]
server = asked.experiment.algorithm.server_init(asked.experiment.model)
request = {"op": "evaluate", "round": 1, "splits": ["val"], "keep": "last"}
assert "error" not in asked.ask(request, server)[0]
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    pytest.importorskip("nvflare")
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not {"scipy", "pandas", "sympy", "sklearn", "matplotlib"} & set(done.stdout.split())
