"""Weights for the reshard benchmarks: known bits in every layout, so that any output can be checked alone."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch import Tensor

from megarl.families.config_json.rotary import Rotary
from megarl.families.parts import GroupedQuery
from megarl.families.shape import ModelShape
from megarl.reshard.boxes import Layout, Piece
from megarl.reshard.plan import View
from megarl.reshard.transport import strided_view

QWEN3_14B = ModelShape(
    family="qwen3", hidden_size=5120, intermediate_size=17408, num_layers=40, vocab_size=151936,
    tie_word_embeddings=False, norm_epsilon=1e-6, max_position_embeddings=40960, initializer_range=0.02,
    attention=GroupedQuery(num_heads=40, num_kv_heads=8, head_dim=128, qk_norm=True), rotary=Rotary(1e6),
)  # fmt: skip
SMALL = dataclasses.replace(
    QWEN3_14B,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    vocab_size=1000,
    attention=GroupedQuery(num_heads=8, num_kv_heads=8, head_dim=32, qk_norm=True),
)
ROWS = 512


class Arena:
    """One block of memory that holds one set of named tensors after another."""

    def __init__(self, numel: int, device: str = "cpu") -> None:
        self.flat = torch.zeros(numel, dtype=torch.bfloat16, device=device)

    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return contiguous tensors of these shapes, one after the other from the start."""
        sizes = [prod(shape) for shape in shapes.values()]
        parts = self.flat[: sum(sizes)].split(sizes)
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def storage_shapes(layout: Iterable[Piece]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the smallest row-major storages that hold all pieces."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in layout:
        last = piece.offset + sum((n - 1) * s for n, s in zip(piece.box.shape, piece.strides, strict=True))
        columns = piece.strides[0] if len(piece.strides) > 1 else 1
        rows = max(last // columns + 1, shapes.get(piece.storage, (0,))[0])
        shapes[piece.storage] = (rows, columns) if len(piece.strides) > 1 else (rows,)
    return shapes


def fill(layout: Layout, storages: Mapping[str, Tensor]) -> None:
    """Write each element's own bits where the layout says that it lies."""
    for view, bits in _blocks(layout, storages):
        view.copy_(bits)


def first_difference(layout: Layout, storages: Mapping[str, Tensor]) -> str | None:
    """Return the first tensor with a bit that is not where the layout says, or None."""
    for piece in layout:
        for view, bits in _blocks((piece,), storages):
            if not torch.equal(view, bits):
                return f"{piece.box.name} in {piece.storage}"
    return None


def _blocks(layout: Layout, storages: Mapping[str, Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield a few rows of each piece at a time, as bits: the stored ones, and the expected ones."""
    for piece in layout:
        box, storage = piece.box, storages[piece.storage].view(torch.int16)
        piece_view = strided_view(storage, View(piece.storage, piece.offset, piece.strides), box.shape, box.name)
        seed = zlib.crc32(box.name.encode()) % 30000
        for start in range(0, box.shape[0], ROWS):
            view = piece_view[start : start + ROWS]
            # Odd factors make shifted rows and columns differ; sixteen bits wrap around.
            bits = torch.full((), seed, dtype=torch.int16, device=view.device)
            for dim, (factor, low) in enumerate(zip((7919, 12289), box.start, strict=False)):
                first = low + (start if dim == 0 else 0)
                index = torch.arange(first, first + view.shape[dim], device=view.device) * factor
                bits = bits + index.to(torch.int16).view([-1 if d == dim else 1 for d in range(view.dim())])
            yield view, bits
