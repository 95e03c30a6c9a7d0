"""Build wheel and sdist, the same bytes every time, and check them: python tools/dist.py --out dist

The files under version control are copied aside and built there, so that nothing left over comes along. Times are
SOURCE_DATE_EPOCH, by default that of the last commit.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST_TIME = 315532800  # 1980, where the times of zip files begin


def epoch() -> int:
    """The time that files in the archives have."""
    if "SOURCE_DATE_EPOCH" in os.environ:
        return max(int(os.environ["SOURCE_DATE_EPOCH"]), FIRST_TIME)
    last = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    return max(int(last.stdout or 0), FIRST_TIME) if last.returncode == 0 else FIRST_TIME


def copy_tracked(target: Path) -> None:
    """What git knows, or everything where there is no git; links stay links, and nobody's umask matters."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split("\0")[:-1] if listed.returncode == 0 else [p.name for p in ROOT.iterdir()]
    for name in names:
        source, file = ROOT / name, target / name
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, file, symlinks=True)
        elif source.is_symlink() or source.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, file, follow_symlinks=False)
            if not file.is_symlink():
                file.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)


def build(out: Path) -> list[Path]:
    """Wheel and sdist in the folder; the wheel is made from the sdist, as an installer makes it."""
    time = epoch()
    with tempfile.TemporaryDirectory() as folder:
        tree, made = Path(folder, "tree"), Path(folder, "dist")
        copy_tracked(tree)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made), str(tree)]
        environment = os.environ | {"SOURCE_DATE_EPOCH": str(time), "PYTHONPATH": ""}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}")
        normalise(next(made.glob("*.tar.gz")), time)
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy2(file, out)) for file in sorted(made.iterdir())]


def normalise(sdist: Path, time: int) -> None:
    """The same sdist with sorted names, one time, and nobody's name or mode."""
    content = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda m: m.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = time, 0, 0, "", ""
            member.mode, member.pax_headers = 0o755 if member.isdir() or member.mode & 0o100 else 0o644, {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with sdist.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=time) as packed:
        packed.write(content.getvalue())


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--twice", action="store_true", help="build a second time and compare the bytes")
    given = parser.parse_args()
    files = build(given.out)
    if given.twice:
        with tempfile.TemporaryDirectory() as folder:
            for first, second in zip(files, build(Path(folder)), strict=True):
                if digest(first) != digest(second):
                    sys.exit(f"{first.name}: two builds differ")
        print("two builds, same bytes")
    wheels = [str(file) for file in files if file.suffix == ".whl"]
    scripts = Path(sys.executable).parent
    for command in (["check-wheel-contents", *wheels], ["twine", "check", "--strict", *map(str, files)]):
        done = subprocess.run([scripts / command[0], *command[1:]], capture_output=True, text=True)
        print(done.stdout, end="")
        if done.returncode:
            sys.exit(done.stderr or f"{command[0]} failed")
    for file in files:
        print(f"{digest(file)}  {file}")


if __name__ == "__main__":
    main()
