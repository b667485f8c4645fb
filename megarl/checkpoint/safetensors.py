"""Safetensors files as layouts. Load and export are plans, executed on memory-mapped files.

A load reads the headers, then only the bytes of the rank's own boxes (index ranges of tensors). In an export, one rank
writes each file, and receives the file's tensors in buckets. No rank has the whole model.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle, groupby
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from megarl.checkpoint.kept import UnchangedTensor, file_content, split_unchanged_tensors, total_bytes
from megarl.checkpoint.mxfp4 import dequantise
from megarl.checkpoint.stored import BLOCKS, MXFP4, SCALES, find_stored_tensors
from megarl.checkpoint.weight_checksums import check_weights, checksums_text, compute_checksums
from megarl.config.override import apply_override
from megarl.families.model_tensors import checkpoint_name, float32_tensors
from megarl.families.pages.llama import EMBEDDING, HEAD, VALUE_HEAD
from megarl.families.shape import ModelShape, completed_config, read_model_shape, value_head_fields
from megarl.files.atomic import replace_folder
from megarl.files.model_folder import (
    CARD,
    CHECKSUMS,
    INDEX,
    SINGLE,
    HeaderEntry,
    companion_files,
    max_values_of,
    safetensors_header,
)
from megarl.files.strict_json import loads
from megarl.reshard.boxes import Box, Layout, Piece, dense_piece
from megarl.reshard.layouts.packed import checkpoint_tensors, unpack_layout
from megarl.reshard.plan import make_plan
from megarl.reshard.transport import Transport
from megarl.types import DataError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a stored tensor."""

# The default file size of save_pretrained in transformers 4.
SHARD_BYTES = 5_000_000_000


class FolderReader:
    """Reader of the tensors in a model folder. Each tensor is memory-mapped when it is used.

    An MXFP4 tensor is one storage for each expert, dequantised on demand. Raises DataError naming file or tensor: for a
    truncated file, a dtype that cannot be trained, and a missing, unknown or wrongly shaped tensor.
    """

    def __init__(self, folder: str | Path, model: ModelShape) -> None:
        """Find the file and dtype of each tensor.

        Packed experts become pieces of single experts. Raises DataError for a folder with faults.
        """
        self._open_files: dict[Path, Any] = {}
        self._stored, faults = find_stored_tensors(folder, model)
        if faults:
            raise DataError(faults[0].text)
        self._experts: dict[str, tuple[str, int]] = {}
        self.pieces: dict[str, Layout] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._files: dict[str, Path] = {}
        for name, shape in checkpoint_tensors(model).items():
            stored = self._stored[name]
            is_quantised = stored.code == MXFP4
            pieces = self._quantised_pieces(name, shape) if is_quantised else (dense_piece(name, shape, name, 0),)
            for piece in unpack_layout(pieces, model):
                self.pieces[piece.box.name] = (piece,)
                self.dtypes[piece.box.name] = torch.bfloat16 if is_quantised else DTYPES[stored.code]
                self._files[piece.box.name] = stored.path

    def read_storage(self, name: str) -> Tensor:
        """Return the values of a stored tensor, or of one expert of an MXFP4 tensor as bfloat16, flat: [elements]."""
        if name in self._experts:
            packed, expert = self._experts[name]
            stored = self._stored[packed]
            assert stored.scales is not None
            blocks = self._open_file(stored.path).get_slice(packed + BLOCKS)[expert]
            scales = self._open_file(stored.scales).get_slice(packed + SCALES)[expert]
            return dequantise(blocks, scales).view(-1)
        return self._open_file(self._stored[name].path).get_tensor(name).view(-1)

    def split_by_expert(self, layout: Layout) -> Iterator[tuple[Layout, Layout]]:
        """Yield (part of the layout, this folder's pieces for it).

        Each quantised expert tensor is a part, so only one is dequantised at a time. All other tensors are one part.
        """
        pieces_by_expert: dict[str | None, list[Piece]] = {}
        for piece in layout:
            (source_piece,) = self.pieces[piece.box.name]
            expert = source_piece.storage if source_piece.storage in self._experts else None
            pieces_by_expert.setdefault(expert, []).append(piece)
        for part in pieces_by_expert.values():
            names = sorted({piece.box.name for piece in part})
            yield tuple(part), tuple(piece for name in names for piece in self.pieces[name])

    def file_of(self, name: str) -> Path:
        return self._files[name]

    def _open_file(self, path: Path) -> Any:
        if path not in self._open_files:
            self._open_files[path] = safe_open(path, "pt")
        return self._open_files[path]

    def _quantised_pieces(self, name: str, shape: tuple[int, ...]) -> Layout:
        """Return an MXFP4 tensor's pieces. An expert's matrix [rows, columns] is stored transposed."""
        experts, rows, columns = shape
        storages = [f"{name}[{expert}]" for expert in range(experts)]
        self._experts |= {storage: (name, expert) for expert, storage in enumerate(storages)}
        return tuple(
            Piece(Box(name, (expert, 0, 0), (expert + 1, rows, columns)), storage, 0, (rows * columns, 1, rows))
            for expert, storage in enumerate(storages)
        )

    def release(self) -> None:
        self._open_files.clear()


