"""The Megatron side: every rank's pieces, computed from the model's shape and the rank's coordinates alone.

No collective and no model is needed, so each rank knows all ranks' layouts; `check_against` compares one with a live
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from megarl.model_shape import ModelShape
from megarl.parallel_layout import Coordinates, ParallelLayout
from megarl.types import ConfigError
from megarl.weights.boxes import Layout, contiguous_strides
from megarl.weights.families import rules_of, tensors_of
from megarl.weights.families.rules import Rule
from megarl.weights.world import Holding, Layouts, Place, Tensor


def megatron_layout(
    model: ModelShape,
    parallel: ParallelLayout,
    coordinates: Coordinates,
    *,
    padded_vocab_size: int,
    transformer_engine: bool = False,
) -> Layout:
    """The pieces of one trainer rank; the arguments are those of `MegatronLayouts`."""
    return MegatronLayouts(model, parallel, padded_vocab_size, transformer_engine).at(coordinates)


def megatron_layouts(
    model: ModelShape, parallel: ParallelLayout, *, padded_vocab_size: int, transformer_engine: bool = False
) -> MegatronLayouts:
    """The layouts of all trainer ranks, in rank order."""
    return MegatronLayouts(model, parallel, padded_vocab_size, transformer_engine)


def parameter_shapes(layouts: MegatronLayouts, coordinates: Coordinates) -> dict[str, tuple[int, ...]]:
    """Every parameter of one rank with its local shape, vocabulary padding included."""
    return {
        layouts.place(rule, chunk, coordinates.ep).of(tensor)[0]: _local_shape(rule, layouts.cut(rule))
        for rule, chunk, tensor in layouts.parameters(coordinates)
    }


def chunk_prefix(chunk: int, vpp: int) -> str:
    """What tells the parameters of a stage's model chunks apart; nothing where there is one."""
    return f"chunk{chunk}." if vpp > 1 else ""


def check_against(shapes: Mapping[str, tuple[int, ...]], live: Mapping[str, Any]) -> None:
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


class Chunk(NamedTuple):
    """A run of layers: virtual chunk `index` of a pipeline stage."""

    stage: int
    index: int
    first_layer: int
    num_layers: int


