#!/usr/bin/env bash
# Makes .venv with everything megarl needs: the GPU environment where an NVIDIA driver answers, else the CPU one.
# Idempotent: a second call only checks. `launch/setup.sh dev` adds what the tests need.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra="cpu"
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then extra="gpu"; fi
extras="$extra${1:+,$1}"

# What was installed is stamped by what it was made from, so that an unchanged checkout installs nothing.
stamp="$(cat pyproject.toml launch/setup.sh | sha256sum | cut -c1-16) $extra"
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

if [ "$extra" = cpu ]; then
    torch="$(sed -n 's/^ *"\(torch==[^"]*\)",$/\1/p' pyproject.toml)"
    if ! .venv/bin/python -c "import sys, importlib.metadata as m; sys.exit('$torch' != 'torch==' + m.version('torch').split('+')[0])" 2>/dev/null; then
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$torch+cpu" 2>/dev/null ||
            "${uv[@]}" --torch-backend cpu "$torch"
    fi
    # The registry's torchvision, torchaudio and torchcodec are CUDA builds: beside a CPU torch they break transformers.
    "${uv[@]}" --excludes <(printf 'torchvision\ntorchaudio\ntorchcodec\ntriton\n') -e ".[$extras]"
else
    "${uv[@]}" -e ".[$extras]"
fi
echo "$stamp" > ".venv/.installed-$extras"
