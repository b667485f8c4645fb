#!/usr/bin/env bash
# Makes .venv with everything megarl needs: the GPU environment where an NVIDIA driver answers, else the CPU one.
# Idempotent: a second call only checks. `launch/setup.sh dev` adds what the tests need.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra="cpu"
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then extra="gpu"; fi
extras="$extra${1:+,$1}"

# What was installed is stamped by what it was made from, so that an unchanged checkout installs nothing.
shopt -s nullglob
stamp="$(cat pyproject.toml launch/setup.sh launch/requirements-*.txt | sha256sum | cut -c1-16) $extra"
for made in ".venv/.installed-$extra,dev" ".venv/.installed-$extras"; do
    if [ -x .venv/bin/python ] && [ "$(cat "$made" 2>/dev/null)" = "$stamp" ]; then exit 0; fi
done

python="${PYTHON:-python3}"
"$python" - <<'CHECK'
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 12):
    sys.exit(f"launch/setup.sh: megarl needs Python 3.11 or 3.12, `python3` is {sys.version.split()[0]}. "
             "Set PYTHON to one of them: PYTHON=python3.11 launch/setup.sh")
CHECK
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check "uv==0.13.8"
export VIRTUAL_ENV="$PWD/.venv"
uv=(.venv/bin/uv pip install --quiet)

# The versions of launch/lock.sh hold where it found them; elsewhere uv takes the newest that fit pyproject.toml.
locked=("${uv[@]}")
platform="$(uname -sm) $(.venv/bin/python -c 'import sys; print(*sys.version_info[:2], sep=".")')"
if [ "$platform" = "Linux x86_64 3.11" ]; then locked+=(-c "launch/requirements-$extra.txt"); fi

if [ "$extra" = cpu ]; then
    torch="$(sed -n 's/^ *"\(torch==[^"]*\)",$/\1/p' pyproject.toml)"
    if ! .venv/bin/python -c "import sys, importlib.metadata as m; sys.exit('$torch' != 'torch==' + m.version('torch').split('+')[0])" 2>/dev/null; then
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$torch+cpu" 2>/dev/null ||
            "${uv[@]}" --torch-backend cpu "$torch"
    fi
    # The registry's torchvision, torchaudio and torchcodec are CUDA builds: beside a CPU torch they break transformers.
    "${locked[@]}" --excludes <(printf 'torchvision\ntorchaudio\ntorchcodec\ntriton\n') -e ".[$extras]"
else
    # The registry's metadata of Transformer Engine asks for the core of CUDA 12 beside a torch of CUDA 13, and its torch
    # extension would be compiled against the newest torch: the first is left out, the second built here.
    "${locked[@]}" --excludes <(printf 'transformer-engine-cu12\ntransformer-engine-torch\n') -e ".[$extras]"
    engine="$(sed -n 's/^gpu = .*"transformer-engine\[[^]]*\]==\([^"]*\)".*/\1/p' pyproject.toml)"
    if ! .venv/bin/python -c "import sys, importlib.metadata as m; sys.exit(m.version('transformer-engine-torch') != '$engine')" 2>/dev/null; then
        "${locked[@]}" wheel ninja pybind11 setuptools einops onnx onnxscript
        packages="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        nvidia="$packages/nvidia"
        # The compiler and the headers are those of the wheels that torch itself came with.
        CUDA_HOME="$nvidia/cu13" PATH="$nvidia/cu13/bin:$PWD/.venv/bin:$PATH" \
            CPATH="$nvidia/cudnn/include:$nvidia/nccl/include:$nvidia/cu13/include/cccl${CPATH:+:$CPATH}" \
            NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS="${MAX_JOBS:-$(nproc)}" \
            "${uv[@]}" --no-build-isolation --no-deps "transformer-engine-torch==$engine"
    fi
    if ! .venv/bin/python -c "import transformer_engine.pytorch"; then
        echo "launch/setup.sh: Transformer Engine $engine cannot be imported (above). Mend that and run this again, or go" >&2
        echo "without it: .venv/bin/uv pip uninstall transformer-engine transformer-engine-cu13 transformer-engine-torch" >&2
        exit 1
    fi
fi
echo "$stamp" > ".venv/.installed-$extras"
