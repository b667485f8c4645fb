"""Files of a trained EAGLE-3 drafter: read into the trainer, and exported in the published form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.checkpoint.mapped import MappedFolder
from megarl.checkpoint.safetensors import SHARD_BYTES, index_text, pack_files, write_folder
from megarl.families.eagle3 import IS_DRAFTED, OFFSETS, DrafterShape, published_name
from megarl.files.model_folder import INDEX, read_object
from megarl.reshard.boxes import Layout, dense_piece
from megarl.types import DataError


def target_token_ids(folder: str, shape: DrafterShape) -> Tensor:
    """Return the policy's ids of the drafted tokens: int64 [drafted tokens]. Raises DataError for a broken file."""
    token_ids = torch.arange(shape.vocab_size)
    offsets = _unchanged_tensors(folder).get(OFFSETS)
    return token_ids if offsets is None else token_ids + offsets


@torch.no_grad()
def load_drafter(folder: str, shape: DrafterShape, parameters: Mapping[str, Tensor]) -> None:
    """Read the whole parameters [*shape], by published names, from a drafter's folder, in place.

    Raises DataError for a tensor that is missing, has another shape, or is not finite.
    """
    stored = MappedFolder(folder)
    names = {published_name(name): name for name in stored.names}
    for name, size in shape.tensors.items():
        values = stored.tensor(names[name]) if name in names else None
        if values is None or tuple(values.shape) != size:
            raise DataError(f"{folder}: {name} must have the shape {size}. Copy or download the drafter again.")
        if not torch.isfinite(values).all():
            raise DataError(f"{folder}: {name} has values that are not finite. Copy or download the drafter again.")
        parameters[name].copy_(values)


def drafter_layout(shape: DrafterShape, prefix: str) -> Layout:
    """Return the layout of a rank with whole tensors, in storages of their names after `prefix`."""
    return tuple(dense_piece(name, size, prefix + name, 0) for name, size in shape.tensors.items())


def export_drafter(
    folder: Path,
    source: str,
    shape: DrafterShape,
    layouts: Sequence[Layout],
    rank: int,
    parameters: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
) -> None:
    """Export a drafter, sharded over all ranks, to a folder that vLLM loads as speculative method `eagle3`.

    A collective. `parameters` [*shape] are this rank's tensors. `layouts` has one entry a rank: which part of each
    tensor it stores. `source` is the drafter's original folder. Its config.json and its maps between both vocabularies
    are copied. Files store tensors as `dtype`. The folder is replaced atomically. Raises OSError if the disk is full.
    """
    maps = _unchanged_tensors(source)
    forms = {name: (size, dtype) for name, size in shape.tensors.items()}
    files = pack_files(forms, SHARD_BYTES, num_more=bool(maps))
    # The maps are int64 and bool, which no plan moves: they have a file of their own.
    last = f"model-{len(files) + 1:05}-of-{len(files) + 1:05}.safetensors"
    all_files = {**files, **({last: maps} if maps else {})}

    def write_config(partial: Path) -> None:
        config = read_object(Path(source) / "config.json")
        name = "dtype" if "dtype" in config else "torch_dtype"
        config[name] = str(dtype).removeprefix("torch.")
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if maps:
            save_file(maps, partial / last)
        if len(all_files) > 1:
            num_bytes = sum(prod(size) * dtype.itemsize for size in shape.tensors.values())
            total_bytes = num_bytes + sum(tensor.nbytes for tensor in maps.values())
            (partial / INDEX).write_text(index_text(all_files, total_bytes), encoding="utf-8")

    write_folder(folder, files, write_config, layouts, rank, parameters, dtype=dtype, bucket_bytes=bucket_bytes)


def _unchanged_tensors(folder: str) -> dict[str, Tensor]:
    """Return the maps of a drafter's vocabulary in its files, by published names; none for the whole vocabulary."""
    stored = MappedFolder(folder)
    names = {published_name(name): name for name in stored.names}
    return {name: stored.tensor(names[name]) for name in (OFFSETS, IS_DRAFTED) if name in names}
