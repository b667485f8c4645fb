# shellcheck shell=bash
# What the batch scripts share: where things are, the site's settings, and a run that is queued again.
set -uo pipefail
if [ "$#" -eq 0 ]; then
    echo "give a recipe: sbatch SCRIPT RECIPE" >&2
    exit 2
fi
MEGARL_VENV="${MEGARL_VENV:-$MEGARL_HOME/.venv}"
site="${MEGARL_SITE:-$MEGARL_HOME/launch/slurm/site.env}"
if [ -f "$site" ]; then
    # shellcheck source=/dev/null
    set -a && . "$site" && set +a
fi
cd "$SLURM_SUBMIT_DIR" || exit 2
# A trace of the collectives tells what each rank was at when one of them hung.
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-20000}" TORCH_NCCL_DUMP_ON_TIMEOUT=1
export PYTHONFAULTHANDLER=1
# megarl creates this file with the names of faulty nodes (exit code 76). Slurm's KILL would leave an empty one behind.
MEGARL_BAD_NODES_FILE="$(mktemp -u)" && export MEGARL_BAD_NODES_FILE
bad=""
echo "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}: $SLURM_JOB_NUM_NODES nodes, $SLURM_JOB_NODELIST"

# Trains with these arguments; the code it ended with is in $code.
train() {
    run_driver train "$@" --resume
}

# Serves with these arguments; the code it ended with is in $code.
serve() {
    run_driver service "$@"
}

# Runs a command of megarl with the job's nodes, and passes signals on to it. The code it ended with is in $code.
run_driver() {
    # A job of several kinds of nodes has the numbers that its recipe says.
    [ -n "${SLURM_HET_SIZE:-}" ] || set -- "$@" "cluster.nodes=$((SLURM_JOB_NUM_NODES - ${MEGARL_SPARE_NODES:-0}))"
    "$MEGARL_VENV/bin/megarl" "$@" &
    driver=$!
    trap 'kill -USR1 $driver 2>/dev/null' USR1
    trap 'kill -TERM $driver 2>/dev/null' TERM
    code=0
    # Each trapped signal ends a wait early.
    while :; do
        wait "$driver"
        code=$?
        kill -0 "$driver" 2>/dev/null || break
    done
    echo "megarl ended with $code"
}

# Queues the job again, without the nodes that megarl found faulty.
requeue() {
    if [ -f "$MEGARL_BAD_NODES_FILE" ]; then
        bad="$(paste -sd, "$MEGARL_BAD_NODES_FILE")"
        rm -f "$MEGARL_BAD_NODES_FILE"
    fi
    if [ -z "$bad" ]; then
        scontrol requeue incomplete "$SLURM_JOB_ID"
        return
    fi
    # Slurm changes the excluded nodes of waiting jobs only. A job waits as soon as it is queued again, but it cannot
    # start while this script runs. So the script outlives Slurm's TERM, which comes KillWait seconds before its KILL.
    trap '' TERM
    earlier="$(scontrol show job -o "$SLURM_JOB_ID" | sed -n 's/.* ExcNodeList=\([^ ]*\).*/\1/p')"
    case "$earlier" in "" | "(null)") ;; *) bad="$earlier,$bad" ;; esac
    scontrol requeue incomplete "$SLURM_JOB_ID" || return
    for _ in {1..50}; do
        if scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$bad"; then
            echo "queued again without the nodes $bad"
            exit "$code"
        fi
        sleep 0.2
    done
    echo "Slurm does not exclude the nodes $bad from job $SLURM_JOB_ID; a start on them ends with 76" >&2
    exit "$code"
}

# Ends the job; one that was asked to stop (also by a signal that came before megarl listened) or lost a rank is queued
# again, and goes on from its newest checkpoint. megarl counts the starts that gained no step (cluster.max_restarts).
end_job() {
    case "$code" in
    75 | 76 | 138 | 143)
        # Slurm ends the job from outside; a script that ended by itself would count as failed. One that was cancelled
        # stays so. A controller that is busy, or a configuration that is just being written, may refuse once.
        for _ in 1 2 3; do
            requeue && sleep 120
            sleep 5
        done
        ;;
    esac
    exit "$code"
}
