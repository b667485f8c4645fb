"""Checkpoint files as layouts: load and export are plans like any other, carried out on memory-mapped files.

Headers are read, then only the bytes that a rank's own boxes need. On export every file has one writing rank, which
receives the file's tensors in buckets; no rank holds the model.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.model_folder import INDEX, SINGLE, read_safetensors_header, weight_files
from megarl.model_shape import ModelShape
from megarl.types import DataError
from megarl.weights.boxes import Box, Layout, Piece, contiguous_strides
from megarl.weights.families import hf_tensors
from megarl.weights.plan import make_plan
from megarl.weights.transport import Transport

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

COPIED = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "*.model", "chat_template*", "additional_chat_templates"),
)
"""Files of a model folder that an export takes over byte for byte."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """Where one tensor lies on disk: `start` is its first byte in the file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


def read_layout(folder: str | Path) -> tuple[Layout, dict[str, FileTensor]]:
    """A folder's tensors: a storage of its own for each, named as the tensor. Reads headers only.

    Raises DataError naming the file for an index that leaves the folder, a missing or truncated file, a tensor in two
    files or of a type that is no plain floating-point number.
    """
    folder = Path(folder)
    tensors: dict[str, FileTensor] = {}
    for file, expected in weight_files(folder).items():
        path = folder / file
        header = read_safetensors_header(path)
        if absent := expected - header.keys():
            raise DataError(
                f"{path}: lacks {min(absent)}, which {INDEX} says it holds. Copy or download the file again."
            )
        base = _data_start(path)
        for name, entry in header.items():
            if name in tensors:
                raise DataError(f"{path}: {name} is also in {tensors[name].file}. Remove one of the files.")
            tensors[name] = _file_tensor(path, name, entry, base)
    layout = tuple(whole(name, tensor.shape, name, 0) for name, tensor in tensors.items())
    return layout, tensors


def check_tensors(model: ModelShape, tensors: Mapping[str, FileTensor], folder: str | Path) -> None:
    """Refuse a folder that is not exactly the model's checkpoint. Raises DataError with the first tensor's name."""
    expected = hf_tensors(model)
    for name, shape in expected.items():
        if name not in tensors:
            raise DataError(f"{folder}: tensor {name} is missing. Copy or download the model again.")
        if tensors[name].shape != shape:
            raise DataError(f"{tensors[name].file}: {name} is {tensors[name].shape}; config.json says {shape}.")
    for name in tensors.keys() - expected.keys():
        # Old checkpoints store what is computed: rotary frequencies, and a tied head beside its embedding.
        if not (name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and model.tie_word_embeddings)):
            raise DataError(f"{tensors[name].file}: {name} has no place in a {model.family} model.")


