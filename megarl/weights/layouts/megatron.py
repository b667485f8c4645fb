"""The Megatron side: every rank's pieces, computed from the model's shape and the rank's coordinates alone.

No collective and no model is needed, so each rank knows all ranks' layouts; `check_against` compares one with a live
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from megarl.model_shape import ModelShape
from megarl.parallel_layout import Coordinates, ParallelLayout
from megarl.types import ConfigError
from megarl.weights.boxes import Box, Layout, Piece, contiguous_strides
from megarl.weights.families import rules_of
from megarl.weights.families.rules import Rule

if TYPE_CHECKING:
    import torch


def megatron_layout(
    model: ModelShape,
    parallel: ParallelLayout,
    coordinates: Coordinates,
    *,
    padded_vocab_size: int,
    transformer_engine: bool = False,
) -> Layout:
    """The pieces of one trainer rank.

    `padded_vocab_size` is Megatron's (a multiple of tp); rows past the vocabulary belong to no box. With
    `transformer_engine` the fused norms have that library's names. Raises ConfigError if a size does not divide.
    """
    return tuple(
        piece
        for rule, layer, storage in _parameters(model, parallel, coordinates, transformer_engine)
        for piece in _pieces(rule, layer, storage, _cut(rule, parallel.tp, padded_vocab_size), coordinates.tp)
    )


def megatron_layouts(
    model: ModelShape, parallel: ParallelLayout, *, padded_vocab_size: int, transformer_engine: bool = False
) -> tuple[Layout, ...]:
    """The layouts of all trainer ranks, in rank order; data-parallel replicas share one object."""
    made: dict[tuple[int, int], Layout] = {}
    for rank in range(parallel.world_size):
        at = parallel.coordinates(rank)
        if (at.tp, at.pp) not in made:
            made[at.tp, at.pp] = megatron_layout(
                model, parallel, at, padded_vocab_size=padded_vocab_size, transformer_engine=transformer_engine
            )
    return tuple(made[at.tp, at.pp] for at in map(parallel.coordinates, range(parallel.world_size)))


def parameter_shapes(
    model: ModelShape,
    parallel: ParallelLayout,
    coordinates: Coordinates,
    *,
    padded_vocab_size: int,
    transformer_engine: bool = False,
) -> dict[str, tuple[int, ...]]:
    """Every parameter of one rank with its local shape, vocabulary padding included."""
    return {
        storage: _local_shape(rule, _cut(rule, parallel.tp, padded_vocab_size))
        for rule, _, storage in _parameters(model, parallel, coordinates, transformer_engine)
    }


def check_against(shapes: Mapping[str, tuple[int, ...]], live: Mapping[str, torch.Tensor]) -> None:
    """Refuse a live model that `parameter_shapes` does not describe exactly. Raises ConfigError with the first name."""
    for name, value in live.items():
        if name not in shapes:
            raise ConfigError(f"Megatron parameter {name} {tuple(value.shape)} has no rule in the family's table.")
        if tuple(value.shape) != shapes[name]:
            raise ConfigError(
                f"Megatron parameter {name} is {tuple(value.shape)}; the family's rule says {shapes[name]}."
            )
    for name in shapes:
        if name not in live:
            raise ConfigError(f"Megatron parameter {name} is in the family's table but not in the model.")


def _parameters(
    model: ModelShape, parallel: ParallelLayout, coordinates: Coordinates, transformer_engine: bool
) -> Iterator[tuple[Rule, int, str]]:
    """Rule, global layer and local name of each of the rank's parameters, in the order of the model."""
    if model.num_layers % parallel.pp:
        raise ConfigError(f"trainer.pp={parallel.pp} does not divide the model's {model.num_layers} layers.")
    per_stage = model.num_layers // parallel.pp
    first, last = coordinates.pp == 0, coordinates.pp == parallel.pp - 1
    present = {
        "first_stage": first,
        "last_stage": last,
        "last_of_several_stages": last and not first,
        "every_layer": True,
    }
    for rule in rules_of(model):
        if not present[rule.place]:
            continue
        name = rule.fused_norm if transformer_engine and rule.fused_norm else rule.parameter
        for local in range(per_stage if rule.place == "every_layer" else 1):
            yield rule, coordinates.pp * per_stage + local, name.format(layer=local)


def _cut(rule: Rule, tp: int, padded_vocab_size: int) -> tuple[int, ...]:
    """The length of one rank's part of each block along the split dimension."""
    lengths = [sum(segment.stop - segment.start for segment in block) for block in rule.blocks]
    if rule.padded:
        if padded_vocab_size < lengths[0]:
            raise ConfigError(
                f"{rule.parameter}: padded vocabulary {padded_vocab_size} is below the model's {lengths[0]}."
            )
        lengths = [padded_vocab_size]
    if rule.dim is None:
        return tuple(lengths)
    for length in lengths:
        if length % tp:
            raise ConfigError(f"trainer.tp={tp} does not divide {rule.parameter}: {length} rows or columns.")
    return tuple(length // tp for length in lengths)


def _local_shape(rule: Rule, parts: tuple[int, ...]) -> tuple[int, ...]:
    shape = list(rule.tensors[0][1])
    shape[rule.dim or 0] = sum(parts)
    return tuple(shape)


def _pieces(rule: Rule, layer: int, storage: str, parts: tuple[int, ...], tp_rank: int) -> Iterator[Piece]:
    dim = rule.dim or 0
    strides = contiguous_strides(_local_shape(rule, parts))
    shapes = dict(rule.tensors)
    base = 0
    for block, part in zip(rule.blocks, parts, strict=True):
        low = 0 if rule.dim is None else tp_rank * part
        position = 0
        for segment in block:
            length = segment.stop - segment.start
            start, stop = max(position, low), min(position + length, low + part)
            if start < stop:
                corner, end = [0] * len(strides), list(shapes[segment.tensor])
                corner[dim], end[dim] = segment.start + start - position, segment.start + stop - position
                box = Box(segment.tensor.format(layer=layer), tuple(corner), tuple(end))
                yield Piece(box, storage, (base + start - low) * strides[dim], strides)
            position += length
        base += part
