"""Export of LoRA adapters to a PEFT folder, by a plan from all ranks' shards.

PEFT and vLLM read it. Adapters of single experts have vLLM's names: transformers' modules of experts are fused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint.safetensors import write_folder
from megarl.families.adapters import projections
from megarl.reshard.layouts.adapters import AdapterLayouts


def adapter_config(layouts: AdapterLayouts, model: str, *, alpha: float, dropout: float) -> dict[str, Any]:
    """PEFT's adapter_config.json; `model` is the base model's folder."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": layouts.rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": projections(layouts.rules),
        "bias": "none",
        "inference_mode": True,
    }


def export(
    folder: Path,
    config: Mapping[str, Any],
    layouts: AdapterLayouts,
    rank: int,
    parameters: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
) -> None:
    """Export the adapters in all ranks' `parameters`, by Megatron's names. A collective.

    Tensors are stored as `dtype`; a rank stages at most `bucket_bytes`. The folder is replaced atomically. Raises
    OSError if the disk is full.
    """
    shapes = {name: shape for rule in layouts.rules for name, shape in rule.tensors}
    files = {"adapter_model.safetensors": {tensor.name: shapes[tensor.template] for tensor in layouts.tensors}}

    def write_config(partial: Path) -> None:
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    write_folder(folder, files, write_config, layouts, rank, parameters, dtype=dtype, bucket_bytes=bucket_bytes)
