"""Files of a trained EAGLE-3 drafter: read into the trainer, and exported in the published form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.checkpoint.manifest import new_folder
from megarl.checkpoint.mapped import MappedFolder
from megarl.checkpoint.safetensors import SHARD_BYTES, Form, index_text, pack_files, write_folder
from megarl.checkpoint.torch_dist_reader import CheckpointReader
from megarl.config.parallel import ParallelConfig
from megarl.families.eagle3 import (
    IS_DRAFTED,
    OFFSETS,
    PARAMETERS,
    DrafterShape,
    published_name,
    read_drafter_shape,
)
from megarl.families.shape import ModelShape
from megarl.files.model_folder import INDEX, read_object
from megarl.reshard.boxes import Layout, dense_piece
from megarl.reshard.layouts.megatron import chunk_prefix
from megarl.types import DataError


def target_token_ids(folder: str, shape: DrafterShape) -> Tensor:
    """Return the policy's id of each token that the drafter proposes: int64 [drafted tokens]. Raises DataError."""
    token_ids = torch.arange(shape.vocab_size)
    offsets = _vocabulary_maps(folder).get(OFFSETS)
    return token_ids if offsets is None else token_ids + offsets


@torch.no_grad()
def load_drafter(folder: str, shape: DrafterShape, parameters: Mapping[str, Tensor]) -> None:
    """Load a drafter's folder into whole parameters [*shape], by published names, in place.

    Raises DataError for a tensor that is missing, has another shape, or is not finite.
    """
    mapped_folder = MappedFolder(folder)
    stored_names = {published_name(name): name for name in mapped_folder.names}
    for name, tensor_shape in shape.tensors.items():
        values = mapped_folder.tensor(stored_names[name]) if name in stored_names else None
        if values is None or tuple(values.shape) != tensor_shape:
            raise DataError(f"{folder}: {name} must have the shape {tensor_shape}. Copy or download the drafter again.")
        if not torch.isfinite(values).all():
            raise DataError(f"{folder}: {name} has values that are not finite. Copy or download the drafter again.")
        parameters[name].copy_(values)


def drafter_layouts(shape: DrafterShape, parallel: ParallelConfig) -> list[Layout]:
    """Return the layout of each trainer rank: whole tensors on the last pipeline stage, nothing on all others.

    Storages are named like Megatron's parameters in the stage's last chunk.
    """
    storage = chunk_prefix(parallel.vpp - 1, parallel.vpp) + PARAMETERS
    whole_tensors = tuple(dense_piece(name, size, storage + name, 0) for name, size in shape.tensors.items())
    return [
        whole_tensors if parallel.coordinates(rank).pp == parallel.pp - 1 else () for rank in range(parallel.world_size)
    ]


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
    """Export a drafter, sharded over all ranks, to a folder for vLLM's speculative method `eagle3`. A collective.

    `parameters` [*shape] are this rank's tensors, `layouts` the layouts of all ranks. config.json and the maps between
    both vocabularies are copied from the drafter's original folder `source`. Files store tensors as `dtype`. The folder
    is replaced atomically. Raises OSError if the disk is full.
    """
    maps = _vocabulary_maps(source)
    files = _files_of_weights(shape, dtype, maps)

    def write_others(partial: Path) -> None:
        _write_config_and_maps(partial, source, files, maps, dtype)

    write_folder(folder, files, write_others, layouts, rank, parameters, dtype=dtype, bucket_bytes=bucket_bytes)


def convert_drafter(checkpoint: Path, folder: Path, source: str, policy: ModelShape) -> None:
    """Convert a trained drafter in a run's checkpoint to a folder like that of `export_drafter`, in one process.

    `source` is the drafter's original folder. The whole drafter must fit in memory. Raises ConfigError if `folder`
    exists. Raises DataError for a damaged checkpoint, or one without a drafter of this shape.
    """
    shape, reader = read_drafter_shape(source, policy), CheckpointReader(checkpoint, policy)
    tensors = {name: reader.read_further_tensor(PARAMETERS + name, size) for name, size in shape.tensors.items()}
    [dtype] = {tensor.dtype for tensor in tensors.values()}
    maps = _vocabulary_maps(source)
    files = _files_of_weights(shape, dtype, maps)
    with new_folder(folder) as manifest:
        for file, forms in files.items():
            save_file({name: tensors[name] for name in forms}, manifest.folder / file)
        _write_config_and_maps(manifest.folder, source, files, maps, dtype)


def _files_of_weights(
    shape: DrafterShape, dtype: torch.dtype, maps: Mapping[str, Tensor]
) -> dict[str, dict[str, Form]]:
    """Return shape and type of each trained tensor, by file and name. `maps` are stored in one more file, if any."""
    forms = {name: (size, dtype) for name, size in shape.tensors.items()}
    return pack_files(forms, SHARD_BYTES, num_more=bool(maps))


def _write_config_and_maps(
    folder: Path,
    source: str,
    files: Mapping[str, Mapping[str, Form]],
    maps: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> None:
    """Write the other files of a drafter's folder: config.json, the index, and maps between its tokens and the
    policy's.
    """
    config = read_object(Path(source) / "config.json")
    config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # No plan moves the maps, which are int64 and bool. They have a separate file.
    maps_file = f"model-{len(files) + 1:05}-of-{len(files) + 1:05}.safetensors"
    if maps:
        save_file(dict(maps), folder / maps_file)
    all_files = {**files, **({maps_file: maps} if maps else {})}
    if len(all_files) > 1:
        num_bytes = sum(
            prod(size) * tensor_dtype.itemsize for tensors in files.values() for size, tensor_dtype in tensors.values()
        )
        total_bytes = num_bytes + sum(tensor.nbytes for tensor in maps.values())
        (folder / INDEX).write_text(index_text(all_files, total_bytes), encoding="utf-8")


def _vocabulary_maps(folder: str) -> dict[str, Tensor]:
    """Return the vocabulary maps in a drafter's files, by published names; empty: it has the whole vocabulary."""
    stored = MappedFolder(folder)
    names = {published_name(name): name for name in stored.names}
    return {name: stored.tensor(names[name]) for name in (OFFSETS, IS_DRAFTED) if name in names}
