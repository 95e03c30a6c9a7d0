#!/usr/bin/env bash
# Build the wheel, install it into an empty environment, and use it from an empty folder, away from the checkout.
#   tools/try_wheel.sh PYTHON          dependencies are those of PYTHON's environment; fedtailor itself is the wheel
#   tools/try_wheel.sh PYTHON --full   dependencies are installed anew, as a stranger gets them
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:?which Python}
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
unset PYTHONPATH
export OMP_NUM_THREADS=1 XDG_CONFIG_HOME=$place/config

"$python" "$root/tools/dist.py" --twice --out "$place/dist"
wheel=$(ls "$place"/dist/*.whl)
"$python" -m venv "$place/venv"
bin=$place/venv/bin
if [ "${2:-}" = --full ]; then
  "$bin/pip" install --quiet --disable-pip-version-check --constraint "$root/constraints.txt" numpy torch==2.13.0
  "$bin/pip" install --quiet --disable-pip-version-check --constraint "$root/constraints.txt" "$wheel"
else
  site=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/dependencies.pth"
  "$bin/pip" install --quiet --disable-pip-version-check --no-index --no-deps "$wheel"
fi

mkdir "$place/empty" && cd "$place/empty"
"$bin/python" - "$place" <<'CHECK'
import pathlib, sys
import fedtailor
home = pathlib.Path(fedtailor.__file__).resolve()
assert home.is_relative_to(pathlib.Path(sys.argv[1]).resolve()), f"{home} is not the wheel"
CHECK
"$bin/python" - <<'SITES'
import random
from pathlib import Path
Path("sites").mkdir()
draw = random.Random(0)
for number, site in enumerate(("north", "south", "west")):
    rows = []
    for _ in range(80):
        age, dose = draw.gauss(60, 9), draw.gauss(number, 1)
        rows.append(f"{age:.1f},{dose:.2f},{draw.choice('ab')},{'yes' if (age - 60) / 9 + dose - number > 0 else 'no'}")
    Path(f"sites/{site}.csv").write_text("age,dose,arm,outcome\n" + "\n".join(rows) + "\n")
SITES

step() { echo "\$ fedtailor $*"; "$bin/fedtailor" "$@" > said 2>&1 || { cat said; exit 1; }; tail -n 3 said; }
step --version
step demo
step reproduce learn2pfed/table1 --rows oracle --seeds 1
step fit sites --target outcome --rounds 4 --out runs/sites
step predict runs/sites --site north sites/north.csv --out predicted.csv
step export runs/sites --site north --to torch
step export runs/sites --site south --to safetensors
step report runs/demo
step show runs/demo --json
step schema
for file in runs/demo/report.html runs/demo/table.md runs/learn2pfed-table1-cpu/table.md runs/sites/report.html \
  predicted.csv north.pt2 south.safetensors; do
  test -s "$file" || { echo "$file is missing"; exit 1; }
done
echo "the wheel works: $(basename "$wheel")"
