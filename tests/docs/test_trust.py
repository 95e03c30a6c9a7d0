"""The page on trust: every command names tests that there are, and the tables are those of the program."""

import re
import tomllib

from fedtailor.aggregation.identity import owners
from fedtailor.experiments.config import parse
from fedtailor.flare.policy import Budget, Policy
from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs/explanation/trust.md"


def test_every_attack_has_a_command_that_runs_it() -> None:
    row = r"^\| (T\d+) \|.*\| `pytest (\S+)(?: -k (t\d+))?`(?:;[^|]*)? \|$"
    rows = re.findall(row, PAGE.read_text(encoding="utf-8"), re.M)
    assert [name for name, _, _ in rows] == [f"T{n}" for n in range(1, 14)]
    for name, where, key in rows:
        assert (ROOT / where).exists()
        if key:
            assert key == name.lower()
            tests = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / where).glob("test_*.py"))
            assert f"def test_{key}_" in tests


def test_the_tables_are_those_of_the_program() -> None:
    policy, lies = (tomllib.loads(b.text) for b in blocks(PAGE) if b.language == "toml")
    assert Budget(**policy["policy"].pop("budget")) == Budget()
    partners = Policy(algorithms=(), sends=(), **policy["policy"]).partners
    assert owners(partners) == {"north": "A", "south": "A"}
    made = parse(lies)
    assert made.aggregation.mean == "trimmed"
    assert made.attack.name == "sign-flip"
