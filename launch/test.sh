#!/usr/bin/env bash
# Passes all tests that this machine can run: style, types, floors, then pytest. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH"
# The tests start hundreds of interpreters: each would compile torch and vLLM anew.
unset PYTHONDONTWRITEBYTECODE

ruff check .
ruff format --check .
pyright
lint-imports
pytest "$@"
