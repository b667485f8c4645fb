"""Exports of a training rank's models to Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megarl.checkpoint import peft, safetensors
from megarl.checkpoint.drafter_files import drafter_layouts, export_drafter
from megarl.files.atomic import raise_disk_full_errors
from megarl.files.model_folder import find_folder, sibling_folder
from megarl.reshard.layouts.lora import adapter_layouts
from megarl.reshard.layouts.megatron import MegatronLayouts
from megarl.training.parts.drafter import DrafterPart
from megarl.training.parts.lora import LoraPart
from megarl.training.training_engine import TrainingEngine
from megarl.worker.model_builder import ModelBuilder


def export_model(
    builder: ModelBuilder, model: TrainingEngine, *, folder: Path, source: str, texts_by_file: Mapping[str, str]
) -> None:
    """Export a trained model to a Hugging Face folder, and its LoRA adapters or drafter to a folder next to it.

    `source` is the model's original folder. Rank 0 writes `texts_by_file`, the texts of further files. Raises
    DiskFullError.
    """
    recipe = builder.recipe
    # With LoRA, `merging` adds the adapters to the weights inside the context.
    with model.on_device():
        layouts = builder.layouts(model.shape)
        weights = model.weights
        num_bytes = sum(weight.nbytes for weight in weights.values())
        with raise_disk_full_errors(folder, num_bytes), model.merging():
            safetensors.export(
                folder,
                source,
                model.shape,
                layouts,
                builder.rank,
                weights,
                dtype=model.dtype,
                bucket_bytes=_bucket_bytes(builder),
                other_texts=texts_by_file,
                override=recipe.override_of(source),
            )
        _export_drafter(builder, model, folder, num_bytes)
        _export_adapters(builder, model, folder, layouts, num_bytes)


def _export_drafter(builder: ModelBuilder, model: TrainingEngine, folder: Path, num_bytes: int) -> None:
    """Export the trained EAGLE-3 drafter to the folder `drafter` next to the model's `folder`, if there is one.

    `num_bytes` is the model's size, for errors about a full disk.
    """
    recipe, drafter = builder.recipe, model.find_part(DrafterPart)
    if drafter is None or recipe.drafter is None:
        return
    with raise_disk_full_errors(folder, num_bytes):
        export_drafter(
            sibling_folder(folder, "drafter"),
            find_folder(recipe.drafter),
            drafter.shape,
            drafter_layouts(drafter.shape, builder.parallel),
            builder.rank,
            model.parameters,
            dtype=model.dtype,
            bucket_bytes=_bucket_bytes(builder),
        )


def _export_adapters(
    builder: ModelBuilder, model: TrainingEngine, folder: Path, layouts: MegatronLayouts, num_bytes: int
) -> None:
    """Export the LoRA adapters to the folder `adapter` next to the model's `folder`, if the recipe asks for them.

    `layouts` are the model's layouts of all ranks. `num_bytes` is the model's size, for errors about a full disk.
    """
    recipe, lora = builder.recipe, builder.recipe.lora
    if model.find_part(LoraPart) is None or not lora.export_adapter:
        return
    adapter_folder = sibling_folder(folder, "adapter")
    matrix_layouts = adapter_layouts(layouts, lora.targets, lora.rank)
    config = peft.adapter_config(
        matrix_layouts,
        recipe.model.path,
        alpha=lora.alpha,
        dropout=lora.dropout,
        is_rank_stabilised=lora.rank_stabilised,
    )
    with raise_disk_full_errors(adapter_folder, num_bytes):
        peft.export(
            adapter_folder,
            config,
            matrix_layouts,
            builder.rank,
            model.parameters,
            dtype=model.dtype,
            bucket_bytes=_bucket_bytes(builder),
        )


def _bucket_bytes(builder: ModelBuilder) -> int:
    return builder.recipe.weights.bucket_mib << 20
