"""Layouts of Megatron's parameters, computed from the model's sizes and the ranks' parallel coordinates.

Each rank computes the layouts of all ranks, without a collective or a model. `check_shapes` compares a rank's layout
with the live model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from megarl.config.parallel import Coordinates, ParallelConfig
from megarl.families.model_tensors import float32_templates, list_model_tensors, list_rules
from megarl.families.shape import ModelShape, sizes_of
from megarl.families.tensors.names import TensorName
from megarl.families.tensors.rules import Rule
from megarl.reshard.boxes import contiguous_strides
from megarl.reshard.world import Holding, Layouts, StoragePattern
from megarl.types import ConfigError


def megatron_layouts(
    model: ModelShape, parallel: ParallelConfig, *, padded_vocab_size: int, transformer_engine: bool = False
) -> MegatronLayouts:
    return MegatronLayouts(model, parallel, padded_vocab_size, transformer_engine)


def parameter_shapes(
    layouts: MegatronLayouts,
    coordinates: Coordinates,
    *,
    has_buffers: bool = True,
    matches: Callable[[Rule], bool] = lambda rule: True,
) -> dict[str, tuple[int, ...]]:
    """Return the local shapes of a rank's parameters by name, with vocabulary padding.

    `has_buffers`: include saved buffers. `matches` selects parameters by their rules.
    """
    shapes = {}
    experts_per_rank = layouts.model.num_experts // layouts.parallel.ep
    experts = range(coordinates.ep * experts_per_rank, (coordinates.ep + 1) * experts_per_rank)
    for chunk in (chunk for chunk in layouts.chunks if chunk.stage == coordinates.pp):
        for rule in layouts.rules:
            if (rule.is_buffer and not has_buffers) or not matches(rule):
                continue
            if rule.place == "every_layer":
                layers = range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
            else:
                layers = (-1,) if chunk in layouts.chunks_of(rule) else ()
            storage_pattern = layouts.storage_pattern(rule, chunk, coordinates.ep)
            shape = _local_shape(rule, layouts.part_lengths(rule))
            layers = [layer for layer in layers if rule.has_layer(layer)]
            for layer, expert in product(layers, experts if rule.is_expert else (0,)):
                shapes[storage_pattern.find_storage(TensorName("", layer, expert))[0]] = shape
    return shapes


def chunk_prefix(chunk: int, vpp: int) -> str:
    """Return the name prefix of the parameters in a model chunk; empty with one chunk per stage."""
    return f"chunk{chunk}." if vpp > 1 else ""


def check_shapes(shapes: Mapping[str, tuple[int, ...]], live: Mapping[str, Any]) -> None:
    """Compare a live model's parameters with the computed shapes. Raises ConfigError naming the first difference."""
    for name, value in live.items():
        if name not in shapes:
            raise ConfigError(
                f"Megatron parameter {name} {tuple(value.shape)} has no rule in the family's table. "
                "Add a rule to the model family (megarl.families)."
            )
        if tuple(value.shape) != shapes[name]:
            raise ConfigError(
                f"Megatron parameter {name} is {tuple(value.shape)}; the family's rule says {shapes[name]}."
            )
    for name in shapes:
        if name not in live:
            raise ConfigError(
                f"Megatron parameter {name} is in the family's table but not in the model. "
                "Correct the rules of the model family (megarl.families)."
            )


class ModelChunk(NamedTuple):
    """Contiguous layers of a model: virtual stage `vp_stage` on pipeline stage `stage`."""

    stage: int
    vp_stage: int
    first_layer: int
    num_layers: int


