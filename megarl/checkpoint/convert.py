"""Conversion of model folders to Megatron's distributed checkpoints and back, without the whole model in memory.

Files are written from front to back in slabs, parts of at most 64 MiB. A plan fills each slab from the source. While
one slab is written and hashed, the next is read.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import lcm, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.checkpoint.kept import FILE as KEPT
from megarl.checkpoint.kept import (
    UnchangedTensor,
    file_content,
    list_unchanged_tensors,
    split_unchanged_tensors,
    total_bytes,
)
from megarl.checkpoint.manifest import MANIFEST, ManifestWriter, check_hashes, check_sizes, new_folder
from megarl.checkpoint.safetensors import (
    SHARD_BYTES,
    FolderReader,
    Form,
    changed_config,
    header_entry,
    index_text,
    name_unchanged_file,
    pack_files,
)
from megarl.checkpoint.torch_dist import (
    BACKEND,
    COMMON,
    METADATA,
    Stored,
    StoredShard,
    common_state,
    list_extra_state_keys,
    metadata_bytes,
    split,
)
from megarl.checkpoint.torch_dist_reader import CheckpointReader
from megarl.checkpoint.weight_checksums import check_weights, checksums_text
from megarl.config.parallel import ParallelConfig
from megarl.families.model_tensors import float32_tensors, hf_tensors
from megarl.families.shape import ModelShape, read_model_shape
from megarl.files.model_folder import (
    CHECKSUMS,
    INDEX,
    companion_files,
    read_object,
    safetensors_header,
    stored_names,
    weight_files,
)
from megarl.reshard.boxes import Box, Layout, Piece, contiguous_strides
from megarl.reshard.checks.fingerprint import MASK
from megarl.reshard.checks.ledger import piece_checksum
from megarl.reshard.layouts.packed import checkpoint_names, checkpoint_tensors, unpack_layout
from megarl.reshard.plan import make_plan
from megarl.reshard.transport import Transport
from megarl.tracking.run_record import RunRecord, newest_checkpoint
from megarl.types import ConfigError, DataError

# 64 MiB. Bounds the memory of a conversion: one slab is filled while another is written.
SLAB_BYTES = 1 << 26

TRACKER, RELEASE, COMPANIONS = "latest_checkpointed_iteration.txt", "release", "hf"
_PACKS = "packs_experts"
"""Field of a manifest: whether the model folder had packed experts."""

Source = FolderReader | CheckpointReader
"""A reader of weights: the dtype and the stored pieces (index ranges) of each Hugging Face tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Result of a conversion. `is_verified`: the written weights were read back and compared. `num_kept` tensors were
    copied unchanged.
    """

    folder: Path
    num_tensors: int
    weight_bytes: int
    seconds: float
    is_verified: bool
    num_kept: int = 0


def to_megatron(
    hf: Path,
    out: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    dtype: torch.dtype | None = None,
    verify: bool = False,
) -> Conversion:
    """Convert a model folder to a `torch_dist` checkpoint, sharded for tp, pp, ep and etp. Any parallel sizes can load
    it.

    `out/release` is the checkpoint. `out/hf` has copies of the folder's files other than weights. `out/manifest.json`
    is written last. Raises ConfigError for parallel sizes that do not fit the model, or if `out` exists. Raises
    DataError naming a truncated file.
    """
    started = time.perf_counter()
    model = read_model_shape(hf)
    parallel = _make_parallel_config(tp, pp, ep, etp, model)
    source = FolderReader(hf, model)
    check_weights(hf, source)
    dtypes = _converted_dtypes(source, model, dtype)
    chunks = list(split(model, parallel, dtypes, SLAB_BYTES))
    with new_folder(out) as manifest:
        with _check_files_in_background(hf):
            # Weights first, then the records that say where each one is, then the folder's other files.
            stored = _write_chunks(source, chunks, manifest)
            _write_records(manifest, model, parallel, chunks, stored)
            _copy_companions(hf, manifest, f"{COMPANIONS}/", dtype)
            num_unchanged = _write_unchanged(list_unchanged_tensors(hf, model), f"{COMPANIONS}/{KEPT}", manifest)
            if dtype is None and (hf / INDEX).exists():
                manifest.copy(hf / INDEX, f"{COMPANIONS}/{INDEX}")
            manifest.append(TRACKER, RELEASE.encode())
        parallel_sizes = {name: getattr(parallel, name) for name in ("tp", "pp", "ep", "etp")}
        expert_form = {_PACKS: True} if model.packs_experts else {}
        manifest.close({"format": "torch_dist", "checkpoint": RELEASE, **parallel_sizes, **expert_form})
        if verify:
            verify_copy(source, CheckpointReader(manifest.folder / RELEASE, model), model, manifest.folder)
    return Conversion(
        folder=out,
        num_tensors=len(dtypes),
        weight_bytes=_count_weight_bytes(model, dtypes),
        seconds=time.perf_counter() - started,
        is_verified=verify,
        num_kept=num_unchanged,
    )


def to_hf(
    megatron: Path,
    out: Path,
    *,
    hf: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int | None = None,
    verify: bool = False,
    override: Mapping[str, Any] | None = None,
    other_texts: Mapping[str, str | None] | None = None,
) -> Conversion:
    """Convert a `torch_dist` checkpoint, sharded in any way, to a model folder.

    `megatron` is the checkpoint, or a folder with it (a run or Megatron's own folder). `hf` is a folder with
    config.json, tokenizer and other files; it may be omitted for a checkpoint made by `to_megatron`. `override` changes
    fields of config.json. `other_texts` maps names of further files to their texts, replacing copied files; None leaves
    a file out.

    Tensors go to the files named in the folder's index. Without an index, or if the index lacks copied tensors
    (`checkpoint.kept`), they go to files of `shard_bytes`, and copied tensors to a file of their own. Experts are
    packed if they are packed in `hf`, or were in the folder converted by `to_megatron`. Raises ConfigError if `out`
    exists, DataError naming a truncated file.
    """
    started = time.perf_counter()
    checkpoint = find_checkpoint(megatron)
    root = checkpoint.parent if (checkpoint.parent / MANIFEST).exists() else checkpoint
    model_folder = hf or _find_companions(checkpoint)
    model = read_model_shape(model_folder, override)
    if not stored_names(model_folder):
        # Without weights, the folder does not show whether experts are packed.
        model = replace(model, packs_experts=_packs_experts(root))
    with new_folder(out) as manifest, _check_files_in_background(root):
        source = CheckpointReader(checkpoint, model)
        model = source.model
        unchanged_tensors, copies = split_unchanged_tensors(model_folder, model)
        shapes_and_dtypes = _list_file_tensors(model, _converted_dtypes(source, model, dtype), copies)
        model_bytes = sum(prod(shape) * dtype.itemsize for shape, dtype in shapes_and_dtypes.values())
        # Use the folder's own index if it names exactly these tensors. Otherwise pack them into files of equal size.
        files_of_index = None
        if dtype is None and shard_bytes is None and (model_folder / INDEX).exists():
            # None if the files hold kept tensors that the index lacks.
            files_of_index = _read_index(model_folder, [*shapes_and_dtypes, *unchanged_tensors])
        if files_of_index is not None:
            manifest.copy(model_folder / INDEX, INDEX)
            checksums = _write_files(
                source, files_of_index, model, shapes_and_dtypes, copies, unchanged_tensors, manifest
            )
        else:
            new_files = _prepare_new_files(
                shapes_and_dtypes, shard_bytes or SHARD_BYTES, unchanged_tensors, model_bytes, manifest
            )
            checksums = _write_files(source, new_files, model, shapes_and_dtypes, copies, {}, manifest)
        # Everything except weights comes last, with the manifest as proof of a complete folder.
        manifest.append(CHECKSUMS, checksums_text(checksums).encode())
        _copy_companions(model_folder, manifest, "", dtype, override, other_texts)
        manifest.close({"format": "safetensors"})
        if verify:
            verify_copy(source, FolderReader(manifest.folder, model), model, manifest.folder)
    return Conversion(
        folder=out,
        num_tensors=len(shapes_and_dtypes),
        weight_bytes=model_bytes,
        seconds=time.perf_counter() - started,
        is_verified=verify,
        num_kept=len(unchanged_tensors),
    )


def _prepare_new_files(
    shapes_and_dtypes: Mapping[str, Form],
    shard_bytes: int,
    unchanged_tensors: Mapping[str, UnchangedTensor],
    model_bytes: int,
    manifest: ManifestWriter,
) -> dict[str, list[str]]:
    """Return the model's tensors by new file. Write one more file of unchanged tensors, and the index of all files."""
    tensors_by_file = pack_files(shapes_and_dtypes, shard_bytes, num_more=bool(unchanged_tensors))
    new_files = {file: list(tensors) for file, tensors in tensors_by_file.items()}
    unchanged_files = name_unchanged_file(len(new_files), unchanged_tensors)
    for name, tensors in unchanged_files.items():
        _write_unchanged(tensors, name, manifest)
    if len(new_files) + len(unchanged_files) > 1:
        index = index_text({**new_files, **unchanged_files}, model_bytes + total_bytes(unchanged_tensors))
        manifest.append(INDEX, index.encode())
    return new_files


def _find_companions(checkpoint: Path) -> Path:
    """Return the folder with a converted model's config.json and tokenizer. Raises ConfigError if there is none."""
    for folder in (checkpoint.parent / COMPANIONS, checkpoint / COMPANIONS):
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"{checkpoint.parent}: has no folder {COMPANIONS} with a config.json; give a model folder as --hf."
    )


