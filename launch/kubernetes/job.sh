#!/usr/bin/env bash
# Trains a recipe on the Ray cluster of a RayJob, in the head's pod. `job.sh stop` makes the run save and end.
# MEGARL_OVERRIDES has overrides of the recipe, separated by blanks.
set -uo pipefail
process="${TMPDIR:-/tmp}/megarl-driver.pid"

# Called before the pod is removed. Kubernetes waits for it, at most terminationGracePeriodSeconds.
if [ "${1-}" = stop ]; then
    driver="$(cat "$process" 2>/dev/null)" || exit 0
    kill -USR1 "$driver" 2>/dev/null || exit 0
    while kill -0 "$driver" 2>/dev/null; do sleep 1; done
    # KubeRay asks for the job's state every few seconds, and retries the job when it reads that it failed.
    sleep 15
    exit 0
fi

read -ra overrides <<<"${MEGARL_OVERRIDES-}"
set -- /etc/megarl/recipe.yaml "${overrides[@]}" cluster.launcher=ray cluster.ray_address=auto
cd "${MEGARL_WORKSPACE:-/workspace}" || exit 2
# A trace of the collectives shows where each rank was when one of them hung.
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-20000}" TORCH_NCCL_DUMP_ON_TIMEOUT=1 PYTHONFAULTHANDLER=1

# Trains once; the exit code is in $code.
train() {
    megarl train "$@" --resume &
    driver=$!
    echo "$driver" >"$process"
    # Ray ends a job by SIGTERM.
    trap 'kill -TERM $driver 2>/dev/null' TERM
    # Each trapped signal ends a wait early.
    while :; do
        wait "$driver"
        code=$?
        kill -0 "$driver" 2>/dev/null || break
    done
    rm -f "$process"
    echo "megarl ended with $code"
}

locked=0
while :; do
    train "$@"
    case "$code" in
    # A rank or a node was lost. KubeRay replaces the pod, and the run waits for it. megarl counts the starts that gained
    # no step (cluster.max_restarts) and then ends with another code.
    76) ;;
    # The run's folder is locked: the head before this one is still saving.
    73)
        locked=$((locked + 1))
        [ "$locked" -le 20 ] || exit "$code"
        sleep 15
        ;;
    *) exit "$code" ;;
    esac
done
