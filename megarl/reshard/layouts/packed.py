"""Layouts of packed tensors. A packed tensor of a checkpoint has all experts of a layer, maybe with transposed or
alternating rows.

Reshard plans have one tensor per expert; files and vLLM's loader have packed tensors (`families.packed`). This module
converts a layout of packed tensors into one of single experts' tensors. Only offsets and strides change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megarl.families.model_tensors import hf_tensors, list_aliases, template_shapes
from megarl.families.shape import ModelShape
from megarl.families.tensors.names import TensorName, parse_name
from megarl.families.tensors.packed import Alias
from megarl.reshard.boxes import Box, Layout, Piece


def checkpoint_tensors(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in the model's files by name; experts are packed."""
    shapes = {alias.packed: alias.packed_shape for alias in list_aliases(model)}
    names, plain = checkpoint_names(model), hf_tensors(model)
    return {stored: shapes.get(parse_name(stored).template) or plain[name] for name, stored in names.items()}


def checkpoint_names(model: ModelShape) -> dict[str, str]:
    """Return the name in the model's files of each tensor of `hf_tensors`.

    All experts of a layer may share a packed tensor.
    """
    packed = {alias.tensor: alias.packed for alias in list_aliases(model)}
    tensors = {name: parse_name(name) for name in hf_tensors(model)}
    return {
        name: packed[tensor.template].format(layer=tensor.layer) if tensor.template in packed else name
        for name, tensor in tensors.items()
    }


def unpack_layout(layout: Iterable[Piece], model: ModelShape) -> Layout:
    """Return the layout with each piece of a packed tensor replaced by pieces of single experts' tensors."""
    aliases: dict[str, list[Alias]] = {}
    for alias in list_aliases(model):
        aliases.setdefault(alias.packed, []).append(alias)
    if not aliases:
        # This function is called for each tensor of a file. Without packed tensors it needs no table.
        return tuple(layout)
    shapes = template_shapes(model)
    pieces: list[Piece] = []
    for piece in layout:
        tensor = parse_name(piece.box.name)
        if tensor.template in aliases:
            for alias in aliases[tensor.template]:
                pieces += _expert_pieces(piece, alias, tensor.layer, shapes[alias.tensor])
        else:
            pieces.append(piece)
    return tuple(pieces)


def _expert_pieces(piece: Piece, alias: Alias, layer: int, shape: tuple[int, ...]) -> Iterator[Piece]:
    """Cut a piece of a packed tensor into pieces of single experts' tensors of one kind, such as `down_proj`.

    `shape`: of one expert's tensor. Index k of its axis lies at `start + k * step` of axis `dim` of the packed tensor
    (`alias.axes`).
    """
    box, start, stop, strides, offset = piece.box, [], [], [], piece.offset
    for size, axis in zip(shape, alias.axes, strict=True):
        # The first index at or after the box's edge: negated floor division rounds up.
        low, high = (-((axis.start - edge[axis.dim]) // axis.step) for edge in (box.start, box.stop))
        start.append(max(low, 0))
        stop.append(min(high, size))
        strides.append(piece.strides[axis.dim] * axis.step)
        offset += (axis.start + start[-1] * axis.step - box.start[axis.dim]) * piece.strides[axis.dim]
    if any(low >= high for low, high in zip(start, stop, strict=True)):
        return
    for expert in range(box.start[0], box.stop[0]):
        name = TensorName(alias.tensor, layer, expert).name
        expert_offset = offset + (expert - box.start[0]) * piece.strides[0]
        yield Piece(Box(name, tuple(start), tuple(stop)), piece.storage, expert_offset, tuple(strides))
