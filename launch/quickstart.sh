#!/usr/bin/env bash
# The main job on any machine: makes a tiny model and its data, warms it up, trains it with GRPO, shows the result.
# `megarl quickstart` without an installed megarl: it makes the environment first. Arguments are recipe overrides for
# both runs, such as seed=1. An earlier quickstart is moved aside, not removed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh reasoning-gym
export PATH="$PWD/.venv/bin:$PATH"
# Every rank is an interpreter of its own: none should compile torch and vLLM anew.
unset PYTHONDONTWRITEBYTECODE
exec megarl quickstart "$@"
