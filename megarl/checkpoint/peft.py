"""Export of LoRA adapters to a PEFT folder, by a plan from all ranks' shards.

PEFT and vLLM 0.30 can load the folder. Adapters of single experts have vLLM's names, because transformers fuses the
experts of a layer into one module. PEFT 0.21 loads such a folder without an error, but computes wrong log-probs
(Qwen3-Next: 0.8 nats from the trainer's). The merged export is right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint.safetensors import write_folder
from megarl.families.lora_rules import projections
from megarl.reshard.layouts.lora import AdapterLayouts


def adapter_config(
    layouts: AdapterLayouts, model: str, *, alpha: float, dropout: float, is_rank_stabilised: bool = False
) -> dict[str, Any]:
    """Return the contents of PEFT's adapter_config.json. `model` is the base model's folder.

    With `is_rank_stabilised` the scale is alpha / sqrt(rank) instead of alpha / rank.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": layouts.rank,
        "lora_alpha": alpha,
        "use_rslora": is_rank_stabilised,
        "lora_dropout": dropout,
        "target_modules": projections(name for rule in layouts.rules for name, _ in rule.tensors),
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
    """Export the adapters in all ranks' `parameters` to a PEFT folder. A collective.

    `parameters` maps Megatron's parameter names to local tensors, A [rank, in features] and B [out features, rank].
    Tensors are stored as `dtype`. A rank stages at most `bucket_bytes`. The folder is replaced atomically. Raises
    OSError if the disk is full.
    """
    shapes = {name: shape for rule in layouts.rules for name, shape in rule.tensors}
    files = {"adapter_model.safetensors": {tensor.name: (shapes[tensor.template], dtype) for tensor in layouts.tensors}}

    def write_config(partial: Path) -> None:
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    write_folder(folder, files, write_config, layouts, rank, parameters, dtype=dtype, bucket_bytes=bucket_bytes)
