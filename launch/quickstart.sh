#!/usr/bin/env bash
# The main job on any machine: makes a tiny model and its data, warms it up, trains it with GRPO, shows the result.
# Arguments are recipe overrides for both runs, such as seed=1. An earlier quickstart is moved aside, not removed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup.sh reasoning-gym
export PATH="$PWD/.venv/bin:$PATH"
# Every rank is an interpreter of its own: none should compile torch and vLLM anew.
unset PYTHONDONTWRITEBYTECODE

for folder in quickstart quickstart_sft; do
    if [ -e "runs/$folder" ]; then
        mkdir -p runs/earlier
        mv "runs/$folder" "runs/earlier/$folder-$(date +%Y%m%d-%H%M%S)"
    fi
done

python tools/make_tiny_model.py --out runs/quickstart_input/model --num-layers 2 --initializer-range 0.08
python tools/make_dataset.py --out runs/quickstart_input/data
megarl train launch/recipes/quickstart_sft.yaml "$@"
megarl train launch/recipes/quickstart.yaml "$@"
python tools/quickstart_report.py
