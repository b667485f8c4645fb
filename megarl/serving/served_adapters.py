"""Checks of PEFT folders with LoRA adapters, before an engine loads them next to a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.families.lora_rules import LINEARS, adapter_shapes, projections
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape
from megarl.files.model_folder import read_object, read_safetensors_header
from megarl.reshard.layouts.vllm_adapters import SLOT_RANKS
from megarl.types import ConfigError, DataError, ServedAdapter

_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_bias": (False,),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    "trainable_token_indices": ([], {}),
}
"""Fields of adapter_config.json with the values that vLLM 0.30 computes; it ignores or refuses other values."""


def served_adapter(text: str, model: ModelShape) -> tuple[str, ServedAdapter]:
    """Return name and adapter of an option `NAME=FOLDER`. The folder must be PEFT's, with adapters for this model.

    Raises ConfigError for another form of the option or for a family without slots, DataError for an unfit folder.
    """
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise ConfigError(f"--adapter {text}: write NAME=FOLDER, for example chat=runs/chat/adapter")
    if not FAMILIES[model.family].has_adapter_slots:
        families = sorted(family for family, page in FAMILIES.items() if page.has_adapter_slots)
        raise ConfigError(
            f"--adapter {text}: megarl serves adapters of {', '.join(families)} models, not of {model.family}; "
            "serve the model with the adapter merged in, such as a run's hf/"
        )
    path = Path(folder)
    config, weights = path / "adapter_config.json", path / "adapter_model.safetensors"
    for file in (config, weights):
        if not file.is_file():
            raise DataError(f"--adapter {text}: {file} does not exist; give a PEFT folder, such as a run's adapter/")
    rank = _rank(config)
    return name, ServedAdapter(str(path.absolute()), rank, _changed_modules(weights, model, rank))


def _rank(config: Path) -> int:
    """Return the LoRA rank in a file adapter_config.json. Raises DataError for settings that vLLM does not compute."""
    settings = read_object(config)
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    # JSON's true would pass as the number 1.
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= SLOT_RANKS[-1]:
        raise DataError(f"{config}: r = {rank!r}; vLLM takes LoRA ranks from 1 to {SLOT_RANKS[-1]}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise DataError(f"{config}: lora_alpha = {alpha!r}; it must be a number")
    for field, plain in _PLAIN.items():
        if (value := settings.get(field)) is not None and value not in plain:
            raise DataError(
                f"{config}: {field} = {value!r:.80}; vLLM supports only {plain[0]!r}. Serve the model with the adapter "
                "merged in"
            )
    return rank


def _changed_modules(weights: Path, model: ModelShape, rank: int) -> tuple[str, ...]:
    """Return the last name parts of the linear layers in a file of adapters, sorted.

    Raises DataError for a tensor that is not a matrix A or B of one of the model's linear layers, for a matrix without
    its pair, and for adapters of experts.
    """
    expected = adapter_shapes(model, LINEARS, rank)
    header = read_safetensors_header(weights)
    if not header:
        raise DataError(f"{weights}: has no tensors; give a PEFT folder with trained adapters")
    for tensor, (_, shape) in header.items():
        if ".experts." in tensor:
            raise DataError(
                f"{weights}: {tensor} belongs to experts, and megarl serves no adapters of experts; serve the model "
                "with the adapter merged in, or train with lora.targets=[qkv_proj,o_proj]"
            )
        if tensor not in expected:
            raise DataError(
                f"{weights}: {tensor} is not matrix A or B of a linear layer of this model; give an adapter of "
                "attention and MLP layers, trained on this model"
            )
        if shape != expected[tensor]:
            raise DataError(
                f"{weights}: {tensor} is {shape}, but the model takes {expected[tensor]}; give an adapter trained on "
                "this model"
            )
        stem, _, letter = tensor.removesuffix(".weight").rpartition(".lora_")
        pair = f"{stem}.lora_{'B' if letter == 'A' else 'A'}.weight"
        if pair not in header:
            raise DataError(f"{weights}: {tensor} has no pair {pair}; copy or download the file again")
    return tuple(projections(header))
