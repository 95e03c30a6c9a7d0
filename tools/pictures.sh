#!/usr/bin/env bash
# The pictures of README and gallery, made again: the recording of the demo and reports as a browser shows them.
#   tools/pictures.sh PYTHON            (needs Chromium)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?which Python}
images=docs/images
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

"$python" tools/recording.py "$images/demo.svg" --before "pip install fedtailor" -- fedtailor demo

shot() { # name, page, height
  chromium --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking \
    --disable-component-update --disable-sync --user-data-dir="$place/profile" --hide-scrollbars \
    --virtual-time-budget=20000 --window-size="1200,$3" --screenshot="$images/$1.png" "file://$2" 2> /dev/null
}
fedtailor() { "$python" -m fedtailor "$@" > /dev/null; }

fedtailor demo --out "$place/demo"
shot report "$place/demo/report.html" 1000
sed '/^\[compare\]/,$d' configs/demo.toml > "$place/run.toml"
fedtailor run "$place/run.toml" --set algorithm.name=learn2pfed-net --set rounds=10 --out "$place/run"
fedtailor explain "$place/run"
fedtailor report "$place/run"
shot report-run "$place/run/report.html" 1400
if [ -n "${FEDTAILOR_DATA:-}" ]; then
  fedtailor fit heart-disease --rounds 16 --out "$place/fit"
  shot report-fit "$place/fit/report.html" 1200
fi