def load(
    folder: str | Path,
    layout: Layout,
    parameters: Mapping[str, Tensor],
    *,
    override: Mapping[str, Any] | None = None,
    with_draft_layers: bool = False,
) -> None:
    """Load a rank's parameters from a model folder.

    Only the rank's boxes are read, and cast to each parameter's dtype. `layout` is this rank's layout of
    `megatron_layouts`. `parameters` are its live Megatron shards, [rows, ...] each, written in place. A value head
    keeps its values if the folder's model has none. `override` changes fields of config.json. `with_draft_layers` also
    loads draft layers. Raises DataError for an invalid folder, and for a weight that is not finite or changed since its
    export.
    """
    model = read_model_shape(folder, override)
    model = model.with_draft_layers(with_draft_layers)
    reader = FolderReader(folder, model)
    check_weights(Path(folder), reader)
    if not model.has_value_head:
        layout = tuple(piece for piece in layout if piece.box.name != VALUE_HEAD)
    for wanted_pieces, stored_pieces in reader.split_by_expert(layout):
        # Source and destination are on this rank: nothing is staged, and one bucket of any size (4 EiB) is enough.
        plan = make_plan([stored_pieces], [wanted_pieces], itemsize=4, bucket_bytes=1 << 62).for_rank(0)
        sources = {name: reader.read_storage(name) for name in sorted({piece.storage for piece in stored_pieces})}
        Transport(plan, sources, parameters, dtype=torch.float32).reshard()
    for piece in layout:
        if not _is_finite(piece, parameters[piece.storage]):
            raise DataError(
                f"{reader.file_of(piece.box.name)}: {piece.box.name} has values that are not finite. Copy or "
                "download the model again. If they come from a training that diverged, use an earlier checkpoint."
            )


def check_folder(folder: Path, override: Mapping[str, Any] | None = None) -> None:
    """Compare a model folder's tensors with its checksums, if it has any. Raises DataError for a changed tensor.

    `override` changes fields of config.json. If a process group exists, each of its ranks reads an equal share.
    """
    if (folder / CHECKSUMS).exists():
        check_weights(folder, FolderReader(folder, read_model_shape(folder, override)))


def read_head_rows(folder: str | Path, rows: range, *, override: Mapping[str, Any] | None = None) -> Tensor:
    """Read rows `rows` (token ids) of a language model's output layer, in the stored dtype: [rows, hidden_size].

    `override` changes fields of config.json. Raises DataError for an invalid folder.
    """
    model = read_model_shape(folder, override)
    name = checkpoint_name(EMBEDDING if model.tie_word_embeddings else HEAD, model)
    head = FolderReader(folder, model).read_storage(name).view(-1, model.hidden_size)
    # Clone, so that the memory map of the whole file can be freed.
    return head[rows.start : rows.stop].clone()


