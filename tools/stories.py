"""Time the three stories of the README, as a stranger follows them: python tools/stories.py FEDTAILOR

FEDTAILOR is the command of an installed wheel. The blocks are read from the README and run in an empty folder.
Processor time is that of all processes, also of those that a federation starts in the background.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
STORIES = ("The analyst", "The researcher", "The operator")
SITES = """
import random
from pathlib import Path
Path("sites").mkdir()
draw = random.Random(0)
for number, site in enumerate(("north", "south", "west")):
    rows = []
    for _ in range(200):
        age, dose = draw.gauss(60, 9), draw.gauss(number, 1)
        rows.append(f"{age:.1f},{dose:.2f},{draw.choice('ab')},{'yes' if (age - 60) / 9 + dose - number > 0 else 'no'}")
    Path(f"sites/{site}.csv").write_text("age,dose,arm,outcome\\n" + "\\n".join(rows) + "\\n")
"""


def commands(story: str) -> list[list[str]]:
    """What a story runs; files that it shows are written first."""
    text = README.read_text(encoding="utf-8").split(f"### {story}")[1].split("\n## ")[0].split("\n### ")[0]
    found = []
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if file := re.match(r"# ([\w-]+\.(?:toml|py))\n", block):
            Path(file[1]).write_text(block, encoding="utf-8")
        elif language == "python":
            found.append(["python", "-c", block])
        else:
            found += [line.split() for line in block.splitlines() if line.startswith("fedtailor ")]
    return found


def main() -> None:
    fedtailor = Path(sys.argv[1]).absolute()
    environment = os.environ | {"PYTHONPATH": "", "PATH": f"{fedtailor.parent}:{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        subprocess.run([fedtailor.with_name("python"), "-c", SITES], check=True, env=environment)
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
        print("| story | command | processor s | wall s |\n|---|---|---:|---:|")
        for story in STORIES:
            for words in commands(story):
                words[0] = str(fedtailor.with_name(words[0]))
                before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
                done = subprocess.run(words, env=environment, capture_output=True, text=True)
                wall, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
                if done.returncode:
                    sys.exit(f"{words}: {done.stdout[-500:]}{done.stderr[-500:]}")
                used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                shown = (
                    f"`{' '.join(['fedtailor', *words[1:]])}`" if words[1] != "-c" else "`ft.fit`, predict, in Python"
                )
                print(f"| {story} | {shown} | {used:.0f} | {wall:.0f} |", flush=True)


if __name__ == "__main__":
    main()