@dataclass(frozen=True, slots=True)
class _Slab:
    """A part of a tensor: it is filled from the source, then passed to `write`.

    `pieces` place its elements in a contiguous storage called "slab".
    """

    pieces: Sequence[Piece]
    shape: tuple[int, ...]
    dtype: torch.dtype
    write: Callable[[Tensor], None]


def _write_slabs(source: Source, slabs: Iterable[_Slab]) -> None:
    """Fill the slabs in order. While one slab is filled, the previous one is written in the background."""
    with _one_thread_per_operation(), ThreadPoolExecutor(1) as writer:
        previous_write = None
        for slab in slabs:
            values = _read_slab(source, slab)
            if previous_write is not None:
                previous_write.result()
            previous_write = writer.submit(slab.write, values)
        if previous_write is not None:
            previous_write.result()


@contextmanager
def _one_thread_per_operation() -> Iterator[None]:
    """Make torch compute each operation in the calling thread inside this context.

    Reading, writing and hashing each have a thread. If a copy used more threads, they would wait busily: on two cores
    they took half of a conversion's CPU time.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _read_slab(source: Source, slab: _Slab) -> Tensor:
    """Read the elements of a slab from the source, in the slab's shape and dtype."""
    # No piece covers the vocabulary padding. It must be zero.
    is_covered = sum(piece.box.numel for piece in slab.pieces) == prod(slab.shape)
    values = (torch.empty if is_covered else torch.zeros)(slab.shape, dtype=slab.dtype)
    names = {piece.box.name for piece in slab.pieces}
    source_pieces = tuple(piece for name in sorted(names) for piece in source.pieces[name])
    rank_plan = make_plan(
        [source_pieces], [tuple(slab.pieces)], itemsize=slab.dtype.itemsize, bucket_bytes=1 << 62
    ).for_rank(0)
    storage_names = {transfer.source.storage for bucket in rank_plan.buckets for transfer in bucket.local}
    storages = {name: source.read_storage(name) for name in sorted(storage_names)}
    Transport(rank_plan, storages, {"slab": values}, dtype=slab.dtype).reshard()
    # Unmap after every slab: otherwise the mapped pages of the whole model add up in memory.
    source.release()
    return values