@dataclass(frozen=True)
class MegatronLayouts(Layouts):
    """Layouts of all trainer ranks.

    `padded_vocab_size` is Megatron's, a multiple of tp; no Hugging Face tensor has the padding rows. With
    `transformer_engine`, fused norms and grouped experts have Transformer Engine's names. Names begin with
    `chunk_prefix`. Raises ConfigError if tp, ep or another size does not divide the model's.
    """

    model: ModelShape
    parallel: ParallelConfig
    padded_vocab_size: int
    transformer_engine: bool = False

    def __post_init__(self) -> None:
        """Check the parallel sizes."""
        model, parallel = self.model, self.parallel
        if parallel.pp * parallel.vpp > model.num_layers:
            chunks = f"pp {parallel.pp}" + (f" * vpp {parallel.vpp}" if parallel.vpp > 1 else "")
            raise ConfigError(f"{chunks} exceeds the model's {model.num_layers} layers.")
        if model.num_experts % parallel.ep:
            raise ConfigError(f"ep {parallel.ep} does not divide the model's {model.num_experts} experts.")
        for rule in self.rules:
            self.part_lengths(rule)

    def __len__(self) -> int:
        return self.parallel.world_size

    @cached_property
    def tensors(self) -> Sequence[TensorName]:
        return list_model_tensors(self.model)

    def holdings(self, tensor: TensorName) -> tuple[Holding, ...]:
        """Return the parts that the rules of the tensor's template store, one object for all tensors of a kind."""
        # Two rules may have the same template for different layers, so compare the layer too.
        rules = [rule for rule in self._rules_of_template.get(tensor.template, ()) if rule.has_layer(tensor.layer)]
        in_layers = bool(rules) and rules[0].place == "every_layer"
        chunk = self.chunk(tensor.layer) if in_layers else None
        is_expert = bool(rules) and rules[0].is_expert
        ep = tensor.expert * self.parallel.ep // self.model.num_experts if is_expert else 0
        # Return one object for equal kinds: plans identify a kind of tensor by the id of its holdings.
        kind = (tensor.template, chunk, ep, tuple(rule.parameter for rule in rules))
        if kind not in self._holdings_by_kind:
            self._holdings_by_kind[kind] = tuple(
                holding
                for rule in rules
                for rule_chunk in ([chunk] if chunk else self.chunks_of(rule))
                for holding in self._holdings(rule, tensor.template, rule_chunk, ep)
            )
        return self._holdings_by_kind[kind]

    def storage_pattern(self, rule: Rule, chunk: ModelChunk, ep: int) -> StoragePattern:
        """Return the name pattern of a rule's parameter in a model chunk, with the first layer and the first expert.

        `ep`: expert-parallel coordinate of the storing ranks.
        """
        first_expert = ep * (self.model.num_experts // self.parallel.ep) if rule.is_expert else 0
        return StoragePattern(
            chunk_prefix(chunk.vp_stage, self.parallel.vpp) + rule.parameter, chunk.first_layer, first_expert
        )

    def part_lengths(self, rule: Rule) -> tuple[int, ...]:
        """Return the length of a rank's part of each fused block, along the split dimension of the parameter.

        tp 2, q of 8 rows fused with k of 4 rows: (4, 2). Raises ConfigError if a block cannot be divided evenly.
        """
        lengths = [sum(segment.stop - segment.start for segment in block) for block in rule.blocks]
        # Megatron splits the padded vocabulary, so the real rows end inside the last ranks' parts.
        lengths = [self.padded_vocab_size] if rule.padded else lengths
        splits = self.count_splits(rule)
        for length in lengths:
            if length % splits:
                axis = "etp" if rule.is_expert else "tp"
                sizes = sizes_of(self.model, rule.tensors[0][0])
                raise ConfigError(f"{axis} {splits} does not divide the model's {sizes}; use a size that does.")
        return tuple(length // splits for length in lengths)

    def count_splits(self, rule: Rule) -> int:
        return 1 if rule.dim is None else self.parallel.etp if rule.is_expert else self.parallel.tp

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(rule.resolve(self.transformer_engine) for rule in list_rules(self.model))

    @cached_property
    def float32(self) -> frozenset[str]:
        return float32_templates(self.rules)

    @cached_property
    def _rules_of_template(self) -> dict[str, list[Rule]]:
        rules_by_template: dict[str, list[Rule]] = {}
        for rule in self.rules:
            for template, _ in rule.tensors:
                rules_by_template.setdefault(template, []).append(rule)
        return rules_by_template

    @cached_property
    def _holdings_by_kind(self) -> dict[tuple[Any, ...], tuple[Holding, ...]]:
        return {}

    @cached_property
    def chunks(self) -> tuple[ModelChunk, ...]:
        """All model chunks in layer order: the first chunk of every stage, then the second chunk of every stage."""
        pp, sizes = self.parallel.pp, self.parallel.layers_by_chunk(self.model.num_layers)
        return tuple(ModelChunk(i % pp, i // pp, sum(sizes[:i]), size) for i, size in enumerate(sizes))

    def chunk(self, layer: int) -> ModelChunk:
        return self._chunk_of_layer[layer]

    @cached_property
    def _chunk_of_layer(self) -> tuple[ModelChunk, ...]:
        return tuple(chunk for chunk in self.chunks for _ in range(chunk.num_layers))

    def chunks_of(self, rule: Rule) -> tuple[ModelChunk, ...]:
        """Return the model chunks with a parameter outside the transformer layers, such as an embedding."""
        # With several stages, tied embeddings have a second copy on the last stage.
        if rule.place == "last_of_several_stages":
            return self.chunks[-1:] if self.parallel.pp > 1 else ()
        return {"first_stage": self.chunks[:1], "last_stage": self.chunks[-1:]}[rule.place]

    def _holdings(self, rule: Rule, template: str, chunk: ModelChunk, ep: int) -> Iterator[Holding]:
        """Yield the parts of the tensors with a template that one rule stores in a chunk, with their ranks."""
        dim, part_lengths, shape = rule.dim or 0, self.part_lengths(rule), dict(rule.tensors)[template]
        storage_pattern, strides = (
            self.storage_pattern(rule, chunk, ep),
            contiguous_strides(_local_shape(rule, part_lengths)),
        )
        for tensor_rank in range(self.count_splits(rule)):
            ranks = self.ranks[rule.is_expert, chunk.stage, ep, tensor_rank if rule.dim is not None else None]
            block_offset = 0
            for block, part_length in zip(rule.blocks, part_lengths, strict=True):
                segment_offset, part_start = 0, tensor_rank * part_length
                for segment in block:
                    segment_length = segment.stop - segment.start
                    overlap_start, overlap_stop = (
                        max(segment_offset, part_start),
                        min(segment_offset + segment_length, part_start + part_length),
                    )
                    # Offsets count along the split dimension.
                    # A fused parameter alternates segments of several tensors. Only a segment's overlap with this
                    # rank's part counts.
                    if overlap_start < overlap_stop and segment.tensor == template:
                        box_start, box_stop = [0] * len(shape), list(shape)
                        box_start[dim], box_stop[dim] = (
                            segment.start + overlap_start - segment_offset,
                            segment.start + overlap_stop - segment_offset,
                        )
                        offset = (block_offset + overlap_start - part_start) * strides[dim]
                        yield Holding(tuple(box_start), tuple(box_stop), ranks, storage_pattern, offset, strides)
                    segment_offset += segment_length
                block_offset += part_length

    @cached_property
    def ranks(self) -> dict[tuple[bool, int, int, int | None], tuple[int, ...]]:
        """The ranks at each position of the parallel grid.

        The key is (in the experts' grid, pipeline stage, expert-parallel coordinate, tensor-parallel coordinate). The
        last entry None: all tensor-parallel coordinates.
        """
        ranks_by_key: dict[tuple[bool, int, int, int | None], list[int]] = {}
        for rank in range(self.parallel.world_size):
            coordinates = self.parallel.coordinates(rank)
            # All expert-parallel ranks have the dense parameters, so their coordinate is always 0.
            for is_expert_grid, ep, tensor_coordinate in (
                (False, 0, coordinates.tp),
                (True, coordinates.ep, coordinates.etp),
            ):
                for key in (
                    (is_expert_grid, coordinates.pp, ep, tensor_coordinate),
                    (is_expert_grid, coordinates.pp, ep, None),
                ):
                    ranks_by_key.setdefault(key, []).append(rank)
        return {key: tuple(ranks_of_key) for key, ranks_of_key in ranks_by_key.items()}


def _local_shape(rule: Rule, parts: tuple[int, ...]) -> tuple[int, ...]:
    shape = list(rule.tensors[0][1])
    shape[rule.dim or 0] = sum(parts)
    return tuple(shape)
