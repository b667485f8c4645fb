#!/usr/bin/env bash
# Passes all tests that this machine can run: style, types, floors, then pytest. Arguments go to pytest.
# Takes about 37 minutes on two quiet cores. The last lines say which tests are left out here and why; pytest's own
# closing line is the very last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH"
# The tests start hundreds of interpreters: each would compile torch and vLLM anew.
unset PYTHONDONTWRITEBYTECODE

# The tests of Slurm bring up a cluster of their own. Where its programs are missing and cannot be installed, they say so.
if ! command -v sbatch >/dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    (timeout 120 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 240 apt-get install -qq -y --no-install-recommends \
        slurm-wlm munge iproute2 shellcheck) >/dev/null 2>&1 || echo "no Slurm here: its tests are left out"
fi

ruff check .
ruff format --check .
pyright
lint-imports
pytest "$@"