def _write_chunks(source: Source, chunks: Sequence[StoredShard], manifest: ManifestWriter) -> list[Stored]:
    """Append the chunks to the ranks' files, one slab after another. Returns the place of each."""
    stored: list[Stored] = []

    def write(chunk: StoredShard, tensor: Tensor) -> None:
        stored.append(_append_saved(manifest, f"__{chunk.rank}_0.distcp", tensor))

    _write_slabs(source, (_Slab(c.pieces, c.shape, c.dtype, partial(write, c)) for c in chunks))
    return stored


def _append_saved(manifest: ManifestWriter, file: str, value: Any) -> Stored:
    name = f"{RELEASE}/{file}"
    start = manifest.sizes.get(name, 0)
    torch.save(value, manifest.stream(name))
    return Stored(file, start, manifest.sizes[name] - start)


def _write_records(
    manifest: ManifestWriter,
    model: ModelShape,
    parallel: ParallelConfig,
    chunks: Sequence[StoredShard],
    stored: Sequence[Stored],
) -> None:
    """Write the checkpoint's metadata, the state common to all ranks, and the names of its formats."""
    # All extra states are equal, so one stored `[None]` serves every key.
    places_of_objects = dict.fromkeys(list_extra_state_keys(model), _append_saved(manifest, stored[0].file, [None]))
    manifest.append(f"{RELEASE}/{METADATA}", metadata_bytes(list(zip(chunks, stored, strict=True)), places_of_objects))
    _append_saved(manifest, COMMON, common_state(model, parallel))
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {f"{name}_version": 1 for name in backends}
    manifest.append(f"{RELEASE}/{BACKEND}", json.dumps({**backends, **versions}).encode())


