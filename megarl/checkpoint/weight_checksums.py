"""Checksums of an exported model's weights, in a small file of its folder. megarl compares them on loading.

They equal the checksums of the trainer's weight version (`reshard.checks.version_checksums`). So they depend neither on
the exporting or loading ranks nor on the order of the files. Other programs ignore the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.files.model_folder import CHECKSUMS, read_object
from megarl.reshard.boxes import Box, Layout
from megarl.reshard.checks.fingerprint import MASK
from megarl.reshard.checks.ledger import piece_checksum
from megarl.reshard.checks.version_checksums import version_checksum
from megarl.reshard.transport import device_of
from megarl.types import DataError

_FORMAT = 1
"""Version of the file's format. It increases if the checksums of unchanged weights change."""


class StoredTensors(Protocol):
    """Reader of a model folder's tensors. `pieces` has their places in its storages, by tensor name."""

    pieces: dict[str, Layout]

    def read_storage(self, name: str) -> Tensor: ...

    def file_of(self, name: str) -> Path: ...


@torch.no_grad()
def compute_checksums(
    layouts: Sequence[Layout], rank: int, parameters: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> dict[str, int]:
    """Return the checksum of each tensor of a model sharded over all ranks, by name. A collective.

    `layouts` are the layouts of all ranks. `parameters` are this rank's shards, [local rows, ...] each. `dtypes` are
    the types of the stored tensors, by name.
    """
    rank_of_box: dict[Box, int] = {}
    for box_rank, layout in enumerate(layouts):
        for piece in layout:
            # Data-parallel replicas have the same box. It counts once.
            rank_of_box.setdefault(piece.box, box_rank)
    index_of_name = {name: index for index, name in enumerate(sorted({box.name for box in rank_of_box}))}
    checksums = torch.zeros(len(index_of_name), dtype=torch.int64, device=device_of([*parameters.values()]))
    for piece in layouts[rank]:
        if rank_of_box[piece.box] == rank:
            name = piece.box.name
            checksums[index_of_name[name]] += piece_checksum(piece, parameters[piece.storage], dtypes[name])
    if dist.is_initialized() and len(layouts) > 1:
        # Sums of int64 wrap around, as sums of checksums must.
        dist.all_reduce(checksums)
    return {name: value & MASK for name, value in zip(index_of_name, checksums.tolist(), strict=True)}


def checksums_text(tensors: Mapping[str, int]) -> str:
    """Return the text of the file with the tensors' checksums, by name, and the checksum of the whole model."""
    content = {
        "format": _FORMAT,
        "weights": version_checksum(tensors),
        "tensors": {name: f"{value:016x}" for name, value in sorted(tensors.items())},
    }
    return json.dumps(content, indent=1) + "\n"


def read_stored_checksums(folder: Path) -> dict[str, int]:
    """Return the checksums stored in a model folder, by tensor name; empty without the file.

    Raises DataError for an invalid file.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        return {}
    content = read_object(path)
    if content.get("format") != _FORMAT:
        raise DataError(
            f"{path}: format = {content.get('format')!r}: this version of megarl reads format {_FORMAT} only; install "
            "the version that exported the model, or remove the file, then the weights are not checked"
        )
    tensors: dict[str, int] = {}
    try:
        tensors |= {str(name): int(value, 16) for name, value in content["tensors"].items()}
        is_consistent = version_checksum(tensors) == content["weights"]
    except (KeyError, TypeError, ValueError, AttributeError):
        is_consistent = False
    if not is_consistent:
        raise DataError(f"{path}: its checksums do not fit each other. Copy or export the model again.")
    return tensors


@torch.no_grad()
def check_weights(folder: Path, stored: StoredTensors) -> None:
    """Compare a folder's tensors with its checksums, if it has any.

    If a process group exists, each of its ranks reads an equal share. Raises DataError naming file and tensor of the
    first difference.
    """
    expected = read_stored_checksums(folder)
    names = stored.pieces.keys() & expected.keys()
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for name in sorted(names)[rank::num_ranks]:
        checksum = sum(
            int(piece_checksum(piece, stored.read_storage(piece.storage)).item()) for piece in stored.pieces[name]
        )
        if checksum & MASK != expected[name]:
            raise DataError(
                f"{stored.file_of(name)}: {name} has the checksum {checksum & MASK:016x}, but {CHECKSUMS} says "
                f"{expected[name]:016x}: the file was damaged after its export. Copy or export the model again. If "
                f"another program changed the weights on purpose, remove {folder / CHECKSUMS}"
            )
