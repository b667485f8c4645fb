"""Exports of a training rank's models to Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megarl.checkpoint import peft, safetensors
from megarl.checkpoint.drafter_files import drafter_layouts, export_drafter
from megarl.files.atomic import disk_full_named
from megarl.files.model_folder import find_folder, sibling_folder
from megarl.reshard.layouts.lora import adapter_layouts
from megarl.training.parts.drafter import DrafterPart
from megarl.training.parts.lora import LoraPart
from megarl.training.training_engine import TrainingEngine
from megarl.worker.model_builder import ModelBuilder


def export_model(
    builder: ModelBuilder, trained: TrainingEngine, *, folder: Path, source: str, texts_by_file: Mapping[str, str]
) -> None:
    """Export a trained model to a Hugging Face folder, and its LoRA adapters or drafter to a folder next to it.

    `source` is the model's original folder. Rank 0 writes `texts_by_file`, the texts of further files. Raises
    DiskFullError.
    """
    recipe = builder.recipe
    # Buckets of the same size as in reshards.
    bucket_bytes = recipe.weights.bucket_mib << 20
    with trained.in_memory():
        layouts = builder.layouts(trained.shape)
        weights = trained.weights
        num_bytes = sum(weight.nbytes for weight in weights.values())
        with disk_full_named(folder, num_bytes), trained.merging():
            safetensors.export(
                folder,
                source,
                trained.shape,
                layouts,
                builder.rank,
                weights,
                dtype=trained.dtype,
                bucket_bytes=bucket_bytes,
                other_texts=texts_by_file,
                override=recipe.override_of(source),
            )
        drafter = trained.find_part(DrafterPart)
        if drafter is not None and recipe.drafter is not None:
            with disk_full_named(folder, num_bytes):
                export_drafter(
                    sibling_folder(folder, "drafter"),
                    find_folder(recipe.drafter),
                    drafter.shape,
                    drafter_layouts(drafter.shape, builder.parallel),
                    builder.rank,
                    trained.parameters,
                    dtype=trained.dtype,
                    bucket_bytes=bucket_bytes,
                )
        lora = recipe.lora
        if trained.find_part(LoraPart) is None or not lora.export_adapter:
            return
        adapter = sibling_folder(folder, "adapter")
        adapter_parts = adapter_layouts(layouts, lora.targets, lora.rank)
        config = peft.adapter_config(
            adapter_parts,
            recipe.model.path,
            alpha=lora.alpha,
            dropout=lora.dropout,
            is_rank_stabilised=lora.rank_stabilised,
        )
        with disk_full_named(adapter, num_bytes):
            peft.export(
                adapter,
                config,
                adapter_parts,
                builder.rank,
                trained.parameters,
                dtype=trained.dtype,
                bucket_bytes=bucket_bytes,
            )
