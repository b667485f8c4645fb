#!/usr/bin/env bash
# Makes launch/requirements-cpu.txt and launch/requirements-gpu.txt from pyproject.toml and launch/versions-stable.txt:
# the version of every package on Linux, x86_64, Python 3.11. launch/setup.sh installs no others there. Versions that
# still fit are kept; arguments go to `uv pip compile`, such as --upgrade.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/uv ] || launch/setup.sh
export VIRTUAL_ENV="$PWD/.venv"

compile() {
    .venv/bin/uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate \
        --custom-compile-command launch/lock.sh --constraints launch/versions-stable.txt --constraints launch/versions-libraries.txt "$@"
}

# What launch/setup.sh leaves out is left out here too. torch's CPU builds are in few indexes.
cpu() {
    compile pyproject.toml --extra cpu --extra ray --extra kubernetes --extra dev --output-file launch/requirements-cpu.txt \
        --excludes <(printf 'torchvision\ntorchaudio\ntorchcodec\ntriton\n') "$@"
}
cpu "$@" 2>/dev/null || cpu --torch-backend cpu "$@"

# With what launch/setup.sh builds Transformer Engine's extension with, and on torch's CUDA build wherever both are found.
# With trackio, because it needs an older pillow: launch/setup.sh installs it, alone or with dev, under these versions.
torch="$(sed -n 's/^ *"torch==\([^"]*\)",$/\1/p' pyproject.toml)"
compile pyproject.toml <(printf '%s\n' "torch!=$torch+cpu" wheel ninja pybind11 setuptools einops onnx onnxscript) \
    --extra gpu --extra ray --extra kubernetes --extra reasoning-gym --extra trackio \
    --output-file launch/requirements-gpu.txt \
    --excludes <(printf 'transformer-engine-cu12\ntransformer-engine-torch\n') "$@"