def _list_file_tensors(
    model: ModelShape, dtypes: Mapping[str, torch.dtype], copies: Mapping[str, str]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each tensor in the model's files. A copy has those of its original.

    `dtypes` are those of the tensors before experts are packed.
    """
    stored_dtypes = {stored: dtypes[name] for name, stored in checkpoint_names(model).items()}
    tensors = {name: (shape, stored_dtypes[name]) for name, shape in checkpoint_tensors(model).items()}
    return tensors | {name: tensors[original] for name, original in copies.items()}


def _write_files(
    source: Source,
    files: Mapping[str, Sequence[str]],
    model: ModelShape,
    shapes_and_dtypes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    copies: Mapping[str, str],
    unchanged_tensors: Mapping[str, UnchangedTensor],
    manifest: ManifestWriter,
) -> dict[str, int]:
    """Write safetensors files from front to back. `shapes_and_dtypes` are those of the model's tensors in the files.

    `copies` maps a tensor's name to the name of an equal tensor. `unchanged_tensors` are copied. Returns the checksum
    of each tensor of the model, by name.
    """
    checksums: dict[str, int] = defaultdict(int)
    entries = {name: header_entry(shape, dtype) for name, (shape, dtype) in shapes_and_dtypes.items()}
    entries |= {name: tensor.entry for name, tensor in unchanged_tensors.items()}
    itemsizes = {name: dtype.itemsize for name, (_, dtype) in shapes_and_dtypes.items()}
    itemsizes |= {name: tensor.itemsize for name, tensor in unchanged_tensors.items()}
    # Widest dtypes first, like the writer of the safetensors library, so that every tensor is aligned.
    names_by_file = {file: sorted(names, key=lambda name: -itemsizes[name]) for file, names in files.items()}

    def write_slab(file: str, copied_before: Sequence[str], pieces: Sequence[Piece], tensor: Tensor | None) -> None:
        """Append to a file: the header if it is new, the tensors `copied_before`, then a slab's values.

        `tensor` [any shape] has the values; None: no slab follows. `pieces` of the slab count in `checksums`.
        """
        if file not in manifest.sizes:
            manifest.append(file, safetensors_header({name: entries[name] for name in names_by_file[file]}))
        for name in copied_before:
            for piece in unchanged_tensors[name].content():
                manifest.append(file, piece)
        if tensor is not None:
            manifest.append(file, tensor.view(-1).view(torch.uint8).numpy().data)
            for piece in pieces:
                checksum = int(piece_checksum(piece, tensor).item())
                checksums[piece.box.name] = (checksums[piece.box.name] + checksum) & MASK

    # Copied tensors that follow a file's last converted tensor: no slab writes them.
    copied_at_end: dict[str, list[str]] = {}

    def make_slabs() -> Iterator[_Slab]:
        """Yield the parts of each file's tensors in order.

        Unchanged tensors are copied from the model folder instead.
        """
        for file, names in names_by_file.items():
            copied_before: list[str] = []
            for name in names:
                if name in unchanged_tensors:
                    copied_before.append(name)
                    continue
                shape, dtype = shapes_and_dtypes[name]
                for box in _split_into_slabs(copies.get(name, name), shape, dtype):
                    pieces = _checkpoint_pieces(box, model)
                    # Pieces name the original tensor. Its elements are counted there, not again in the copy.
                    counted_pieces = () if name in copies else pieces
                    # Write the copied tensors before this one with its first part: a file grows only at its end.
                    yield _Slab(pieces, box.shape, dtype, partial(write_slab, file, copied_before, counted_pieces))
                    copied_before = []
            copied_at_end[file] = copied_before

    _write_slabs(source, make_slabs())
    for file, copied_before in copied_at_end.items():
        write_slab(file, copied_before, (), None)
    return checksums


def _write_unchanged(tensors: Mapping[str, UnchangedTensor], file: str, manifest: ManifestWriter) -> int:
    for piece in file_content(tensors) if tensors else ():
        manifest.append(file, piece)
    return len(tensors)


def _split_into_slabs(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Box]:
    """Yield consecutive parts of a tensor, each of at most SLAB_BYTES unless a single row is larger."""
    rows = max(1, SLAB_BYTES // (dtype.itemsize * prod(shape[1:])))
    for first_row in range(0, shape[0], rows):
        yield Box(name, (first_row, *(0,) * (len(shape) - 1)), (min(first_row + rows, shape[0]), *shape[1:]))


def _make_slab(box: Box, dtype: torch.dtype, model: ModelShape, write: Callable[[Tensor], None]) -> _Slab:
    return _Slab(_checkpoint_pieces(box, model), box.shape, dtype, write)


def _checkpoint_pieces(box: Box, model: ModelShape) -> Layout:
    return unpack_layout((Piece(box, "slab", 0, contiguous_strides(box.shape)),), model)


def verify_copy(source: Source, result: Source, model: ModelShape, folder: Path) -> None:
    """Read a conversion back. Compare hashes of files and bits of tensors. Raises DataError naming the first
    difference.
    """
    with _one_thread_per_operation(), ThreadPoolExecutor(1) as reader:
        hash_check = reader.submit(check_hashes, folder, check_sizes(folder))
        for name, shape in hf_tensors(model).items():
            for box in _split_into_slabs(name, shape, result.dtypes[name]):
                slab = _make_slab(box, result.dtypes[name], model, lambda tensor: None)
                source_values, converted_values = _read_slab(source, slab), _read_slab(result, slab)
                # Compared as bytes: NaN differs from itself, and -0.0 equals 0.0.
                if not torch.equal(
                    source_values.view(-1).view(torch.uint8), converted_values.view(-1).view(torch.uint8)
                ):
                    raise DataError(f"{folder}: {name} differs from its source. Convert again; check disk and memory.")
        hash_check.result()


@contextmanager
def _check_files_in_background(folder: Path) -> Iterator[None]:
    """Check a folder's files against its manifest, if it has one.

    Sizes are checked on entry; a background thread computes hashes, and the exit compares them.
    """
    expected = check_sizes(folder)
    with ThreadPoolExecutor(1) as reader:
        hash_check = reader.submit(check_hashes, folder, expected)
        yield
        hash_check.result()


def _make_parallel_config(tp: int, pp: int, ep: int, etp: int, model: ModelShape) -> ParallelConfig:
    """Return the fewest ranks that allow these sizes. Raises ConfigError naming a wrong option."""
    for name, size in {"tp": tp, "pp": pp, "ep": ep, "etp": etp}.items():
        if size < 1:
            raise ConfigError(f"--{name} {size} must be at least 1.")
    if not model.num_experts and (ep, etp) != (1, 1):
        raise ConfigError(f"--ep {ep} --etp {etp}: the model has no experts; leave both out.")
    # Without experts, etp = tp adds no ranks.
    if not model.num_experts:
        etp = tp
    ranks = lcm(tp, ep * etp)
    return ParallelConfig(tp=tp, pp=pp, dp=ranks // tp, rollout_tp=1, ep=ep, etp=etp)


def _read_index(folder: Path, tensors: Sequence[str]) -> dict[str, list[str]] | None:
    """Return the tensors of each file in a folder's index, in the order of `tensors`.

    None: the index and `tensors` have different names.
    """
    files = weight_files(folder)
    file_of_tensor = {name: file for file, names in files.items() for name in names}
    if file_of_tensor.keys() != set(tensors):
        return None
    return {file: [name for name in tensors if file_of_tensor[name] == file] for file in sorted(files)}


def _copy_companions(
    source: Path,
    manifest: ManifestWriter,
    folder: str,
    dtype: torch.dtype | None,
    override: Mapping[str, Any] | None = None,
    other_texts: Mapping[str, str | None] | None = None,
) -> None:
    """Copy all files except weights. config.json gets `dtype`, if not None, and the fields of `override`.

    `other_texts` replace copied files, by name; None leaves a file out.
    """
    other_texts = other_texts or {}
    for name, text in other_texts.items():
        if text is not None:
            manifest.append(folder + name, text.encode())
    for name, path in companion_files(source).items():
        if name in other_texts:
            continue
        if name == "config.json":
            manifest.append(folder + name, changed_config(path, dtype, override=override))
        else:
            manifest.copy(path, folder + name)


def _packs_experts(folder: Path) -> bool:
    path = folder / MANIFEST
    return path.exists() and bool(read_object(path)["layout"].get(_PACKS))


def find_checkpoint(folder: Path) -> Path:
    """Find the checkpoint in a folder: the folder itself, the one named by Megatron's tracker file, or a run's newest.

    Raises ConfigError for a run, or its `checkpoints` folder, without checkpoints. Raises DataError for an invalid
    tracker file.
    """
    if (folder / METADATA).exists():
        return folder
    if not (folder / TRACKER).exists():
        return _checkpoint_of_run(folder)
    # Only a number or `release` is valid here, so undecodable bytes may be replaced.
    text = (folder / TRACKER).read_bytes()[:100].decode(errors="replace").strip()
    if text != RELEASE and not text.isdecimal():
        raise DataError(
            f"{folder / TRACKER}: contains {text[:40]!r} instead of the name of a checkpoint. Write an iteration's "
            "number, or release."
        )
    return folder / (RELEASE if text == RELEASE else f"iter_{int(text):07}")


def _checkpoint_of_run(folder: Path) -> Path:
    """Return the newest checkpoint of a run, or the folder itself if it does not belong to a run."""
    if (newest := newest_checkpoint(folder)) is not None:
        return newest
    if (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder}: is a Hugging Face model folder, not a checkpoint of Megatron; `megarl convert to-megatron --hf "
            "FOLDER` converts it"
        )
    if folder.is_dir() and folder.name == "checkpoints":
        raise ConfigError(f"{folder}: has no checkpoint step_NNNNNN; set checkpoint.every_steps so that the run saves")
    if not folder.exists() and (checkpoints := RunRecord.read(folder.parent.parent).checkpoints):
        raise ConfigError(
            f"{folder}: not found; the run's checkpoints are {', '.join(checkpoint.name for checkpoint in checkpoints)}"
        )
    if not folder.exists():
        raise ConfigError(f"{folder}: not found; name the folder of a checkpoint, of a run, or of several checkpoints")
    return folder


def _converted_dtypes(source: Source, model: ModelShape, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the dtype of each converted tensor: `dtype`, or with None the source's.

    Tensors that are float32 in every model stay float32.
    """
    float32_dtypes = dict.fromkeys(float32_tensors(model), torch.float32) if dtype else {}
    return {name: dtype or source.dtypes[name] for name in hf_tensors(model)} | float32_dtypes


def _count_weight_bytes(model: ModelShape, dtypes: Mapping[str, torch.dtype]) -> int:
    return sum(prod(shape) * dtypes[name].itemsize for name, shape in hf_tensors(model).items())
