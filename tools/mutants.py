"""Does make test notice when the code is wrong? python tools/mutants.py --seed 0 --count 40

Makes small mistakes at random (another operator, another number, a statement left out), each in a copy of the
repository, and runs the tests of make test that reach the line. Which these are is recorded once, by a run under
coverage. Prints and writes to build/mutants.json what was noticed; run again, it goes on where it ended.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core", "aggregation", "algorithms", "tables")
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
DROPPED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.If, ast.For)
SECONDS = 300  # at least, before a mutant counts as one that never ends


class Recorder:
    """A pytest plugin: each line is recorded with the test that reached it, each test with its seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began, running = time.perf_counter(), coverage.Coverage.current()
        assert running
        running.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            running.switch_context("")
            self.seconds[item.nodeid] = time.perf_counter() - began


def record(out: Path) -> None:
    """One run of the tests of make test, in this process; by file and line the tests that reach it."""
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    running = coverage.Coverage(data_file=None, source=[str(ROOT / "src/fedtailor" / name) for name in PACKAGES])
    recorder = Recorder()
    running.start()
    pytest.main(["-q", "-m", "not thorough", "-p", "no:cacheprovider", str(ROOT / "tests")], plugins=[recorder])
    running.stop()
    data = running.get_data()
    lines = {str(Path(f).relative_to(ROOT)): data.contexts_by_lineno(f) for f in data.measured_files()}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"seconds": recorder.seconds, "lines": lines}))


def mutants(path: Path) -> Iterator[tuple[str, ast.AST, str]]:
    """What can be made wrong in a file: the kind of mistake, where, and what stands there then."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        texts = {n for t in ast.walk(function) if isinstance(t, ast.JoinedStr) for n in ast.walk(t)}  # no columns
        for node in (n for part in function.body for n in ast.walk(part) if n not in texts):
            wrong: Any = copy.deepcopy(node)
            if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in OPERATORS:
                wrong.op = OPERATORS[type(node.op)]()
                yield "operator", node, f"({ast.unparse(wrong)})"
            elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
                wrong.ops[0] = OPERATORS[type(node.ops[0])]()
                yield "operator", node, f"({ast.unparse(wrong)})"
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
                yield "operator", node, f"({ast.unparse(node.operand)})"
            elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
                changed = (not node.value) if isinstance(node.value, bool) else node.value + 1
                yield "constant", node, repr(changed)
            elif isinstance(node, DROPPED) and not isinstance(getattr(node, "value", None), ast.Constant):
                yield "dropped", node, "pass"


def chosen(seed: int, count: int) -> list[tuple[Path, str, ast.AST, str]]:
    """The first mutants of a seed; more of them begin with the same ones."""
    found: dict[str, list[tuple[Path, str, ast.AST, str]]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / "src/fedtailor" / package).rglob("*.py")):
            for kind, node, wrong in mutants(path):
                found.setdefault(kind, []).append((path, kind, node, wrong))
    draw = random.Random(seed)
    for of_a_kind in found.values():
        draw.shuffle(of_a_kind)
    return [found[kind].pop() for kind in draw.choices(sorted(found), k=count)]


def changed(path: Path, node: Any, wrong: str) -> str:
    """The file with another text in place of a node; columns of ast count bytes."""
    lines = path.read_bytes().splitlines(keepends=True)
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + wrong.encode() + after).decode()


def tried(path: Path, node: Any, wrong: str, known: dict[str, Any]) -> dict[str, Any]:
    """Whether the tests that reach a line notice that it is another one."""
    name, before, after = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"), changed(path, node, wrong)
    lines = known["lines"].get(name, {})
    tests = {t for line in range(node.lineno, node.end_lineno + 1) for t in lines.get(str(line), ())} - {""}
    diff = "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), name, name, n=1))
    result: dict[str, Any] = {"file": name, "line": node.lineno, "diff": diff, "tests": len(tests), "seconds": 0.0}
    if not tests:
        return result | {"result": "survived", "by": "no test reaches it"}
    began, most = time.perf_counter(), 3 * sum(known["seconds"].get(t, 0) for t in tests) + SECONDS
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder) / "repository"
        shutil.copytree(ROOT, there, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "runs", ".*_cache"))
        (there / name).write_text(after, encoding="utf-8")
        package = name.split("/")[2]
        (Path(folder) / "tests").write_text("\n".join(sorted(tests, key=lambda t: (f"/{package}/" not in t, t))))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"@{folder}/tests"]
        command += ["-n", "2"] if len(tests) > 50 else []
        environment = os.environ | {"PYTHONPATH": str(there / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(command, cwd=there, env=environment, capture_output=True, text=True, timeout=most)
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            noticed, by = done.returncode != 0, (failed or done.stdout.splitlines()[-1:] or [""])[0][:300]
        except subprocess.TimeoutExpired:
            noticed, by = True, f"no end after {most:.0f} s"
    result["seconds"] = round(time.perf_counter() - began, 1)
    return result | {"result": "killed" if noticed else "survived", "by": by if noticed else ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--map", type=Path, default=ROOT / "build/reached.json", help="made where it is not there")
    parser.add_argument("--out", type=Path, default=ROOT / "build/mutants.json")
    options = parser.parse_args()
    if not options.map.exists():  # in a process of its own: modules that are loaded here would not be seen
        code = f"from tools.mutants import record; from pathlib import Path; record(Path({str(options.map)!r}))"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    known = json.loads(options.map.read_text())
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    for number, (path, kind, node, wrong) in enumerate(chosen(options.seed, options.count)):
        key = f"seed {options.seed}, {number}"
        if key not in found:
            found[key] = {"kind": kind} | tried(path, node, wrong, known)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found, indent=1))
        print(f"{key}: {kind}, {found[key]['result']} {found[key]['by']}\n{found[key]['diff']}", flush=True)
    results = [found[f"seed {options.seed}, {number}"]["result"] for number in range(options.count)]
    print(f"{results.count('killed')} of {len(results)} noticed")


if __name__ == "__main__":
    main()
