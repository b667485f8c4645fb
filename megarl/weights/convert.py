"""Conversion of model folders to Megatron's distributed checkpoints and back, without the model in memory.

Both sides are layouts in Hugging Face's coordinates. What is written is written from front to back in slabs; each slab
is a destination of a plan whose sources are the other side's storages. While one slab is written and hashed, the next
is read.
"""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import lcm, prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megarl.model_folder import INDEX, weight_files
from megarl.model_shape import ModelShape, read_model_shape
from megarl.parallel_layout import ParallelLayout
from megarl.types import ConfigError, DataError
from megarl.weights.boxes import Box, Piece, contiguous_strides
from megarl.weights.families import hf_tensors
from megarl.weights.layouts.safetensors import (
    check_tensors,
    config_of_type,
    file_header,
    index_text,
    pack_files,
    read_layout,
)
from megarl.weights.layouts.torch_dist import (
    BACKEND,
    COMMON,
    METADATA,
    Chunk,
    Stored,
    common_state,
    empty_state,
    extra_states,
    metadata_bytes,
    split,
)
from megarl.weights.layouts.torch_dist_reader import CheckpointReader
from megarl.weights.ledger import MANIFEST, Ledger, check_hashes, check_sizes, new_folder
from megarl.weights.plan import make_plan
from megarl.weights.transport import Transport

SHARD_BYTES = 5_000_000_000
SLAB_BYTES = 1 << 26

TRACKER, RELEASE, COMPANIONS = "latest_checkpointed_iteration.txt", "release", "hf"

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".onnx", ".gguf")
"""Endings of files that hold weights in one form or another: never copied."""


class Source(Protocol):
    """Where weights are read: pieces and types by Hugging Face tensor, and the storages that pieces name."""

    @property
    def pieces(self) -> Mapping[str, Sequence[Piece]]: ...
    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...
    def storage(self, name: str) -> Tensor: ...
    def release(self) -> None:
        """Give memory back that a slab needed."""
        ...


