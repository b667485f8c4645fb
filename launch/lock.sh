#!/usr/bin/env bash
# Makes launch/requirements-{cpu,gpu}-PYTHON.txt for Python 3.11, 3.12 and 3.13 from pyproject.toml and
# launch/versions-stable.txt: the version of every package on Linux, x86_64. launch/setup.sh installs no others there.
# Versions that still fit are kept; arguments go to `uv pip compile`, such as --upgrade.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/uv ] || launch/setup.sh
export VIRTUAL_ENV="$PWD/.venv"
torch="$(sed -n 's/^ *"torch==\([^"]*\)",$/\1/p' pyproject.toml)"

# Compiles the lock of a kind and a Python, from further arguments of uv.
compile() {
    local kind="$1" python="$2"
    local file="launch/requirements-$kind-$python.txt"
    shift 2
    # A new Python begins with the versions of the first one, so that the locks differ only where they must.
    [ -f "$file" ] || cp "launch/requirements-$kind-3.11.txt" "$file"
    .venv/bin/uv pip compile --quiet --python-version "$python" --python-platform x86_64-manylinux_2_28 --no-annotate \
        --custom-compile-command launch/lock.sh --constraints launch/versions-stable.txt \
        --constraints launch/versions-libraries.txt --output-file "$file" "$@"
}

# What launch/setup.sh leaves out is left out here too.
cpu() {
    compile cpu "$@" pyproject.toml --extra cpu --extra ray --extra kubernetes --extra dev \
        --excludes <(printf 'torchvision\ntorchaudio\ntorchcodec\ntriton\n')
}

# With what launch/setup.sh builds Transformer Engine's extension with, and on torch's CUDA build wherever both are found.
# With trackio, because it needs an older pillow: launch/setup.sh installs it, alone or with dev, under these versions.
gpu() {
    compile gpu "$@" pyproject.toml <(printf '%s\n' "torch!=$torch+cpu" wheel ninja pybind11 setuptools einops onnx onnxscript) \
        --extra gpu --extra ray --extra kubernetes --extra reasoning-gym --extra trackio \
        --excludes <(printf 'transformer-engine-cu12\ntransformer-engine-torch\n')
}

for python in 3.11 3.12 3.13; do
    # torch's CPU builds are in few indexes.
    cpu "$python" "$@" 2>/dev/null || cpu "$python" --torch-backend cpu "$@"
    gpu "$python" "$@"
done
