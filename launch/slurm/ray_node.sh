#!/usr/bin/env bash
# A task of ray.sbatch: one node of the job's Ray cluster, until the step is told to end.
set -uo pipefail
# For this user only, under a name that nobody can have taken before. Short: the names of sockets have a limit.
folder="$(mktemp -d "/tmp/ray-$SLURM_JOB_ID-XXXXXXXX")" || exit 1
options=(--num-cpus="$SLURM_CPUS_ON_NODE" --temp-dir="$folder/ray") # Ray opens its own folder to all users
if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then options+=(--num-gpus="$SLURM_GPUS_ON_NODE"); fi
topology="${SLURM_TOPOLOGY_ADDR:-}"
switches="${topology%"$SLURMD_NODENAME"}"
if [[ "$switches" =~ ^[A-Za-z0-9._-]+\.$ ]]; then options+=(--labels="switches=${switches%.}"); fi
if [ "$SLURM_NODEID" -eq 0 ]; then
    options+=(--head --node-ip-address="$RAY_HOST" --port="$RAY_PORT" --include-dashboard=false)
else
    options+=(--address="$RAY_HOST:$RAY_PORT")
    for _ in {1..300}; do
        if (: >"/dev/tcp/$RAY_HOST/$RAY_PORT") 2>/dev/null; then break; fi
        sleep 1
    done
fi
# Ray ends in good order at a TERM only; the step's USR1 reaches all its processes.
(trap '' USR1 && exec "$MEGARL_VENV/bin/ray" start --block "${options[@]}") &
ray=$!
trap 'kill -TERM $ray 2>/dev/null' USR1 TERM
# Each trapped signal ends a wait early.
while :; do
    wait "$ray"
    code=$?
    kill -0 "$ray" 2>/dev/null || break
done
# What Ray started outlives it for a moment and may write once more.
for _ in {1..100}; do
    if rm -rf "$folder" 2>/dev/null && ! pgrep -u "$(id -u)" -f "$folder" >/dev/null; then break; fi
    sleep 0.1
done
rm -rf "$folder"
# A node that failed ends the step, and so its job's wait for the cluster.
exit "$code"
