"""Reader of `torch_dist` checkpoints written by any Megatron. It runs no code from them.

`.metadata` is a pickle. Its unpickler allows a short list of plain records and refuses all other classes. Chunks are
read with `weights_only`.
"""

from __future__ import annotations

import errno
import io
import mmap
import pickle
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from megarl.checkpoint.manifest import MANIFEST, check_hashes, check_sizes
from megarl.checkpoint.torch_dist import BACKEND, COMMON, METADATA, Parameter, Stored, parameters
from megarl.families.draft_layers import PARAMETERS as DRAFT_LAYERS
from megarl.families.model_tensors import hf_tensors
from megarl.families.shape import ModelShape
from megarl.files.atomic import raise_storage_errors
from megarl.files.strict_json import loads
from megarl.processes.process_tree import fault_of
from megarl.reshard.boxes import Box, Piece
from megarl.types import DataError

_RECORDS = "torch.distributed.checkpoint."
_ALLOWED = {
    (_RECORDS + module, name)
    for module, names in {
        "metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
        "TensorStorageMetadata _MEM_FORMAT_ENCODING",
        "filesystem": "_StorageInfo",
        "planner": "SavePlan TensorWriteData WriteItem WriteItemType",
    }.items()
    for name in names.split()
} | {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")}
"""Classes allowed in a `.metadata` file besides torch's dtypes: plain records without behaviour."""


_COMMON_OBJECT = "common_state"
"""State common to all ranks, in checkpoints without `common.pt`."""

_SECONDS, _BYTES_PER_SECOND = 10, 1_000_000
_MEMORY = 1 << 30
"""Limits for reading `.metadata`: seconds (plus 1 for each MB of the file), bytes of memory (plus 64 for each byte)."""


class CheckpointReader:
    """Reader of a `torch_dist` checkpoint of a known model, by the names of Hugging Face tensors.

    `pieces` (stored index ranges) and `dtypes` are by Hugging Face tensor. `model` gets trained draft layers if the
    checkpoint has them. Raises DataError naming the file if a part is missing, truncated, or of another model.
    """

    def __init__(self, folder: Path, model: ModelShape) -> None:
        """Find the chunks of all the model's tensors. Raises DataError if elements are missing."""
        self.folder = folder
        self.pieces: dict[str, list[Piece]] = defaultdict(list)
        self.dtypes: dict[str, torch.dtype] = {}
        self._chunks: dict[str, tuple[Stored, tuple[int, ...], torch.dtype]] = {}
        self._starts: dict[str, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        _check_backend(folder)
        stored = self._stored = _Metadata(folder)
        if stored.has_draft_layers:
            if problem := model.draft_layers_problem:
                # Layers copied from the model folder would be older than the layers trained with the checkpoint's
                # policy.
                raise DataError(
                    f"{folder / METADATA}: has draft layers, but {problem}. Give the model's own config.json."
                )
            model = model.with_draft_layers(True)
        self.model = model
        for parameter in parameters(model):
            self._add_parameter(parameter, stored)
        for name, shape in hf_tensors(model).items():
            if sum(piece.box.numel for piece in self.pieces[name]) != prod(shape):
                raise DataError(f"{folder / METADATA}: the checkpoint does not hold all of {name}. {_AGAIN}")

    def read_storage(self, name: str) -> Tensor:
        """Return a storage (a stored part of a tensor), memory-mapped: [elements]."""
        place, shape, dtype = self._chunks[name]
        if name not in self._starts:
            self._starts[name] = place.start + self._find_byte_offset(place, shape, dtype)
        path = self.folder / place.file
        if path not in self._maps:
            with path.open("rb") as file:
                # Copy-on-write, because torch.frombuffer warns about read-only memory. Nothing is written.
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return torch.frombuffer(self._maps[path], dtype=dtype, count=prod(shape), offset=self._starts[name])

    def read_further_tensor(self, key: str, shape: tuple[int, ...]) -> Tensor:
        """Return a whole tensor [*shape] outside the model, such as a drafter's, by its key in the checkpoint.

        Raises DataError if it is missing, damaged, or has another shape.
        """
        stored = self._stored.tensor(key, 0)
        if stored.shape != shape:
            raise DataError(f"{self.folder / METADATA}: {key} is {stored.shape}, but must be {shape}. {_AGAIN}")
        # Values that no part has stay NaN.
        tensor = torch.full(shape, torch.nan, dtype=stored.dtype)
        for offset, part_shape, part_place in stored.chunks.get((), ()):
            name = f"{key} {offset}"
            self._chunks[name] = (part_place, part_shape, stored.dtype)
            part = tuple(slice(start, start + length) for start, length in zip(offset, part_shape, strict=True))
            tensor[part] = self.read_storage(name).view(part_shape)
        if not torch.isfinite(tensor).all():
            raise DataError(f"{self.folder}: {key} is not complete, or has values that are not finite. {_AGAIN}")
        return tensor

    def release(self) -> None:
        """Free the memory of the mapped pages. The files stay mapped."""
        for mapped in self._maps.values():
            # A map cannot be closed while tensors use it, but its pages can be dropped.
            mapped.madvise(mmap.MADV_DONTNEED)

    def _add_parameter(self, parameter: Parameter, stored: _Metadata) -> None:
        """Add the pieces of one Megatron parameter. Leading axes of the stored tensor number layers or experts."""
        key, leading_indices = stored.find(parameter)
        tensor, num_leading = stored.tensor(key, len(leading_indices)), len(leading_indices)
        parameter_shape = parameter.shape(tensor.shape[num_leading] if parameter.rule.padded else 0)
        if tensor.shape[num_leading:] != parameter_shape or (
            parameter.rule.padded and parameter_shape[0] < parameter.rule.tensors[0][1][0]
        ):
            raise DataError(f"{self.folder / METADATA}: {key} is {tensor.shape}, which does not fit config.json.")
        # Missing chunks are found at the end, by the number of elements covered.
        for offset, shape, place in tensor.chunks.get(leading_indices, ()):
            name = f"{key} {leading_indices}{offset}"
            box = Box("", offset, tuple(a + n for a, n in zip(offset, shape, strict=True)))
            self._chunks[name] = (place, (*(1,) * num_leading, *shape), tensor.dtype)
            for piece in parameter.pieces(box, name):
                self.pieces[piece.box.name].append(piece)
                self.dtypes[piece.box.name] = tensor.dtype

    def _find_byte_offset(self, place: Stored, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the byte offset of a part's elements in its place in a file. Reads only the pickle around the
        elements.
        """
        path = self.folder / place.file
        try:
            # A fake tensor records the offset of its elements instead of reading them (torch 2.13).
            with path.open("rb") as file, FakeTensorMode():
                view: Any = _create_file_view(file, place.start, place.length)
                tensor = torch.load(view, map_location="cpu", weights_only=True)
                start = tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * dtype.itemsize
        except (OSError, RuntimeError, ValueError, EOFError, AttributeError, pickle.UnpicklingError) as error:
            raise DataError(f"{path}: a chunk at byte {place.start} cannot be read ({error}). {_AGAIN}") from None
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise DataError(f"{path}: the chunk at byte {place.start} is not a dense {dtype} {shape}. {_AGAIN}")
        if start + prod(shape) * dtype.itemsize > place.length:
            raise DataError(f"{path}: the chunk at byte {place.start} is cut short. {_AGAIN}")
        return start


_AGAIN = "Copy or convert the checkpoint again."


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A global tensor listed in `.metadata`.

    `chunks` maps leading indices (layer, expert) to offset, shape and place of each stored part.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: dict[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...], Stored]]]


def _check_backend(folder: Path) -> None:
    """Raise DataError unless the folder is a torch_dist checkpoint."""
    path = folder / BACKEND
    try:
        backend = loads(path.read_bytes())["sharded_backend"]
    except FileNotFoundError:
        pickle_file = next(iter(sorted(folder.rglob("*.pt"))), folder)
        raise DataError(
            f"{pickle_file}: not a torch_dist checkpoint ({path} is missing). Save it with --ckpt-format torch_dist."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error}). {_AGAIN}") from None
    if backend != "torch_dist":
        raise DataError(f"{path}: the format is {backend}; only torch_dist can be converted.")


class _Unpickler(pickle.Unpickler):
    """Unpickler that allows only listed classes and torch's dtypes, because other classes can run code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return a class or dtype of the allowed list only: others could run code."""
        if (module_name, global_name) in _ALLOWED:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(
            f"the file contains an object of the class {module_name}.{global_name}; only plain metadata is allowed, "
            "because other classes can run code"
        )


def _loads(content: bytes) -> Metadata:
    return _Unpickler(io.BytesIO(content)).load()


def read_metadata(path: Path) -> Metadata:
    """Read a `.metadata` file.

    Its pickle may contain plain records only. Raises DataError and StorageError. A few bytes of pickle can cause
    endless work, so a child process with limits reads the file first.
    """
    with raise_storage_errors(path):
        content = path.read_bytes() if path.exists() else None
    if content is None:
        raise DataError(f"{path}: not found. {_AGAIN}")
    size = len(content)
    try:
        seconds, memory_bytes = _SECONDS + size / _BYTES_PER_SECOND, _MEMORY + 64 * size
        work = partial(_loads, content)
        if fault := fault_of(work, seconds=seconds, memory_bytes=memory_bytes):
            raise pickle.UnpicklingError(f"reading its {size} bytes {fault}, so the file is damaged or malicious")
        return work()
    except Exception as error:  # A damaged pickle can raise anything.
        raise DataError(f"{path}: cannot be read ({type(error).__name__}: {error}). {_AGAIN}") from None


def check_harmless(folder: Path) -> None:
    """Check that Megatron's loader can unpickle the checkpoint without running code: read all files with
    `weights_only`. Raises DataError naming a file with other objects, StorageError for an unreadable file.
    """
    metadata, path = read_metadata(folder / METADATA), folder / COMMON
    try:
        # Megatron-Core 0.19 stores the state common to all ranks as one of the objects below.
        has_common_object = any(key.partition("/")[0] == _COMMON_OBJECT for key in metadata.state_dict_metadata)
        if path.exists() or not has_common_object:
            with path.open("rb") as file:
                _load_plain(file)
        for index, place in metadata.storage_data.items():
            path = folder / place.relative_path
            if path.parent != folder or place.transform_descriptors or place.offset < 0:
                raise ValueError("a tensor is stored compressed, or outside this folder")
            if isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
                with path.open("rb") as file:
                    file.seek(place.offset)
                    _load_plain(io.BytesIO(file.read(place.length)))
    except Exception as error:  # A damaged pickle can raise anything.
        # A missing file means a damaged checkpoint. Other system errors come from the storage.
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            with raise_storage_errors(path):
                raise
        raise DataError(f"{path}: cannot be read ({type(error).__name__}: {error}). {_AGAIN}") from None


def check_intact(folder: Path) -> None:
    """Check a checkpoint that megarl saved, before ranks load it: files equal the manifest, and contain no code.

    Raises DataError naming the first damaged or missing file, StorageError for an unreadable file.
    """
    expected = check_sizes(folder)
    if not expected:
        raise DataError(
            f"{folder / MANIFEST}: not found: it was removed, or an earlier version of megarl saved the checkpoint. "
            "Use another checkpoint."
        )
    check_hashes(folder, expected)
    check_harmless(folder)


def _load_plain(file: IO[bytes]) -> None:
    """Load a file of `torch.save` without running code from it.

    torch raises UnpicklingError for objects other than numbers, strings, tensors, lists and dicts. Raises ValueError
    for a compressed file.
    """
    _refuse_compressed(file)
    torch.load(file, map_location="cpu", weights_only=True)


def _refuse_compressed(file: IO[bytes]) -> None:
    """Raise ValueError if entries of a file of `torch.save` are compressed or overlap. Then seek to the file's start.

    torch.save writes neither. A compressed entry may expand 1,000 times in memory.
    """
    num_bytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    # torch recognises a ZIP archive by these bytes. Its older format is not compressed.
    if file.read(4) == b"PK\x03\x04":
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                is_plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries) and not archive.comment
        except zipfile.BadZipFile as error:
            raise ValueError(f"it is no ZIP archive ({error})") from None
        if not is_plain or sum(entry.file_size for entry in entries) > num_bytes:
            raise ValueError("its entries are compressed, or overlap")
    file.seek(0)


class _Metadata:
    """Contents of a checkpoint's `.metadata`, validated on access."""

    def __init__(self, folder: Path) -> None:
        """Read the tables of stored tensors and of their places in files."""
        self._path = folder / METADATA
        self._tensors: dict[str, _StoredTensor] = {}
        self._sizes: dict[str, int] = {}
        records = read_metadata(self._path)
        try:
            self._records: Mapping[str, Any] = records.state_dict_metadata
            self._places: Mapping[MetadataIndex, Any] = records.storage_data
        except AttributeError as error:
            raise DataError(f"{self._path}: cannot be read ({error}). {_AGAIN}") from None

    @property
    def has_draft_layers(self) -> bool:
        return any(key.startswith(DRAFT_LAYERS) for key in self._records)

    def find(self, parameter: Parameter) -> tuple[str, tuple[int, ...]]:
        """Return the key of a parameter in the checkpoint, and its layer and expert as indices of the stored tensor.

        Some checkpoints have the layer in the key, and no index for it.
        """
        for key in parameter.keys:
            if key in self._records:
                return key, parameter.leading
            if parameter.leading:
                layer, *rest = parameter.leading
                layer_key = key.replace("decoder.layers.", f"decoder.layers.{layer}.", 1)
                if layer_key in self._records:
                    return layer_key, tuple(rest)
        raise DataError(f"{self._path}: the checkpoint does not contain the tensor {parameter.keys[0]}. {_AGAIN}")

    def tensor(self, key: str, depth: int) -> _StoredTensor:
        """Return the tensor stored under a key. Its first `depth` dimensions are layer and expert."""
        if key not in self._tensors:
            try:
                self._tensors[key] = self._read_tensor(key, depth)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise DataError(f"{self._path}: the entry of {key} is not valid ({error}). {_AGAIN}") from None
        return self._tensors[key]

    def _read_tensor(self, key: str, depth: int) -> _StoredTensor:
        """Return the tensor stored as `key`. Chunks are grouped by their first `depth` indices (layer, expert)."""
        record = self._records[key]
        if not isinstance(record, TensorStorageMetadata):
            raise DataError(f"{self._path}: {key} is not a tensor. {_AGAIN}")
        chunks = defaultdict(list)
        for chunk in record.chunks:
            offset, shape = tuple(chunk.offsets), tuple(chunk.sizes)
            info = self._places[MetadataIndex(key, offset)]
            # A downloaded checkpoint must not make megarl read files elsewhere.
            if Path(info.relative_path).name != info.relative_path:
                raise DataError(
                    f"{self._path}: {key} is stored in {info.relative_path!r}, which is not a file of this folder. "
                    "Copy or convert the checkpoint again."
                )
            if info.transform_descriptors or shape[:depth] != (1,) * depth:
                raise DataError(
                    f"{self._path}: {key} is compressed, or one of its files' chunks has several layers. Save the "
                    "checkpoint again without compression, with one layer per chunk."
                )
            path, end = self._path.with_name(info.relative_path), info.offset + info.length
            if self._file_bytes(path) < end:
                raise DataError(
                    f"{path}: {self._file_bytes(path)} bytes, cut short: {key} ends at byte {end}. {_AGAIN}"
                )
            place = Stored(info.relative_path, info.offset, info.length)
            chunks[offset[:depth]].append((offset[depth:], shape[depth:], place))
        return _StoredTensor(tuple(record.size), record.properties.dtype, chunks)

    def _file_bytes(self, path: Path) -> int:
        """Return a file's size in bytes, cached because a file has thousands of parts."""
        if path.name not in self._sizes:
            if not path.is_file():
                raise DataError(f"{path}: not found. {_AGAIN}")
            self._sizes[path.name] = path.stat().st_size
        return self._sizes[path.name]
