#!/usr/bin/env bash
# Checks the style and the layers of imports, then runs pytest, which checks the types too.
#   launch/test.sh [--install-slurm] [--tier fast|types|distributed|end_to_end|cluster|long] [arguments of pytest]
#   launch/test.sh --matrix [arguments of tools/matrix.py]
#   launch/test.sh --cuda [arguments of pytest]
# --matrix runs no tests but those of the libraries' facts, and proves four model families, on each version set in an
# environment of its own (an hour or more on two cores, and 9 GB).
# --cuda runs the CUDA builds without a GPU, on the stand-in of tools/standin_gpu: first it makes the CUDA environment
# (8.6 GB, minutes) in the folder GPU_VENV, by default ~/.cache/megarl/gpu_venv, then the stand-in (under a minute).
# VERSIONS, PYTHON and MEGARL_WHEELS are those of launch/setup.sh.
# All tests but the long ones take about 15 minutes on two cores with 20 GiB, `--tier fast` four. `--tier long` runs the tests
# marked `long`, of all tiers. Nothing is installed outside .venv unless --install-slurm asks for it: Slurm, the tool
# that checks the scripts, shellcheck, and podman with runc for containers of agents (Debian, Ubuntu; as root).
# The last lines say which tests are left out here and why; pytest's own closing line is the very last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1-}" = --matrix ]; then
    shift
    exec "${PYTHON:-python3}" tools/matrix.py "$@"
fi

if [ "${1-}" = --cuda ]; then
    shift
    venv="${GPU_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/megarl/gpu_venv}"
    standin="${venv%/}-standin"
    mkdir -p "$venv"
    # uv's cache holds a second copy where it cannot be linked: 8.6 GB and their downloads, rounded up.
    needed_gb=12
    free_gb="$(($(df -Pk "$venv" | awk 'NR == 2 {print $4}') / 1000000))"
    if [ ! -x "$venv/bin/python" ] && [ "$free_gb" -lt "$needed_gb" ]; then
        rmdir "$venv" 2>/dev/null || true
        echo "launch/test.sh: --cuda installs the CUDA environment in $venv, which needs $needed_gb GB; $free_gb GB are" \
            "free there: name a folder on a larger disk with GPU_VENV=DIR" >&2
        exit 1
    fi
    # Its extension takes an hour to build on two cores: it is tested where a wheel of it is there.
    VENV="$venv" TRANSFORMER_ENGINE=cached launch/setup.sh gpu,dev
    # Built again after a change of its sources or of the environment.
    libraries="$standin/standin_gpu/libraries"
    sources=(tools/standin_gpu "$venv"/.installed-*)
    if [ ! -d "$libraries" ] ||
        [ -n "$(find "${sources[@]}" -type f ! -name '*.pyc' -newer "$libraries" -print -quit)" ]; then
        rm -rf "$standin"
        "$venv/bin/python" tools/standin_gpu/build.py "$venv" "$standin"
    fi
    exec "$venv/bin/python" tools/standin_gpu/run.py "$standin" --strict -- \
        "$standin/bin/python" -m pytest -m standin_gpu tests/standin_gpu "$@"
fi

installs_slurm="" tier=all arguments=()
while [ $# -gt 0 ]; do
    case "$1" in
        --install-slurm) installs_slurm=yes ;;
        --tier=*) tier="${1#*=}" ;;
        --tier)
            tier="${2-}"
            [ $# -eq 1 ] || shift
            ;;
        *) arguments+=("$1") ;;
    esac
    shift
done
case "$tier" in
    all | fast | types | distributed | end_to_end | cluster | long) ;;
    *) echo "launch/test.sh: --tier is one of all, fast, types, distributed, end_to_end, cluster, long; it was '$tier'" >&2 && exit 2 ;;
esac

launch/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH"
# The tests start hundreds of interpreters: each would compile torch and vLLM anew.
unset PYTHONDONTWRITEBYTECODE

# The tests of Slurm bring up a cluster of their own.
# Installs packages unless a program of theirs is there. Each call by itself: one missing package fails all of a call.
install() {
    local name="$1" program="$2"
    shift 2
    if command -v "$program" >/dev/null; then return; fi
    (timeout 120 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 240 apt-get install -qq -y \
        --no-install-recommends "$@") >/dev/null 2>&1 || echo "launch/test.sh: $name could not be installed"
}
if [ -n "$installs_slurm" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    install Slurm sbatch slurm-wlm munge iproute2 shellcheck
    install podman podman podman runc
fi
command -v sbatch >/dev/null ||
    echo "launch/test.sh: no Slurm here: the tests marked slurm are left out; --install-slurm installs it (as root, by apt-get)"

ruff check .
ruff format --check .
lint-imports
# Six files of tests at a time, four below 20 GiB of memory: each takes up to 3 GiB. Four kept two cores busy for about
# half of the time, because many tests wait for Slurm, Ray, a deadline or each other. On a GPU one engine's memory would
# be taken for another's.
workers=()
if ! command -v nvidia-smi >/dev/null; then
    # A container or a Slurm job may have less memory than its machine: the limit of its cgroup counts.
    memory_bytes="$(python -c 'from megarl.platform.memory.host_memory import machine_bytes; print(machine_bytes())')"
    workers=(-n "$((memory_bytes >= 20 << 30 ? 6 : 4))" --dist loadfile --no-loadscope-reorder)
fi
[ "$tier" = all ] || arguments=(-m "$tier" "${arguments[@]}")
pytest "${workers[@]}" "${arguments[@]}"
