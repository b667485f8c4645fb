#!/usr/bin/env bash
# One-machine Slurm cluster for tests: munged + slurmctld + N slurmd. No systemd, no cgroups, nothing outside its folder; root or plain user.
#   slurm_local.sh up [nodes=2] | env | kill-node n2 | start-node n2 | cancel      Debian: apt-get install --no-install-recommends slurm-wlm munge
# Settings: MEGARL_SLURM_DIR (folder), MEGARL_SLURM_PORT (first of nodes+1 free ports), MEGARL_SLURM_GPUS (pretend GPUs a node), MEGARL_SLURM_GRACE (preemption seconds),
#   MEGARL_SLURM_PARAMETERS (SlurmctldParameters), MEGARL_SLURM_TOPOLOGY (none or tree). `conf N` writes slurm.conf anew. Nodes of odd and of even number have a switch each.
set -euo pipefail
D=$(realpath -m "${MEGARL_SLURM_DIR:-${TMPDIR:-/tmp}/megarl-slurm-$(id -u)}") P=${MEGARL_SLURM_PORT:-17000} G=${MEGARL_SLURM_GPUS:-8}
export SLURM_CONF=$D/slurm.conf PATH=$PATH:/usr/sbin:/sbin
conf() { cat <<CONF
ClusterName=megarl
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$P
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$D/munge/sock,cred_expire=10
StateSaveLocation=$D/ctld
SlurmctldPidFile=$D/ctld.pid
SlurmctldLogFile=$D/log/ctld.log
SlurmdSpoolDir=$D/spool/%n
SlurmdPidFile=$D/%n.pid
SlurmdLogFile=$D/log/%n.log
SlurmdParameters=config_overrides
SlurmdTimeout=120
MessageTimeout=60
TCPTimeout=30
BatchStartTimeout=300
UnkillableStepTimeout=300
SlurmctldParameters=${MEGARL_SLURM_PARAMETERS:-preempt_send_user_signal}
TopologyPlugin=topology/${MEGARL_SLURM_TOPOLOGY:-none}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
GresTypes=gpu
NodeName=n[1-$1] NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=[$((P + 1))-$((P + $1))] CPUs=16 RealMemory=4096 Gres=gpu:$G
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=${MEGARL_SLURM_GRACE:-10} MaxTime=UNLIMITED
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=UNLIMITED
CONF
}
start_node() { mkdir -p "$D/spool/$1"; slurmd -f "$SLURM_CONF" -N "$1"; }
# The daemon, its step daemons, and its tasks: those of this cluster, others have nodes of that name too.
kill_node() {
  local tasks
  tasks=$(grep -lszx "SLURMD_NODENAME=$1" $(grep -lszxF "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ) | cut -d/ -f3) || :
  # shellcheck disable=SC2046,SC2086
  kill -9 $(cat "$D/$1.pid") $(ss -xlpH | grep -F "$D/spool/$1/" | grep -oP 'pid=\K\d+') $tasks 2>/dev/null || :
}
up() {
  local n=$1 i
  mkdir -p "$D"/{munge,ctld,log,dev}; chmod 755 "$D"; chmod 711 "$D/munge"
  (umask 077; head -c 1024 /dev/urandom >"$D/munge/key"); conf "$n" >"$SLURM_CONF"
  { for ((i = 1; i <= 2 && i <= n; i++)); do echo "SwitchName=s$i Nodes=$(seq -s, -f 'n%g' $i 2 "$n")"; done; echo "SwitchName=root Switches=s[1-$((n > 1 ? 2 : 1))]"; } >"$D/topology.conf"
  for ((i = 0; i < G; i++)); do ln -s /dev/null "$D/dev/gpu$i"; done   # must be character devices, else "gres count reported lower"
  ((G == 0)) || echo "NodeName=n[1-$n] Name=gpu File=$D/dev/gpu[0-$((G - 1))] Flags=nvidia_gpu_env" >"$D/gres.conf"   # the flag sets CUDA_VISIBLE_DEVICES
  munged --force --key-file="$D/munge/key" --socket="$D/munge/sock" --pid-file="$D/munge/pid" --log-file="$D/log/munge.log" --seed-file="$D/munge/seed" 2>/dev/null
  slurmctld -f "$SLURM_CONF"; for ((i = 1; i <= n; i++)); do start_node "n$i"; done
  for ((i = 0; i < 600; i++)); do [[ $(sinfo -h -p low -t idle -o %D 2>/dev/null) != "$n" ]] || { sinfo; return; }; sleep 0.2; done
  echo "cluster did not come up; see $D/log" >&2; return 1
}
# A job may queue itself again while it is cancelled: it is cancelled until there is none.
cancel() {
  local i
  for ((i = 0; i < 600; i++)); do
    scancel -f -u "$(id -un)" 2>/dev/null || :
    [[ -n $(squeue -h; sinfo -h -N -p low -o %t | grep -vx idle) ]] || return 0
    sleep 0.2
  done
  echo busy
}
case ${1:-} in
  conf) conf "$2" >"$SLURM_CONF.new"; mv "$SLURM_CONF.new" "$SLURM_CONF"; scontrol reconfigure ;;  # a job may read it meanwhile
  cancel) cancel ;;
  up) [[ ! -e $D ]] || { echo "$D exists: its cluster has not been ended" >&2; exit 1; }; up "${2:-2}" ;; env) echo "export SLURM_CONF=$SLURM_CONF" ;;
  kill-node) kill_node "$2" ;; start-node) start_node "$2" ;; *) sed -n '2,5p' "$0"; exit 2 ;;
esac