@dataclass(frozen=True)
class MegatronLayouts(Layouts):
    """The layouts of all trainer ranks.

    `padded_vocab_size` is Megatron's (a multiple of tp); rows past the vocabulary belong to no box. With
    `transformer_engine` fused norms and grouped experts have that library's names. Parameters of model chunks begin
    with `chunk_prefix`. Raises ConfigError if a size does not divide.
    """

    model: ModelShape
    parallel: ParallelLayout
    padded_vocab_size: int
    transformer_engine: bool = False

    def __post_init__(self) -> None:
        model, parallel = self.model, self.parallel
        stages = parallel.pp * parallel.vpp
        if parallel.vpp > 1 and parallel.pp == 1:
            raise ConfigError(f"trainer.vpp={parallel.vpp} needs trainer.pp > 1.")
        if model.num_layers % stages:
            chunks = f"trainer.pp={parallel.pp}" + (f" * trainer.vpp={parallel.vpp}" if parallel.vpp > 1 else "")
            raise ConfigError(f"{chunks} does not divide the model's {model.num_layers} layers.")
        if model.num_experts % parallel.ep:
            raise ConfigError(f"trainer.ep={parallel.ep} does not divide the model's {model.num_experts} experts.")
        if parallel.world_size % (parallel.etp * parallel.ep * parallel.pp):
            raise ConfigError(
                f"trainer.etp={parallel.etp} * trainer.ep={parallel.ep} * trainer.pp={parallel.pp} does not divide "
                f"the {parallel.world_size} ranks."
            )
        for rule in self._rules:
            self.cut(rule)

    @property
    def num_ranks(self) -> int:  # type: ignore[override]
        return self.parallel.world_size

    @cached_property
    def tensors(self) -> Sequence[Tensor]:  # type: ignore[override]
        return tensors_of(self.model)

    def holdings(self, tensor: Tensor) -> tuple[Holding, ...]:
        rules = self._rules_of_template.get(tensor.template, ())
        chunk = self._chunk(tensor.layer) if tensor.layer >= 0 else None
        expert = bool(rules) and rules[0].is_expert
        ep = tensor.expert * self.parallel.ep // self.model.num_experts if expert else 0
        key = (tensor.template, chunk, ep)
        if key not in self._made:
            self._made[key] = tuple(
                holding
                for rule in rules
                for where in ([chunk] if chunk else self._chunks_of(rule))
                for holding in self._holdings(rule, tensor.template, where, ep)
            )
        return self._made[key]

    def describe(self) -> str:
        return repr((self.model, self.parallel, self.padded_vocab_size, self.transformer_engine))

    def __getitem__(self, rank: int) -> Layout:  # type: ignore[override]
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        return self.at(self.parallel.coordinates(rank))

    def at(self, coordinates: Coordinates) -> Layout:
        """The pieces of the rank at these coordinates."""
        return tuple(
            Holding(start, stop, (), self.place(rule, chunk, coordinates.ep), offset, strides).piece(
                Tensor(template, tensor.layer, tensor.expert)
            )
            for rule, chunk, tensor in self.parameters(coordinates)
            for template, start, stop, offset, strides in self._parts(
                rule, coordinates.etp if rule.is_expert else coordinates.tp
            )
        )

    def parameters(self, coordinates: Coordinates) -> Iterator[tuple[Rule, Chunk, Tensor]]:
        """Rule, chunk and one tensor of each of the rank's parameters, in the order of the model."""
        per_rank = self.model.num_experts // self.parallel.ep
        experts = range(coordinates.ep * per_rank, (coordinates.ep + 1) * per_rank)
        for chunk in (chunk for chunk in self._chunks if chunk.stage == coordinates.pp):
            for rule in self._rules:
                if rule.place == "every_layer":
                    layers = range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
                else:
                    layers = (-1,) if chunk in self._chunks_of(rule) else ()
                for layer, expert in product(layers, experts if rule.is_expert else (0,)):
                    yield rule, chunk, Tensor(rule.tensors[0][0], layer, expert)

    def place(self, rule: Rule, chunk: Chunk, ep: int) -> Place:
        """The parameter of a rule in one chunk, on the ranks of one expert-parallel coordinate."""
        own = rule.transformer_engine if self.transformer_engine and rule.transformer_engine else rule.parameter
        first_expert = ep * (self.model.num_experts // self.parallel.ep) if rule.is_expert else 0
        return Place(chunk_prefix(chunk.index, self.parallel.vpp) + own, chunk.first_layer, first_expert)

    def cut(self, rule: Rule) -> tuple[int, ...]:
        """The length of one rank's part of each block along the split dimension."""
        lengths = [sum(segment.stop - segment.start for segment in block) for block in rule.blocks]
        if rule.padded:
            if self.padded_vocab_size < lengths[0]:
                raise ConfigError(
                    f"{rule.parameter}: padded vocabulary {self.padded_vocab_size} is below the model's {lengths[0]}."
                )
            lengths = [self.padded_vocab_size]
        if rule.dim is None:
            return tuple(lengths)
        axis = "etp" if rule.is_expert else "tp"
        for length in lengths:
            if length % self._splits(rule):
                raise ConfigError(
                    f"trainer.{axis}={self._splits(rule)} does not divide {rule.parameter}: {length} rows or columns."
                )
        return tuple(length // self._splits(rule) for length in lengths)

    def _splits(self, rule: Rule) -> int:
        return 1 if rule.dim is None else self.parallel.etp if rule.is_expert else self.parallel.tp

    @cached_property
    def _rules(self) -> tuple[Rule, ...]:
        return rules_of(self.model)

    @cached_property
    def _rules_of_template(self) -> dict[str, list[Rule]]:
        found: dict[str, list[Rule]] = {}
        for rule in self._rules:
            for template, _ in rule.tensors:
                found.setdefault(template, []).append(rule)
        return found

    @cached_property
    def _made(self) -> dict[tuple[str, Chunk | None, int], tuple[Holding, ...]]:
        return {}

    @cached_property
    def _chunks(self) -> tuple[Chunk, ...]:
        """In the order of the layers: each stage's first chunk, then each stage's second."""
        pp, vpp = self.parallel.pp, self.parallel.vpp
        size = self.model.num_layers // (pp * vpp)
        return tuple(Chunk(i % pp, i // pp, i * size, size) for i in range(pp * vpp))

    def _chunk(self, layer: int) -> Chunk:
        return self._chunks[layer * len(self._chunks) // self.model.num_layers]

    def _chunks_of(self, rule: Rule) -> tuple[Chunk, ...]:
        if rule.place == "last_of_several_stages":
            return self._chunks[-1:] if self.parallel.pp > 1 else ()
        return {"first_stage": self._chunks[:1], "last_stage": self._chunks[-1:]}[rule.place]

    def _holdings(self, rule: Rule, template: str, chunk: Chunk, ep: int) -> Iterator[Holding]:
        for split in range(self._splits(rule)):
            ranks = self._ranks[rule.is_expert, chunk.stage, ep, split if rule.dim is not None else None]
            for name, start, stop, offset, strides in self._parts(rule, split):
                if name == template:
                    yield Holding(start, stop, ranks, self.place(rule, chunk, ep), offset, strides)

    @cached_property
    def _ranks(self) -> dict[tuple[bool, int, int, int | None], tuple[int, ...]]:
        """(experts?, stage, expert-parallel coordinate, tensor-parallel coordinate or None for all) -> ranks."""
        ranks: dict[tuple[bool, int, int, int | None], list[int]] = {}
        for rank in range(self.parallel.world_size):
            at = self.parallel.coordinates(rank)
            for key in (
                (False, at.pp, 0, at.tp),
                (False, at.pp, 0, None),
                (True, at.pp, at.ep, at.etp),
            ):
                ranks.setdefault(key, []).append(rank)
        return {key: tuple(found) for key, found in ranks.items()}

    def _parts(
        self, rule: Rule, split: int
    ) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]]:
        """Tensor, start, stop, offset and strides of each range of a parameter on one tensor-parallel rank."""
        dim, parts, shapes = rule.dim or 0, self.cut(rule), dict(rule.tensors)
        strides = contiguous_strides(_local_shape(rule, parts))
        base = 0
        for block, part in zip(rule.blocks, parts, strict=True):
            low = 0 if rule.dim is None else split * part
            position = 0
            for segment in block:
                length = segment.stop - segment.start
                start, stop = max(position, low), min(position + length, low + part)
                if start < stop:
                    corner, end = [0] * len(strides), list(shapes[segment.tensor])
                    corner[dim], end[dim] = segment.start + start - position, segment.start + stop - position
                    yield segment.tensor, tuple(corner), tuple(end), (base + start - low) * strides[dim], strides
                position += length
            base += part


def _local_shape(rule: Rule, parts: tuple[int, ...]) -> tuple[int, ...]:
    shape = list(rule.tensors[0][1])
    shape[rule.dim or 0] = sum(parts)
    return tuple(shape)
