"""Kept tensors of a model folder, which trainer and engine do not use: draft layers and vision towers.

They are copied byte for byte and belong to no layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

from megarl.families.model_tensors import list_copied_prefixes, list_draft_copies
from megarl.families.shape import ModelShape
from megarl.files.model_folder import (
    INDEX,
    SINGLE,
    HeaderEntry,
    read_safetensors_header,
    safetensors_header,
    weight_files,
)
from megarl.files.strict_json import loads
from megarl.types import DataError

FILE = "kept.safetensors"
"""File with the kept tensors in the `hf` folder next to a converted checkpoint."""

_CHUNK_BYTES = 1 << 24


class UnchangedTensor(NamedTuple):
    """A tensor in a file: its dtype code in safetensors, its shape, and its bytes `start` to `stop` in the file."""

    path: Path
    code: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    @property
    def itemsize(self) -> int:
        return self.num_bytes // max(1, prod(self.shape))

    @property
    def entry(self) -> HeaderEntry:
        return HeaderEntry(self.code, self.shape, self.num_bytes)

    def content(self) -> Iterator[bytes]:
        """Yield the tensor's bytes, in pieces of at most 16 MiB. Raises DataError if the file became shorter."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            bytes_left = self.num_bytes
            while bytes_left:
                piece = file.read(min(bytes_left, _CHUNK_BYTES))
                if not piece:
                    raise DataError(f"{self.path}: became shorter while it was read. Copy or download the model again.")
                bytes_left -= len(piece)
                yield piece


def list_unchanged_tensors(folder: str | Path, model: ModelShape) -> dict[str, UnchangedTensor]:
    """Return the tensors in a folder that training leaves unchanged and exports copy, by name.

    Raises DataError for a truncated file.
    """
    prefixes = list_copied_prefixes(model)
    if not prefixes:
        return {}
    tensors: dict[str, UnchangedTensor] = {}
    for path, expected in _list_weight_files(Path(folder)):
        header = read_safetensors_header(path, expected)
        if any(name.startswith(prefixes) for name in header):
            tensors |= {name: tensor for name, tensor in read_tensor_places(path) if name.startswith(prefixes)}
    return dict(sorted(tensors.items()))


def split_unchanged_tensors(folder: str | Path, model: ModelShape) -> tuple[dict[str, UnchangedTensor], dict[str, str]]:
    """Return the tensors in `folder` that training leaves unchanged, and the draft layer's duplicates of trained
    tensors as {name: name of the trained tensor}. Raises DataError for a truncated file.
    """
    tensors = list_unchanged_tensors(folder, model)
    copies = {name: original for name, original in list_draft_copies(model).items() if name in tensors}
    return {name: tensor for name, tensor in tensors.items() if name not in copies}, copies


def total_bytes(tensors: Mapping[str, UnchangedTensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors.values())


def file_content(tensors: Mapping[str, UnchangedTensor]) -> Iterator[bytes]:
    """Yield the content of a safetensors file with these tensors, in pieces of at most 16 MiB.

    Raises DataError if a source file became shorter since its header was read.
    """
    # Like the safetensors library: the largest items first, so that each tensor is aligned.
    sorted_tensors = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    yield safetensors_header({name: tensor.entry for name, tensor in sorted_tensors})
    for _, tensor in sorted_tensors:
        yield from tensor.content()


def _list_weight_files(folder: Path) -> Iterable[tuple[Path, set[str]]]:
    """Return each safetensors file with the tensors that the folder's index expects in it."""
    if (folder / FILE).exists():
        return [(folder / FILE, set())]
    # A conversion's input may have only config.json and tokenizer.
    if not (folder / SINGLE).exists() and not (folder / INDEX).exists():
        return []
    return [(folder / file, expected) for file, expected in weight_files(folder).items()]


def read_tensor_places(path: Path) -> Iterator[tuple[str, UnchangedTensor]]:
    """Yield the tensors of a file, by name. Call `read_safetensors_header` first: it checks the header."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        # The format limits a header to 100 MB.
        header = loads(file.read(size), None)
    for name, entry in header.items():
        if name != "__metadata__":
            # Offsets count from the end of the header, which follows its 8-byte length.
            start, stop = (8 + size + offset for offset in entry["data_offsets"])
            yield name, UnchangedTensor(path, entry["dtype"], tuple(entry["shape"]), start, stop)