def load(folder: str | Path, model: ModelShape, layout: Layout, parameters: Mapping[str, Tensor]) -> None:
    """Fill a rank's parameters from a model folder, reading only the rank's boxes and casting to each parameter's type.

    `layout` is the rank's (`megatron_layout`), `parameters` its live tensors. Raises DataError for a bad folder.
    """
    available, tensors = read_layout(folder)
    check_tensors(model, tensors, folder)
    plan = make_plan([available], [layout], itemsize=4, bucket_bytes=1 << 62).for_rank(0)
    names = {piece.box.name for piece in layout}
    maps: dict[Path, mmap.mmap] = {}
    sources: dict[str, Tensor] = {}
    for name in sorted(names):
        tensor = tensors[name]
        if tensor.file not in maps:
            with tensor.file.open("rb") as file:
                maps[tensor.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        count = prod(tensor.shape)
        sources[name] = torch.frombuffer(maps[tensor.file], dtype=tensor.dtype, count=count, offset=tensor.start)
    Transport(plan, sources, parameters, dtype=torch.float32).reshard()


@torch.no_grad()
def export(
    folder: str | Path,
    source: str | Path,
    model: ModelShape,
    layouts: Sequence[Layout],
    rank: int,
    parameters: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    nodes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write the model that `parameters` hold, over all ranks, to a Hugging Face folder; every rank calls this.

    `layouts` are all ranks'. Tensors are stored as `dtype`; configuration, tokenizer and chat template come from the
    folder `source`. The folder appears, or is replaced, when it is complete. Raises OSError if the disk is full.
    """
    folder, source = Path(folder), Path(source)
    partial = folder.with_name(f".{folder.name}.partial")
    files = pack_files(hf_tensors(model), dtype.itemsize, shard_bytes)
    writers = _writers([sum(map(prod, tensors.values())) for tensors in files.values()], len(layouts))
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _copy_companions(source, partial)
        (partial / "config.json").write_bytes(config_of_type(source / "config.json", dtype))
        if len(files) > 1:
            total_bytes = sum(map(prod, hf_tensors(model).values())) * dtype.itemsize
            (partial / INDEX).write_text(index_text(files, total_bytes), encoding="utf-8")
    _barrier(group)
    mine = [file for file, writer in zip(files, writers, strict=True) if writer == rank]
    maps = {file: _create(partial / file, files[file], dtype) for file in mine}
    destinations = {
        file: torch.frombuffer(m, dtype=dtype, offset=_data_start(partial / file)) for file, m in maps.items()
    }
    written: list[list[Piece]] = [[] for _ in layouts]
    for (file, tensors), writer in zip(files.items(), writers, strict=True):
        offsets = accumulate(map(prod, tensors.values()), initial=0)
        written[writer] += [whole(n, shape, file, at) for (n, shape), at in zip(tensors.items(), offsets, strict=False)]
    plan = make_plan(
        layouts, list(map(tuple, written)), itemsize=dtype.itemsize, bucket_bytes=bucket_bytes, nodes=nodes
    )
    Transport(plan.for_rank(rank), parameters, destinations, dtype=dtype, group=group).reshard()
    for file in maps.values():
        file.flush()
    _barrier(group)
    if rank == 0:
        replace_folder(partial, folder)
    _barrier(group)


def _data_start(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def _file_tensor(path: Path, name: str, entry: Mapping[str, object], base: int) -> FileTensor:
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if dtype not in DTYPES:
        raise DataError(f"{path}: {name} is {dtype}; only {', '.join(DTYPES)} can be trained.")
    integers = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    if not integers or not all(isinstance(n, int) and n >= 0 for n in (*shape, *offsets)):  # type: ignore[misc]
        raise DataError(f"{path}: {name} has the shape {shape} at {offsets}. Copy or download the file again.")
    if offsets[1] - offsets[0] != prod(shape) * DTYPES[dtype].itemsize or 0 in shape:  # type: ignore[index]
        raise DataError(
            f"{path}: {name} {shape} of {dtype} does not fill bytes {offsets}. Copy or download the file again."
        )
    return FileTensor(path, DTYPES[dtype], tuple(shape), base + offsets[0])  # type: ignore[index, arg-type]


def whole(name: str, shape: tuple[int, ...], storage: str, offset: int) -> Piece:
    """A tensor that lies dense in a storage."""
    return Piece(Box(name, (0,) * len(shape), shape), storage, offset, contiguous_strides(shape))


def pack_files(
    tensors: Mapping[str, tuple[int, ...]], itemsize: int, shard_bytes: int
) -> dict[str, dict[str, tuple[int, ...]]]:
    """File name -> its tensors, in the model's order, as full as `shard_bytes` allows."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in tensors.items():
        size = prod(shape) * itemsize
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _writers(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """A writing rank for each file: the largest file first, to the rank with least to write."""
    load = [0] * num_ranks
    writers = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        writers[index] = min(range(num_ranks), key=lambda r: (load[r], r))
        load[writers[index]] += sizes[index]
    return writers


def file_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """The first bytes of a safetensors file that holds these tensors in this order."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _create(path: Path, tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> mmap.mmap:
    """A safetensors file with its header written and its space reserved, mapped for writing."""
    header = file_header({name: (dtype, shape) for name, shape in tensors.items()})
    with path.open("xb+") as file:
        file.write(header)
        file.flush()
        # A full disk is an error here; found out later, while writing through the map, it would kill the process.
        os.posix_fallocate(file.fileno(), 0, len(header) + sum(map(prod, tensors.values())) * dtype.itemsize)
        return mmap.mmap(file.fileno(), 0)


def _copy_companions(source: Path, target: Path) -> None:
    for path in sorted({path for pattern in COPIED for path in source.glob(pattern)}):
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)


def config_of_type(path: Path, dtype: torch.dtype) -> bytes:
    """The config.json at `path`; where it states a type, it states this one: transformers loads the weights in it."""
    content = path.read_bytes()
    fields = json.loads(content)
    name, declared = "torch_dtype" if "torch_dtype" in fields else "dtype", str(dtype).removeprefix("torch.")
    if fields.get(name, declared) == declared:
        return content
    return (json.dumps(fields | {name: declared}, indent=2, ensure_ascii=False) + "\n").encode()


def index_text(files: Mapping[str, Iterable[str]], total_bytes: int) -> str:
    """The contents of the index that says in which of several files each tensor is."""
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2) + "\n"


def replace_folder(partial: Path, folder: Path) -> None:
    """Give a finished folder its name, in place of an older one."""
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _barrier(group: dist.ProcessGroup | None) -> None:
    if dist.is_initialized():
        dist.barrier(group)
