"""Megatron-Core and vLLM, prepared for this process's device. The only place that chooses between CUDA and a CPU.

With CUDA both libraries run as they are. Without CUDA they need the patches of `platform.cpu`, which only this module
imports.
"""

from __future__ import annotations

from typing import Any

import torch

from megarl.platform import device
from megarl.types import ConfigError


def prepare_megatron() -> None:
    """Install the patches for a CPU, before the first import of Megatron."""
    if not torch.cuda.is_available():
        from megarl.platform.cpu import megatron_patches

        megatron_patches.install()


def prepare_hybrid_optimizer() -> None:
    if not torch.cuda.is_available():
        from megarl.platform.cpu import megatron_patches

        megatron_patches.adapt_hybrid_optimizer()


def prepare_vllm() -> None:
    """Install the patches for a CPU, before the first import of vLLM."""
    if not torch.cuda.is_available():
        from megarl.platform.cpu import vllm_patches

        vllm_patches.install()


def check_vllm_build() -> None:
    """Raise ConfigError if this rank runs on a CPU but vLLM is the build for GPUs (without CPU kernels)."""
    from vllm.platforms import current_platform

    if device.current().type == "cpu" and not current_platform.is_cpu():
        raise ConfigError(
            "cluster.device: this rank has no GPU that torch can use, but the installed vLLM is the build for GPUs; "
            "create an environment with vLLM for CPUs (`VENV=DIR launch/setup.sh cpu`) and start megarl from it."
        )


def vllm_arguments(max_model_len: int) -> dict[str, Any]:
    if torch.cuda.is_available():
        return {}
    from megarl.platform.cpu import vllm_patches

    return vllm_patches.engine_arguments(max_model_len)