class FolderReader:
    """The tensors of a model folder, mapped. Raises DataError naming the file for one that is not the model's."""

    def __init__(self, folder: Path, model: ModelShape) -> None:
        layout, self._tensors = read_layout(folder)
        check_tensors(model, self._tensors, folder)
        self.pieces = {piece.box.name: (piece,) for piece in layout}
        self.dtypes = {name: tensor.dtype for name, tensor in self._tensors.items()}
        self._maps: dict[Path, mmap.mmap] = {}

    def storage(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if tensor.file not in self._maps:
            with tensor.file.open("rb") as file:
                self._maps[tensor.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return torch.frombuffer(
            self._maps[tensor.file], dtype=tensor.dtype, count=prod(tensor.shape), offset=tensor.start
        )

    def release(self) -> None:
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion did."""

    folder: Path
    num_tensors: int
    weight_bytes: int
    seconds: float
    is_verified: bool


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
    """Write a model folder as a `torch_dist` checkpoint, chunked for tp, pp, ep and etp; any others can load it.

    `out/release` is the checkpoint, `out/hf` keeps the folder's other files, `out/manifest.json` comes last. Raises
    ConfigError for sizes that do not fit the model and if `out` is there, DataError naming a file that is not whole.
    """
    started = time.perf_counter()
    _refuse_pickled(hf)
    model = read_model_shape(hf)
    parallel = _parallel(tp, pp, ep, etp, model)
    source = FolderReader(hf, model)
    dtypes = {name: dtype or source.dtypes[name] for name in hf_tensors(model)}
    chunks = list(split(model, parallel, dtypes, SLAB_BYTES))
    with new_folder(out) as ledger:
        with _checked(hf):
            stored = _write_chunks(source, chunks, ledger)
            _write_records(ledger, model, parallel, chunks, stored)
            _copy_companions(hf, ledger, COMPANIONS, dtype, with_index=dtype is None)
            ledger.append(TRACKER, RELEASE.encode())
        layout = {
            "format": "torch_dist",
            "checkpoint": RELEASE,
            **{n: getattr(parallel, n) for n in ("tp", "pp", "ep", "etp")},
        }
        ledger.close(layout)
        if verify:
            verify_copy(source, CheckpointReader(ledger.folder / RELEASE, model), model, ledger.folder)
    return Conversion(out, len(dtypes), _num_bytes(model, dtypes), time.perf_counter() - started, verify)


def to_hf(
    megatron: Path,
    out: Path,
    *,
    hf: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int | None = None,
    verify: bool = False,
) -> Conversion:
    """Write a `torch_dist` checkpoint of any layout as a model folder.

    `megatron` is the checkpoint or the folder above it; `hf` has config.json, tokenizer and the other files, and is
    left out for a checkpoint that `to_megatron` made. Tensors go to the files that its index names, else to files of
    `shard_bytes`. Raises ConfigError if `out` is there, DataError naming a file that is not whole.
    """
    started = time.perf_counter()
    checkpoint = _find_checkpoint(megatron)
    root = checkpoint.parent if (checkpoint.parent / MANIFEST).exists() else checkpoint
    companions = hf or next((f for f in (checkpoint.parent / COMPANIONS, checkpoint / COMPANIONS) if f.is_dir()), None)
    if companions is None:
        raise ConfigError(
            f"{checkpoint.parent}: has no folder {COMPANIONS} with a config.json; name a model folder with --hf."
        )
    model = read_model_shape(companions)
    with new_folder(out) as ledger, _checked(root):
        source = CheckpointReader(checkpoint, model)
        dtypes = {name: dtype or source.dtypes[name] for name in hf_tensors(model)}
        has_index = dtype is None and shard_bytes is None and (companions / INDEX).exists()
        files = _files_of_index(companions, dtypes) if has_index else None
        total = _num_bytes(model, dtypes)
        if files is None:
            has_index = False
            widest = max(kind.itemsize for kind in dtypes.values())
            packed = pack_files(hf_tensors(model), widest, shard_bytes or SHARD_BYTES)
            files = {file: list(tensors) for file, tensors in packed.items()}
        _write_files(source, files, model, dtypes, ledger)
        _copy_companions(companions, ledger, "", dtype, with_index=has_index)
        if not has_index and len(files) > 1:
            ledger.append(INDEX, index_text(files, total).encode())
        ledger.close({"format": "safetensors"})
        if verify:
            verify_copy(source, FolderReader(ledger.folder, model), model, ledger.folder)
    return Conversion(out, len(dtypes), total, time.perf_counter() - started, verify)


@dataclass(frozen=True, slots=True)
class _Slab:
    """A dense box to be filled: `pieces` of the storage "slab"; `write` takes the filled tensor."""

    pieces: Sequence[Piece]
    shape: tuple[int, ...]
    dtype: torch.dtype
    write: Callable[[Tensor], None]


def _stream(source: Source, slabs: Iterable[_Slab]) -> None:
    """Fill slab after slab, in two buffers; one is written while the other is filled."""
    buffers = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
    with ThreadPoolExecutor(1) as writer:
        writing = None
        for index, slab in enumerate(slabs):
            filled = _fill(source, slab, buffers, index % 2)
            if writing is not None:
                writing.result()
            writing = writer.submit(slab.write, filled)
        if writing is not None:
            writing.result()


def _fill(source: Source, slab: _Slab, buffers: list[np.ndarray], slot: int) -> Tensor:
    count = prod(slab.shape)
    if buffers[slot].nbytes < count * slab.dtype.itemsize:
        buffers[slot] = np.empty(max(count * slab.dtype.itemsize, SLAB_BYTES), np.uint8)
    # A tensor whose storage is no longer than itself: torch.save writes whole storages.
    target = torch.frombuffer(buffers[slot][: count * slab.dtype.itemsize], dtype=slab.dtype)
    if sum(piece.box.numel for piece in slab.pieces) < count:
        target.zero_()
    names = {piece.box.name for piece in slab.pieces}
    available = tuple(piece for name in sorted(names) for piece in source.pieces[name])
    plan = make_plan([available], [tuple(slab.pieces)], itemsize=slab.dtype.itemsize, bucket_bytes=1 << 62).for_rank(0)
    needed = {transfer.source.storage for bucket in plan.buckets for transfer in bucket.local}
    storages = {name: source.storage(name) for name in sorted(needed)}
    Transport(plan, storages, {"slab": target}, dtype=slab.dtype).reshard()
    source.release()
    return target.view(slab.shape)


def _write_chunks(source: Source, chunks: Sequence[Chunk], ledger: Ledger) -> list[Stored]:
    """Write chunks, each to its rank's file; returns where they are."""
    stored: list[Stored] = []

    def write(chunk: Chunk, tensor: Tensor) -> None:
        file = f"__{chunk.rank}_0.distcp"
        name = f"{RELEASE}/{file}"
        start = ledger.sizes.get(name, 0)
        torch.save(tensor, ledger.stream(name))
        stored.append(Stored(file, start, ledger.sizes[name] - start))

    _stream(source, (_Slab(c.pieces, c.shape, c.dtype, partial(write, c)) for c in chunks))
    return stored


def _write_records(
    ledger: Ledger, model: ModelShape, parallel: ParallelLayout, chunks: Sequence[Chunk], stored: Sequence[Stored]
) -> None:
    """Write what makes a folder of chunks a checkpoint."""
    state = empty_state()
    at = Stored(stored[0].file, ledger.append(f"{RELEASE}/{stored[0].file}", state), len(state))
    objects = dict.fromkeys(extra_states(model), at)
    ledger.append(f"{RELEASE}/{METADATA}", metadata_bytes(list(zip(chunks, stored, strict=True)), objects))
    torch.save(common_state(model, parallel), ledger.stream(f"{RELEASE}/{COMMON}"))
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    ledger.append(
        f"{RELEASE}/{BACKEND}", json.dumps({**backends, **{f"{name}_version": 1 for name in backends}}).encode()
    )


def _write_files(
    source: Source,
    files: Mapping[str, Sequence[str]],
    model: ModelShape,
    dtypes: Mapping[str, torch.dtype],
    ledger: Ledger,
) -> None:
    """Write safetensors files from front to back."""
    shapes = hf_tensors(model)

    def slabs() -> Iterator[_Slab]:
        for file, names in files.items():
            # Wide types first, as the format's own writer does, so that every tensor is aligned.
            ordered = sorted(names, key=lambda name: -dtypes[name].itemsize)
            header = file_header({name: (dtypes[name], shapes[name]) for name in ordered})
            before = header
            for name in ordered:
                for box in _slices(name, shapes[name], dtypes[name]):
                    yield _slab(box, dtypes[name], partial(_append, ledger, file, before))
                    before = b""

    _stream(source, slabs())


def _append(ledger: Ledger, file: str, before: bytes, tensor: Tensor) -> None:
    if before:
        ledger.append(file, before)
    ledger.append(file, tensor.view(-1).view(torch.uint8).numpy().data)


def _slices(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Box]:
    """A tensor from front to back, in boxes of at most SLAB_BYTES or one row."""
    rows = max(1, SLAB_BYTES // (dtype.itemsize * prod(shape[1:])))
    for low in range(0, shape[0], rows):
        yield Box(name, (low, *(0,) * (len(shape) - 1)), (min(low + rows, shape[0]), *shape[1:]))


def _slab(box: Box, dtype: torch.dtype, write: Callable[[Tensor], None]) -> _Slab:
    return _Slab((Piece(box, "slab", 0, contiguous_strides(box.shape)),), box.shape, dtype, write)


def verify_copy(source: Source, result: Source, model: ModelShape, folder: Path) -> None:
    """Read everything back: hashes of files, bits of tensors. Raises DataError with the first name that differs."""
    buffers = [np.empty(0, np.uint8) for _ in range(2)]
    with ThreadPoolExecutor(1) as reader:
        hashed = reader.submit(check_hashes, folder, check_sizes(folder))
        for name, shape in hf_tensors(model).items():
            for box in _slices(name, shape, result.dtypes[name]):
                slab = _slab(box, result.dtypes[name], lambda tensor: None)
                before, after = _fill(source, slab, buffers, 0), _fill(result, slab, buffers, 1)
                if not torch.equal(before.view(-1).view(torch.uint8), after.view(-1).view(torch.uint8)):
                    raise DataError(f"{folder}: {name} is not what was read. Convert again; check disk and memory.")
        hashed.result()


@contextmanager
def _checked(folder: Path) -> Iterator[None]:
    """Hold a folder against its manifest, if it has one: sizes at once, contents while the body reads them too."""
    expected = check_sizes(folder)
    with ThreadPoolExecutor(1) as reader:
        hashed = reader.submit(check_hashes, folder, expected)
        yield
        hashed.result()


def _parallel(tp: int, pp: int, ep: int, etp: int, model: ModelShape) -> ParallelLayout:
    for name, size in {"tp": tp, "pp": pp, "ep": ep, "etp": etp}.items():
        if size < 1:
            raise ConfigError(f"--{name} {size} must be at least 1.")
    if not model.num_experts and (ep, etp) != (1, 1):
        raise ConfigError(f"--ep {ep} --etp {etp}: the model has no experts; leave both out.")
    if not model.num_experts:
        etp = tp
    ranks = lcm(tp, ep * etp)
    return ParallelLayout(tp=tp, pp=pp, dp=ranks // tp, rollout_tp=1, ep=ep, etp=etp)


def _refuse_pickled(hf: Path) -> None:
    """Name the pickled weights of a folder that has no others."""
    if not list(hf.glob("*.safetensors")):
        for path in sorted(path for kind in _WEIGHTS[1:] for path in hf.glob("*" + kind)):
            raise DataError(
                f"{path}: weights are read from safetensors only; convert it with transformers' save_pretrained."
            )


def _files_of_index(folder: Path, tensors: Mapping[str, Any]) -> dict[str, list[str]] | None:
    """The files of a folder's index and their tensors, in the model's order; None if it has others than the model's."""
    files = weight_files(folder)
    for file in files:
        if not file.endswith(".safetensors"):
            raise DataError(f"{folder / INDEX}: {file} is no safetensors file. Remove the index.")
    where = {name: file for file, names in files.items() for name in names}
    if where.keys() != tensors.keys():
        return None
    return {file: [name for name in tensors if where[name] == file] for file in sorted(files)}


def _copy_companions(source: Path, ledger: Ledger, folder: str, dtype: torch.dtype | None, *, with_index: bool) -> None:
    """Copy all files that hold no weights, byte for byte; only a cast changes one, config.json's type."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        hidden = any(part.startswith(".") for part in path.relative_to(source).parts[:-1])
        if hidden or not path.is_file() or path.suffix in _WEIGHTS or name == MANIFEST:
            continue
        if name.endswith(".index.json") and not (with_index and name == INDEX):
            continue
        target = f"{folder}/{name}" if folder else name
        if name == "config.json" and dtype is not None:
            ledger.append(target, config_of_type(path, dtype))
        else:
            ledger.copy(path, target)


def _find_checkpoint(folder: Path) -> Path:
    """The checkpoint in a folder, or the one that Megatron's tracker file names."""
    if (folder / METADATA).exists() or not (folder / TRACKER).exists():
        return folder
    text = (folder / TRACKER).read_text(encoding="utf-8").strip()
    if text != RELEASE and not text.isdecimal():
        raise DataError(f"{folder / TRACKER}: names no checkpoint but {text[:40]!r}.")
    return folder / (RELEASE if text == RELEASE else f"iter_{int(text):07}")


def _num_bytes(model: ModelShape, dtypes: Mapping[str, torch.dtype]) -> int:
    return sum(prod(shape) * dtypes[name].itemsize for name, shape in hf_tensors(model).items())
