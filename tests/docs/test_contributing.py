"""Where things are added: every file and name that the table tells of is there."""

import re

from tests.docs.pages import ROOT

TABLE = re.compile(r"^## Where do I add \.\.\.\n\n(.*?)\n\n", re.MULTILINE | re.DOTALL)


def test_files_and_names_are_there() -> None:
    found = TABLE.search((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert found is not None
    rows = found[1].splitlines()[2:]
    assert len(rows) >= 8
    for row in rows:
        words = re.findall(r"`([^`]+)`", row)
        paths = [ROOT / word for word in words if "/" in word]
        assert paths, row
        assert all(path.exists() for path in paths), row
        files = [file for path in paths for file in ([path] if path.is_file() else path.glob("*.py"))]
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        for name in set(words) - {str(path.relative_to(ROOT)) for path in paths}:
            assert re.search(rf"\b{re.escape(name)}\b", text), f"{name}: {row}"
