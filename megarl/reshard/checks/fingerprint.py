"""Fingerprints of tensors. The fingerprints of disjoint boxes add up to that of the whole tensor."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

NUM_PROJECTIONS = 8
"""Random projections in a sketch. The estimated distance has a relative error of 1 / sqrt(2 * 8) = 0.25."""

# On CPUs a block and its temporary copy fit into a cache of some MiB. On GPUs, small blocks would wait for launches.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Maximum elements of a block, by device type. Temporary copies of a block take 8 bytes per element."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MASK = (1 << 64) - 1
"""Checksums are sums modulo 2^64."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Checksum and sketch of a tensor, or of a part of it.

    `checksum`, a 64-bit integer, changes if any element or the order changes. Each entry of `sketch` [NUM_PROJECTIONS]
    is the sum of all elements with random signs: two sketches give an estimate of their tensors' distance. `squares` is
    the sum of the squared elements, `numel` their number.
    """

    checksum: int = 0
    sketch: tuple[float, ...] = (0.0,) * NUM_PROJECTIONS
    squares: float = 0.0
    numel: int = 0

    def __add__(self, addend: Fingerprint) -> Self:
        return type(self)(
            (self.checksum + addend.checksum) & MASK,
            tuple(a + b for a, b in zip(self.sketch, addend.sketch, strict=True)),
            self.squares + addend.squares,
            self.numel + addend.numel,
        )

    def distance(self, reference: Fingerprint) -> float:
        """Return the estimated Euclidean distance of two tensors, divided by the larger norm: 0 for equal tensors.

        NaN or infinity: a tensor has NaN or infinite elements.
        """
        if (self.checksum, self.numel) == (reference.checksum, reference.numel):
            return 0.0
        # The mean square of the difference's projections is the squared norm of the difference.
        squares = [(a - b) ** 2 for a, b in zip(self.sketch, reference.sketch, strict=True)]
        estimate = math.sqrt(sum(squares) / NUM_PROJECTIONS)
        norm = math.sqrt(max(self.squares, reference.squares))
        return estimate / norm if norm else estimate


@torch.no_grad()
def fingerprint(values: Tensor, start: Sequence[int] | None = None) -> Fingerprint:
    """Return the fingerprint of `values` [*shape], a box of a larger tensor.

    `start` [dims] is the index of the box's first element in the larger tensor; None: zeros.
    """
    checksums = [torch.zeros((), dtype=torch.int64, device=values.device)]
    sketch = torch.zeros(NUM_PROJECTIONS, dtype=torch.float64, device=values.device)
    squares = torch.zeros((), dtype=torch.float64, device=values.device)
    for block, rows, first_column in _iterate_blocks(values, start):
        checksums.append(_checksum_of_block(block, rows, first_column))
        wide = _scratch(block.shape, torch.float64, values.device).copy_(block)
        columns = _random_numbers(first_column, block.shape[1], -1, values.device)
        sketch += ((wide @ _signs(columns)) * _signs(rows)).sum(0)
        squares += torch.dot(wide.view(-1), wide.view(-1))
    total = int(torch.stack(checksums).sum().item()) & MASK
    return Fingerprint(total, tuple(sketch.tolist()), float(squares.item()), values.numel())


@torch.no_grad()
def checksum(values: Tensor, start: Sequence[int] | None = None) -> Tensor:
    """Return the checksum of `values` [*shape], a box of a larger tensor: int64 [scalar] on the device.

    `start` is as in `fingerprint`. Checksums of disjoint boxes add up, modulo 2^64, to the whole tensor's checksum.
    """
    checksums = [_checksum_of_block(*block) for block in _iterate_blocks(values, start)]
    if len(checksums) == 1:
        return checksums[0]
    return torch.stack([torch.zeros((), dtype=torch.int64, device=values.device), *checksums]).sum()


def _checksum_of_block(block: Tensor, rows: Tensor, first_column: int) -> Tensor:
    """Return the checksum, int64 [scalar], of a block [rows, columns].

    `rows` has a random number per row. `first_column` is the tensor's column at which the block begins.
    """
    words, first_word = _view_as_words(block, first_column)
    columns = _random_numbers(first_word, words.shape[1], -1, block.device)
    # Products of odd numbers are odd, so each element affects at least 32 bits. Overflow wraps around.
    products = torch.mul(words, columns, out=_scratch(words.shape, torch.int64, block.device))
    return (products.sum(1) * rows).sum()


_buffers = threading.local()


def _scratch(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised contiguous tensor [*shape] for a temporary copy of a block.

    A CPU thread reuses one buffer, because page faults would take up to 90 % of a checksum's time.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    if not hasattr(_buffers, "memory"):
        _buffers.memory = torch.empty(8 * _CHUNK["cpu"], dtype=torch.uint8)
    return _buffers.memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _view_as_words(block: Tensor, first_column: int) -> tuple[Tensor, int]:
    """Return the bits of a block [rows, columns] as integers [rows, words], and the index of the first word.

    A word has the elements of 4 bytes, such as two bfloat16 elements: the sum is two to four times faster.
    `first_column` is the tensor's column at which the block begins. Bits of a word outside the block are 0.
    """
    itemsize = block.dtype.itemsize
    bits = block.view(_INTEGERS[itemsize])
    if itemsize >= 4:
        return bits, first_column
    elements_per_word = 4 // itemsize
    pad_left, pad_right = first_column % elements_per_word, -(first_column + block.shape[1]) % elements_per_word
    if pad_left or pad_right:
        bits = torch.nn.functional.pad(bits, (pad_left, pad_right))
    elif bits.storage_offset() % elements_per_word:
        # A view as words must begin at a whole word of the storage.
        bits = bits.clone()
    # Flat first: torch refuses the view if a single row has an odd stride.
    return bits.view(-1).view(torch.int32).view(len(bits), -1), first_column // elements_per_word


def _iterate_blocks(values: Tensor, start: Sequence[int] | None) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield blocks [rows, columns] of a box [*shape], each with at most _CHUNK[device] elements.

    With each block come the random odd numbers of its rows, int64 [rows], and its first column.
    """
    shape = values.shape or torch.Size((1,))
    start_index = tuple(start or (0,) * len(shape))
    rows = _row_numbers(start_index[:-1], tuple(shape[:-1]), values.device)
    matrix = values.detach().reshape(len(rows), shape[-1])
    max_numel = _CHUNK[values.device.type]
    block_columns = min(shape[-1], max_numel)
    block_rows = max(1, max_numel // max(block_columns, 1))
    for row in range(0, len(rows), block_rows):
        for column in range(0, shape[-1], max(block_columns, 1)):
            num_rows, num_columns = min(block_rows, len(rows) - row), min(block_columns, shape[-1] - column)
            block = matrix.narrow(0, row, num_rows).narrow(1, column, num_columns)
            # A view as integers needs elements of a row side by side.
            yield block.contiguous(), rows.narrow(0, row, num_rows), start_index[-1] + column


# Without caches, these numbers take several times as long as the sums of a small tensor. A model has few shapes.
@lru_cache(maxsize=1024)
def _row_numbers(start: tuple[int, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a random number for each row of a box, int64 [rows]: the product of a random number per index of the row.

    `start` and `shape` exclude the last dimension.
    """
    rows = torch.ones(1, dtype=torch.int64, device=device)
    for dim, (first_index, size) in enumerate(zip(start, shape, strict=True), -len(shape) - 1):
        # Dimensions count from the last one, -1. Each index has its own number, so the shape of the larger tensor is
        # not needed.
        rows = torch.outer(rows, _random_numbers(first_index, size, dim, device)).flatten()
    return rows


@lru_cache(maxsize=1024)
def _random_numbers(first_index: int, count: int, dim: int, device: torch.device) -> Tensor:
    """Return a random odd number for each index from `first_index` to `first_index + count` of a dimension, int64
    [count].

    The function is SplitMix64 (Steele, Lea and Flood, 2014). `dim` counts from the last dimension, -1.
    """
    # The seeds of two dimensions are 2^40 apart, more than the indices of any dimension.
    numbers = torch.arange(first_index, first_index + count, dtype=torch.int64, device=device) + (-dim << 40)
    numbers = numbers * _reinterpret_signed(0x9E3779B97F4A7C15)
    numbers = (numbers ^ _shift_right(numbers, 30)) * _reinterpret_signed(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ _shift_right(numbers, 27)) * _reinterpret_signed(0x94D049BB133111EB)
    return (numbers ^ _shift_right(numbers, 31)) | 1


def _signs(numbers: Tensor) -> Tensor:
    """Return NUM_PROJECTIONS random signs for each random number [count]: float64 [count, NUM_PROJECTIONS]."""
    # Use the high bits, in which products of numbers (as in `_iterate_blocks`) are distributed best.
    bits = torch.arange(63 - NUM_PROJECTIONS, 63, device=numbers.device)
    return ((numbers[:, None] >> bits) & 1).to(torch.float64) * 2 - 1


def _shift_right(numbers: Tensor, count: int) -> Tensor:
    return (numbers >> count) & ((1 << (64 - count)) - 1)


def _reinterpret_signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
