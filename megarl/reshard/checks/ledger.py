"""Checksums of a rank's weights: taken when a version is complete, and compared while the version is in use."""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.reshard.boxes import Box, Layout, Piece, dense_piece
from megarl.reshard.checks.fingerprint import checksum
from megarl.reshard.plan import View
from megarl.reshard.transport import strided_view


@dataclass(frozen=True, slots=True)
class RankChecksums:
    """Checksums of one rank's weights at one version: int64 [boxes], in the order of `boxes` (index ranges of tensors).

    `holder` names rank and node in messages. `is_converted`: the boxes are parameters of the engine's own format, which
    the trainer does not have.
    """

    holder: str
    version: int
    boxes: tuple[Box, ...]
    values: NDArray[np.int64]
    dtypes: tuple[str, ...]
    """Data type of each box, such as `torch.bfloat16`. The checksum of equal values differs between data types."""
    is_converted: bool
    seconds: float

    def select_dtypes(self, dtypes: Mapping[str, str]) -> RankChecksums:
        """Return only the checksums of boxes whose tensor is unlisted in `dtypes`, or listed with the box's
        data type.
        """
        indices = [
            index
            for index, (box, dtype) in enumerate(zip(self.boxes, self.dtypes, strict=True))
            if dtypes.get(box.name, dtype) == dtype
        ]
        boxes, box_dtypes = (tuple(values[index] for index in indices) for values in (self.boxes, self.dtypes))
        return replace(self, boxes=boxes, values=self.values[indices], dtypes=box_dtypes)


@dataclass(frozen=True, slots=True)
class RankChanges:
    """Boxes of one rank that changed outside an update or reshard. `boxes` may be empty."""

    holder: str
    version: int
    boxes: tuple[Box, ...]
    seconds: float


class Ledger:
    """Checksums of a rank's weights. `layout` lists the boxes of Hugging Face tensors stored in `tensors`.

    `tensors` maps storages to tensors [*shape] in device memory, with fixed addresses. `rank_name` is like "trainer
    rank 0". `cast_to` has a data type per box, to which the box is cast before its checksum.
    """

    def __init__(
        self,
        rank_name: str,
        layout: Layout,
        tensors: Mapping[str, Tensor],
        *,
        is_converted: bool = False,
        cast_to: Sequence[torch.dtype] | None = None,
    ) -> None:
        self._holder = f"{rank_name} on {socket.gethostname()}"
        self._cast_to = cast_to
        self._piece_indices: dict[str, list[int]] = defaultdict(list)
        """Indices of the layout's pieces in each storage."""
        for index, piece in enumerate(layout):
            self._piece_indices[piece.storage].append(index)
        self._layout, self._tensors, self._is_converted = layout, tensors, is_converted
        self._boxes = tuple(piece.box for piece in layout)
        self._dtypes = tuple(str(tensors[piece.storage].dtype) for piece in layout)
        self.newest: RankChecksums | None = None
        """The newest checksums; None: the newest version has none."""

    @classmethod
    def of_parameters(cls, rank_name: str, tensors: Mapping[str, Tensor]) -> Ledger:
        """Return a ledger of converted weights `tensors` [*shape]. Each box is a whole parameter under its own name."""
        layout = tuple(dense_piece(name, tuple(value.shape), name, 0) for name, value in tensors.items())
        return cls(rank_name, layout, tensors, is_converted=True)

    @torch.no_grad()
    def take_checksums(self, version: int) -> RankChecksums:
        """Compute, store and return the checksums of a new version."""
        start_time = time.perf_counter()
        values = self._compute_checksums()
        seconds = time.perf_counter() - start_time
        self.newest = RankChecksums(
            self._holder, version, self._boxes, values, self._dtypes, self._is_converted, seconds
        )
        return self.newest

    @torch.no_grad()
    def find_changes(self) -> RankChanges | None:
        """Return the boxes changed since the checksums were taken; None: there are no checksums."""
        if self.newest is None:
            return None
        start_time = time.perf_counter()
        changed_indices = np.flatnonzero(self._compute_checksums() != self.newest.values)
        boxes = tuple(self.newest.boxes[index] for index in changed_indices)
        return RankChanges(self._holder, self.newest.version, boxes, time.perf_counter() - start_time)

    def forget(self) -> None:
        self.newest = None

    @property
    def storages(self) -> Collection[str]:
        return self._piece_indices.keys()

    @torch.no_grad()
    def compute(self, storages: Iterable[str] | None = None) -> dict[int, Tensor]:
        """Return the checksum of each piece in `storages` (None: all), int64 [scalar] on the device, by index in the
        layout.
        """
        names = self.storages if storages is None else storages
        return {
            piece_index: self._checksum(piece_index)
            for name in names
            for piece_index in self._piece_indices.get(name, ())
        }

    def _compute_checksums(self) -> NDArray[np.int64]:
        checksums = [self._checksum(piece_index) for piece_index in range(len(self._layout))]
        # One copy to the host for all, because each copy waits for the device.
        return torch.stack(checksums).cpu().numpy() if checksums else np.zeros(0, np.int64)

    def _checksum(self, piece_index: int) -> Tensor:
        piece = self._layout[piece_index]
        if self._is_converted:
            return checksum(self._tensors[piece.storage])
        dtype = None if self._cast_to is None else self._cast_to[piece_index]
        return piece_checksum(piece, self._tensors[piece.storage], dtype)


def piece_checksum(piece: Piece, storage: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the checksum of a piece in `storage` [*any], cast to `dtype` first: int64 [scalar] on the device."""
    view = View(piece.storage, piece.offset, piece.strides)
    values = strided_view(storage, view, piece.box.shape, piece.box.name)
    return checksum(values.to(dtype or values.dtype), piece.box.start)