@torch.no_grad()
def _is_finite(piece: Piece, parameter: Tensor) -> bool:
    """Return whether all elements of a parameter's stored part are finite.

    Only minimum and maximum are tested, in one pass without a copy: both are NaN if an element is NaN.
    """
    numbers = parameter.as_strided(piece.box.shape, piece.strides, parameter.storage_offset() + piece.offset)
    return bool(torch.isfinite(torch.stack(numbers.aminmax())).all())


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
    shard_bytes: int = SHARD_BYTES,
    other_texts: Mapping[str, str] | None = None,
    override: Mapping[str, Any] | None = None,
) -> None:
    """Export the model in all ranks' `parameters` to a Hugging Face folder.

    A collective. `layouts` are the layouts of all ranks. `parameters` are this rank's shards, [local rows, ...] each.
    Tensors are stored as `dtype`, except those that are float32 in every model. Untrained tensors (`checkpoint.kept`)
    and all files except weights are copied from the folder `source`. `override` changes fields of config.json.
    `other_texts` maps names of further files to their texts. A rank stages at most `bucket_bytes`. A file has at most
    `shard_bytes`, unless a single tensor is larger. The folder is replaced atomically. Raises OSError if the disk is
    full.
    """
    tensors = checkpoint_tensors(model)
    unchanged_tensors, copies = split_unchanged_tensors(source, model)
    tensors |= {name: tensors[original] for name, original in copies.items()}
    dtypes = dict.fromkeys(tensors, dtype) | dict.fromkeys(float32_tensors(model), torch.float32)
    shapes_and_dtypes = {name: (shape, dtypes[name]) for name, shape in tensors.items()}
    files = pack_files(shapes_and_dtypes, shard_bytes, num_more=bool(unchanged_tensors))
    all_files = {**files, **name_unchanged_file(len(files), unchanged_tensors)}
    float32_dtypes = dict.fromkeys(float32_tensors(model), torch.float32)
    checksums = compute_checksums(layouts, rank, parameters, defaultdict(lambda: dtype, float32_dtypes))

    def write_others(partial: Path) -> None:
        """Write all files without trained tensors: configuration, tokenizer, unchanged tensors, checksums and index."""
        for name, path in companion_files(source).items():
            # The card describes the base model. The driver writes the trained model's card.
            if name == CARD:
                continue
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            is_config = name == "config.json"
            content = changed_config(path, dtype, model, override) if is_config else path.read_bytes()
            (partial / name).write_bytes(content)
        for name, text in (other_texts or {}).items():
            (partial / name).write_text(text, encoding="utf-8")
        for name in all_files.keys() - files.keys():
            with (partial / name).open("xb") as file:
                file.writelines(file_content(unchanged_tensors))
        (partial / CHECKSUMS).write_text(checksums_text(checksums), encoding="utf-8")
        if len(all_files) > 1:
            model_bytes = total_bytes(unchanged_tensors) + sum(
                prod(shape) * dtypes[name].itemsize for name, shape in tensors.items()
            )
            (partial / INDEX).write_text(index_text(all_files, model_bytes), encoding="utf-8")

    write_folder(
        folder,
        files,
        write_others,
        layouts,
        rank,
        parameters,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
        model=model,
        copies=copies,
    )


@torch.no_grad()
def write_folder(
    folder: str | Path,
    files: Mapping[str, Mapping[str, Form]],
    write_others: Callable[[Path], None],
    layouts: Sequence[Layout],
    rank: int,
    parameters: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    model: ModelShape | None = None,
    copies: Mapping[str, str] | None = None,
) -> None:
    """Write safetensors files into a folder, each by one rank, from the shards of all ranks. A collective.

    `files` maps a file's name to its tensors' names, shapes and dtypes. `parameters` are this rank's shards, each
    [local rows, ...], sent as `dtype`. `model` is needed for packed tensors (all experts of a layer in one tensor).
    `copies` maps a tensor's name to the name of an equal tensor in `parameters`. On rank 0, `write_others` adds the
    folder's further files. The folder is replaced atomically. Raises OSError if the disk is full.
    """
    folder = Path(folder)
    # Written next to its final place: the last rename then stays on one file system and is atomic.
    partial = folder.with_name(f".{folder.name}.partial")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_others(partial)
    # Rank 0 must make the folder before any rank creates its files.
    _barrier()
    destinations: dict[str, Tensor] = {}
    written_pieces: list[list[Piece]] = [[] for _ in layouts]
    for (file, tensors), writing_rank in zip(files.items(), cycle(range(len(layouts))), strict=False):
        num_elements: dict[str, int] = {}
        for name, (shape, tensor_dtype) in tensors.items():
            storage = _storage(file, tensor_dtype)
            piece = dense_piece((copies or {}).get(name, name), shape, storage, num_elements.get(storage, 0))
            written_pieces[writing_rank] += unpack_layout((piece,), model) if model else (piece,)
            num_elements[storage] = num_elements.get(storage, 0) + prod(shape)
        if writing_rank == rank:
            destinations |= _create_mapped_file(partial / file, tensors)
    plan = make_plan(layouts, list(map(tuple, written_pieces)), itemsize=dtype.itemsize, bucket_bytes=bucket_bytes)
    Transport(plan.for_rank(rank), parameters, destinations, dtype=dtype).reshard()
    # All files must be complete before the rename, and the rename must be done before any rank returns.
    _barrier()
    if rank == 0:
        replace_folder(partial, folder)
    _barrier()


def name_unchanged_file(
    num_files: int, unchanged_tensors: Mapping[str, UnchangedTensor]
) -> dict[str, Mapping[str, UnchangedTensor]]:
    """Return the copied tensors by the name of their file, the last after `num_files` others; empty: there are none."""
    return {_file_name(num_files + 1, num_files + 1): unchanged_tensors} if unchanged_tensors else {}


