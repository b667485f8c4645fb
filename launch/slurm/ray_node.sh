#!/usr/bin/env bash
# A task of ray.sbatch: one node of the job's Ray cluster, until the step is told to end.
set -uo pipefail
# Short: the names of sockets have a limit.
folder="/tmp/ray-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
options=(--num-cpus="$SLURM_CPUS_ON_NODE" --temp-dir="$folder")
if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then options+=(--num-gpus="$SLURM_GPUS_ON_NODE"); fi
switches="${SLURM_TOPOLOGY_ADDR%"$SLURMD_NODENAME"}"
if [[ "$switches" =~ ^[A-Za-z0-9._-]+\.$ ]]; then options+=(--labels="switches=${switches%.}"); fi
if [ "$SLURM_NODEID" -eq 0 ]; then
    options+=(--head --node-ip-address="$RAY_HOST" --port="$RAY_PORT" --include-dashboard=false)
else
    options+=(--address="$RAY_HOST:$RAY_PORT")
    until (: >"/dev/tcp/$RAY_HOST/$RAY_PORT") 2>/dev/null; do sleep 1; done
fi
trap : USR1 TERM
"$MEGARL_VENV/bin/ray" start --block "${options[@]}" &
wait $!
wait $!
rm -rf "$folder"
