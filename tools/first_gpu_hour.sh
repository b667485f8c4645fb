#!/usr/bin/env bash
# The first hour on a GPU as one command: checks, tests, benchmarks and a training run, from small to large.
#   tools/first_gpu_hour.sh [--out DIR] [--only STEP ...] [--minutes LIMIT] [--list]
# A step that fails does not stop the next ones. DIR gets one JSON line for each step (steps.jsonl) and their outputs;
# DIR.tar.gz has them with stacks and versions. Without a GPU the same steps run on the CPU at small sizes.
# VENV names another environment than .venv.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${VENV:-$root/.venv}/bin/python"
# Without launch/setup.sh, the libraries may be on PYTHONPATH.
[ -x "$python" ] || python="python3"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$root/tools/first_gpu_hour.py" "$@"