def pack_files(tensors: Mapping[str, Form], shard_bytes: int, *, num_more: int = 0) -> dict[str, dict[str, Form]]:
    """Distribute tensors, in order, over files of at most `shard_bytes`: by file name, widest dtypes first.

    File names contain the number of all files, including `num_more` further files.
    """
    shards: list[dict[str, Form]] = [{}]
    shard_size = 0
    for name, form in tensors.items():
        tensor_bytes = prod(form[0]) * form[1].itemsize
        if shards[-1] and shard_size + tensor_bytes > shard_bytes:
            shards.append({})
            shard_size = 0
        shards[-1][name] = form
        shard_size += tensor_bytes
    # The safetensors library writes this order too. It aligns every tensor.
    shards = [dict(sorted(shard.items(), key=lambda item: -item[1][1].itemsize)) for shard in shards]
    num_files = len(shards) + num_more
    if num_files == 1:
        return {SINGLE: shards[0]}
    return {_file_name(number, num_files): shard for number, shard in enumerate(shards, 1)}


def _file_name(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


def file_header(tensors: Mapping[str, Form]) -> bytes:
    return safetensors_header({name: header_entry(*form) for name, form in tensors.items()})


def header_entry(shape: tuple[int, ...], dtype: torch.dtype) -> HeaderEntry:
    [code] = [code for code, stored_dtype in DTYPES.items() if stored_dtype == dtype]
    return HeaderEntry(code, shape, prod(shape) * dtype.itemsize)


def _storage(file: str, dtype: torch.dtype) -> str:
    return f"{file} {dtype}"


def _create_mapped_file(path: Path, tensors: Mapping[str, Form]) -> dict[str, Tensor]:
    """Create a safetensors file with its header and reserve its space.

    Returns the mapped data: one tensor [elements] for each dtype, by `_storage`. Tensors of one dtype must be
    consecutive in `tensors`.
    """
    header = file_header(tensors)
    with path.open("xb+") as file:
        file.write(header)
        file.flush()
        # Reserve the space now: a full disk raises OSError here. While writing through the map it would raise SIGBUS,
        # which kills the process.
        os.posix_fallocate(
            file.fileno(), 0, len(header) + sum(prod(shape) * dtype.itemsize for shape, dtype in tensors.values())
        )
        mapped = mmap.mmap(file.fileno(), 0)
    storages, byte_offset = {}, len(header)
    for dtype, group in groupby(tensors.values(), key=itemgetter(1)):
        numel = sum(prod(shape) for shape, _ in group)
        storages[_storage(path.name, dtype)] = torch.frombuffer(mapped, dtype=dtype, offset=byte_offset, count=numel)
        byte_offset += numel * dtype.itemsize
    return storages


def changed_config(
    path: Path,
    dtype: torch.dtype | None,
    model: ModelShape | None = None,
    override: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the config.json at `path` with the exported dtype, which transformers loads.

    Also adds fields that vLLM reads and transformers 5 does not write (`families.shape.completed_config`), and those of
    `model`'s value head. `override` changes fields.
    """
    content = path.read_bytes()
    fields = loads(content, max_values_of(path.name))
    new_fields = apply_override(completed_config(fields, path.parent), override or {})
    # Quantised weights were dequantised on reading.
    new_fields.pop("quantization_config", None)
    if dtype is not None:
        # A vision-language model's text model has the field again. Tensors of the tower are copied unchanged.
        new_fields = _with_dtype(new_fields, dtype)
        if "text_config" in new_fields:
            new_fields["text_config"] = _with_dtype(new_fields["text_config"], dtype)
    if model and model.has_value_head:
        new_fields |= value_head_fields(path.parent, model)
    # Keep an unchanged file's bytes, so that its hash stays that of the source.
    if new_fields == fields:
        return content
    return (json.dumps(new_fields, indent=2, ensure_ascii=False) + "\n").encode()


def _with_dtype(fields: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    # transformers 4 writes torch_dtype, transformers 5 writes dtype.
    name = "torch_dtype" if "torch_dtype" in fields else "dtype"
    return {**fields, name: str(dtype).removeprefix("torch.")} if name in fields else dict(fields)


def index_text(files: Mapping[str, Iterable[str]], total_bytes: int) -> str:
    """Return the index of several safetensors files: the file of each tensor, and the total bytes."""
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2) + "\n"


def _barrier() -> None:
    """Wait for all ranks. Conversion and some tests have no process group."""
    if dist.is_initialized():
        dist.barrier()
