#!/usr/bin/env bash
# Makes launch/requirements-EXTRA-PYTHON.txt: the version of every package on Linux, x86_64. launch/setup.sh installs no
# others there. EXTRA is cpu or gpu for Python 3.11 to 3.13, from pyproject.toml and launch/versions-stable.txt; cpu-next or
# gpu-next for Python 3.12 and 3.13, from launch/versions-next.txt.
# Versions that still fit are kept; arguments go to `uv pip compile`, such as --upgrade.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/uv ] || launch/setup.sh
export VIRTUAL_ENV="$PWD/.venv"
torch="$(sed -n 's/^ *"torch==\([^"]*\)",$/\1/p' pyproject.toml)"

# Compiles the lock of an extra, a version set and a Python, from further arguments of uv.
compile() {
    local extra="$1" set="$2" python="$3"
    local file="launch/requirements-$extra-$python.txt"
    shift 3
    # A new lock begins with the versions of an older one, so that locks differ only where they must.
    [ -f "$file" ] || cp "launch/requirements-${extra%%-*}-$python.txt" "$file" 2>/dev/null ||
        cp "launch/requirements-$extra-3.11.txt" "$file"
    .venv/bin/uv pip compile --quiet --python-version "$python" --python-platform x86_64-manylinux_2_28 --no-annotate \
        --custom-compile-command launch/lock.sh --constraints "launch/versions-$set.txt" \
        --constraints launch/versions-libraries.txt --output-file "$file" "$@"
}

# What launch/setup.sh leaves out is left out here too.
cpu() {
    compile "$@" pyproject.toml --extra "$1" --extra ray --extra kubernetes --extra dev \
        --excludes <(printf 'torchvision\ntorchaudio\ntorchcodec\ntriton\n')
}

# With what launch/setup.sh builds Transformer Engine's extension with, and on torch's CUDA build wherever both are found.
# With trackio and mlflow, because they need an older pillow and cachetools: launch/setup.sh installs them, alone or with
# dev, under these versions.
gpu() {
    compile "$@" pyproject.toml <(echo "torch!=$torch+cpu") --group engine-build --group engine-imports \
        --extra "$1" --extra ray --extra kubernetes --extra reasoning-gym --extra trackio --extra mlflow \
        --excludes <(printf 'transformer-engine-cu12\ntransformer-engine-torch\n')
}

# Compiles both locks of a version set and a Python. The names of its extras end with a suffix.
both() {
    local set="$1" suffix="$2" python="$3"
    shift 3
    # torch's CPU builds are in few indexes.
    cpu "cpu$suffix" "$set" "$python" "$@" 2>/dev/null || cpu "cpu$suffix" "$set" "$python" --torch-backend cpu "$@"
    gpu "gpu$suffix" "$set" "$python" "$@"
}

for python in 3.11 3.12 3.13; do both stable "" "$python" "$@"; done
# Megatron-Core 0.19 declares Python 3.12 as the least.
for python in 3.12 3.13; do both next -next "$python" "$@"; done
