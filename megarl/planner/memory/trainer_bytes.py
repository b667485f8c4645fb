"""Bytes of a trained model on a rank: parameters, gradients, main weights, moments.

With the distributed optimizer, Megatron-Core stores the parameters of a model chunk in one buffer, the last parameter
first. Each parameter begins at a multiple of 64 elements. Buckets of the buffer end at a multiple of 128 and of the
data-parallel size. A data-parallel rank owns main weights and moments for an equal part of each bucket. Source:
Megatron-Core 0.16.1, distributed/param_and_grad_buffer.py and optimizer/distrib_optimizer.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import lru_cache
from typing import Literal

from megarl.config.parallel import FP8_BLOCK
from megarl.families.tensors.matrices import has_matrices, matrix_templates
from megarl.reshard.layouts.megatron import MegatronLayouts, chunk_prefix, parameter_shapes
from megarl.rounding import round_up

FLOAT32 = 4
MATRIX_BUCKET_BYTES = 1 << 28
"""Maximum bytes of one of the two staging slots of `training.muon.exchange`."""
OptimizerName = Literal["adam", "sgd", "muon"]
_PARAMETER_MULTIPLE, _BUCKET_MULTIPLE = 64, 128


@dataclass(frozen=True, slots=True)
class Parameter:
    """Sizes of one parameter on a rank."""

    numel: int
    _: KW_ONLY
    has_own_bucket: bool = False
    is_vector: bool = False
    num_moments: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStates:
    parameters: int = 0
    gradients: int = 0
    main_weights: int = 0
    moments: int = 0
    merged: int = 0
    """Bytes of weights merged with their LoRA adapters. They exist only during a reshard or an export."""
    saved: int = 0
    """Bytes that this rank writes into a checkpoint."""
    on_host: int = 0
    """Host bytes of an optimizer on the host: main weights, moments, gradients, pinned copies."""
    construction_bytes: int = 0
    """Temporary device bytes during the construction of an optimizer that is partly on the host."""
    construction_host_bytes: int = 0
    """The same for host bytes."""

    @property
    def optimizer(self) -> int:
        return self.main_weights + self.moments

    @property
    def all(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    def offloaded_bytes(self, offload: Collection[str]) -> int:
        """Gradients are freed, not copied to the host."""
        return self.parameters * ("parameters" in offload) + self.optimizer * ("optimizer" in offload)

    def __add__(self, other: TrainerStates) -> TrainerStates:
        return TrainerStates(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )


NO_STATES = TrainerStates()


# A search of layouts repeats the same sizes with many settings of activations.
@lru_cache(maxsize=512)
def trainer_states(
    layouts: MegatronLayouts,
    rank: int,
    *,
    itemsize: int,
    is_distributed: bool,
    optimizer: OptimizerName,
    is_pinned: bool,
    adapters: MegatronLayouts | None = None,
    whole_shapes: tuple[tuple[int, ...], ...] = (),
    host_fraction: float = 0.0,
) -> TrainerStates:
    """Return the bytes of a trained model's states on a rank. `itemsize`: bytes per weight.

    `adapters`: layouts of LoRA adapters; only these are trained. `whole_shapes`: shapes of trained tensors that are not
    split (a drafter). `is_pinned`: the optimizer on the host is copied through pinned memory. `host_fraction`: share of
    the parameters whose optimizer is on the host.
    """
    states = NO_STATES if adapters is None else _frozen_states(layouts, adapters, rank, itemsize=itemsize)
    trained_layouts = layouts if adapters is None else adapters
    parallel, coordinates = layouts.parallel, layouts.parallel.coordinates(rank)
    num_moments = 0 if optimizer == "sgd" else 2
    whole_parameters = [
        Parameter(math.prod(shape), is_vector=len(shape) == 1, num_moments=num_moments) for shape in whole_shapes
    ]
    buffers = [*list_gradient_buffers(trained_layouts, rank, optimizer)]
    if whole_parameters:
        dense_shard = coordinates.dp * parallel.cp + coordinates.cp
        buffers.append(
            GradientBuffer(parameters=whole_parameters, num_shards=parallel.dp * parallel.cp, shard=dense_shard)
        )
    for buffer in buffers:
        states += _buffer_states(
            buffer.parameters,
            num_shards=buffer.num_shards,
            shard=buffer.shard,
            itemsize=itemsize,
            is_distributed=is_distributed,
            is_pinned=is_pinned,
            host_fraction=host_fraction,
        )
    return states


def _frozen_states(layouts: MegatronLayouts, adapters: MegatronLayouts, rank: int, *, itemsize: int) -> TrainerStates:
    """Return the bytes of base weights under LoRA: without gradients and optimizer, but they may be offloaded."""
    coordinates = layouts.parallel.coordinates(rank)
    shapes = parameter_shapes(layouts, coordinates)
    adapted_weights = {name.partition("adapter.")[0] + "weight" for name in parameter_shapes(adapters, coordinates)}
    merged_numel = sum(math.prod(shape) for name, shape in shapes.items() if name in adapted_weights)
    return TrainerStates(parameters=sum(map(math.prod, shapes.values())) * itemsize, merged=merged_numel * itemsize)


def parameter_bytes(layouts: MegatronLayouts, rank: int, *, itemsize: int) -> int:
    shapes = parameter_shapes(layouts, layouts.parallel.coordinates(rank))
    return sum(map(math.prod, shapes.values())) * itemsize


def whole_matrix_bytes(layouts: MegatronLayouts, *, product_bytes: int) -> int:
    """Return the bytes that Muon's update takes on a rank while it computes the largest matrix in float32.

    While the matrix arrives, staging buffers hold it and about as many bytes that this rank sends. Later its normalised
    copy and the operands of products exist, with `product_bytes` per number.
    """
    matrices = matrix_templates(layouts.rules).values()
    rows, columns = max(matrices, key=math.prod, default=(0, 0))
    numel, square = rows * columns, min(rows, columns) ** 2
    staging = min(2 * FLOAT32 * numel, 2 * MATRIX_BUCKET_BYTES)
    products = max((FLOAT32 + product_bytes) * numel, product_bytes * (2 * numel + 2 * square))
    return FLOAT32 * numel + max(staging, products)


def fp8_bytes(layouts: MegatronLayouts, rank: int) -> int:
    """Return the bytes of FP8 copies of a rank's linear layers: by rows, by columns, and their scales."""
    shapes = parameter_shapes(layouts, layouts.parallel.coordinates(rank))
    # Transformer Engine keeps these matrices in 16 bits.
    in_16_bits = ("word_embeddings.weight", "output_layer.weight", "router.weight")
    numel = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) > 1 and not name.endswith(in_16_bits))
    return 2 * (numel + numel * FLOAT32 // FP8_BLOCK**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientBuffer:
    """A gradient buffer of a rank: its parameters, its number of data-parallel shards, and the rank's shard
    (from 0).
    """

    parameters: Sequence[Parameter]
    num_shards: int
    shard: int


def list_gradient_buffers(layouts: MegatronLayouts, rank: int, optimizer: OptimizerName) -> Iterator[GradientBuffer]:
    """Yield the gradient buffers of a rank, for each model chunk: dense parameters, then experts."""
    parallel = layouts.parallel
    coordinates = parallel.coordinates(rank)
    dense_shards = parallel.dp * parallel.cp
    expert_shards = parallel.world_size // (parallel.etp * parallel.ep * parallel.pp)
    # Megatron-Core gives tied embeddings a bucket of their own if first and last stage must sum their gradients.
    is_shared = layouts.model.tie_word_embeddings and parallel.pp > 1
    # Buffers of modules have no gradient.
    shapes = parameter_shapes(layouts, coordinates, has_buffers=False)
    moments_by_name = dict.fromkeys(shapes, 0 if optimizer == "sgd" else 2)
    if optimizer == "muon":
        # A matrix has a momentum; all other parameters have Adam's two moments.
        moments_by_name |= dict.fromkeys(parameter_shapes(layouts, coordinates, matches=has_matrices), 1)
    for chunk in range(parallel.vpp):
        prefix = chunk_prefix(chunk, parallel.vpp)
        chunk_shapes = {name: shape for name, shape in shapes.items() if name.startswith(prefix)}
        dense = [
            Parameter(
                math.prod(shape),
                has_own_bucket=is_shared and name.endswith(("word_embeddings.weight", "output_layer.weight")),
                is_vector=len(shape) == 1,
                num_moments=moments_by_name[name],
            )
            for name, shape in chunk_shapes.items()
            if ".experts." not in name
        ]
        experts = [
            Parameter(math.prod(shape), num_moments=moments_by_name[name])
            for name, shape in chunk_shapes.items()
            if ".experts." in name
        ]
        if dense:
            dense_shard = coordinates.dp * parallel.cp + coordinates.cp
            yield GradientBuffer(parameters=dense, num_shards=dense_shards, shard=dense_shard)
        if experts:
            # Experts have their own data-parallel groups, so Megatron-Core gives them their own buffer.
            yield GradientBuffer(parameters=experts, num_shards=expert_shards, shard=coordinates.edp)


def _buffer_states(
    parameters: Sequence[Parameter],
    *,
    num_shards: int,
    shard: int,
    itemsize: int,
    is_distributed: bool,
    is_pinned: bool,
    host_fraction: float = 0.0,
) -> TrainerStates:
    """Return the bytes of one gradient buffer's parameters on a rank. `shard`: the rank's data-parallel shard."""
    # The optimizer updates float32 main weights. Float32 parameters serve as their own.
    has_main = itemsize < FLOAT32
    if not is_distributed:
        return _unsharded_states(parameters, num_shards=num_shards, itemsize=itemsize, has_main=has_main)
    numel = sum(parameter.numel for parameter in parameters)
    buckets = _make_buckets(parameters, num_shards)
    padded_numel = buckets[-1].stop
    # The elements of each parameter that this rank's optimizer owns, last parameter first; zero or negative: none.
    overlaps = [
        _overlap_numel((start, stop), bucket.shard(shard, num_shards=num_shards))
        for bucket in buckets
        for start, stop in bucket.parameters
    ]
    owned_overlaps = [overlap for overlap in overlaps if overlap > 0]
    owned_numel = sum(owned_overlaps)
    is_vector = [parameter.is_vector for parameter in reversed(parameters)]
    numels_on_host = _estimate_numels_on_host(overlaps, is_vector, host_fraction)
    owned_moments = sum(
        overlap * parameter.num_moments
        for overlap, parameter in zip(overlaps, reversed(parameters), strict=True)
        if overlap > 0
    )
    # Only Adam moves to the host. Its parameters all have the same number of moments.
    num_moments = max(parameter.num_moments for parameter in parameters)
    numel_on_device = owned_numel - sum(numels_on_host)
    numels = [parameter.numel for parameter in parameters]
    whole_numels_on_host = _estimate_numels_on_host(
        numels, [parameter.is_vector for parameter in parameters], host_fraction
    )
    return TrainerStates(
        parameters=padded_numel * itemsize,
        gradients=padded_numel * FLOAT32,
        main_weights=numel_on_device * FLOAT32 * has_main,
        moments=(owned_moments - sum(numels_on_host) * num_moments) * FLOAT32,
        # One of the ranks that hold a weight writes it. Each rank writes its own part of the optimizer, in float32 even
        # if the weights serve as main weights.
        saved=numel * itemsize // num_shards + (owned_numel + owned_moments) * FLOAT32,
        # Weights move to the host through pinned copies, which torch's allocator does not free.
        on_host=sum(
            (1 + num_moments) * part_numel * FLOAT32 + _pinned_bytes(part_numel * FLOAT32, is_pinned)
            for part_numel in numels_on_host
        )
        + is_pinned * sum(_pinned_bytes(part_numel * itemsize, True) for part_numel in whole_numels_on_host),
        # Megatron-Core first builds the optimizer for whole parameters, then for this rank's parts.
        construction_bytes=(numel - sum(whole_numels_on_host)) * FLOAT32 * has_main if numels_on_host else 0,
        construction_host_bytes=sum(whole_numels_on_host) * FLOAT32,
    )


def _unsharded_states(
    parameters: Sequence[Parameter], *, num_shards: int, itemsize: int, has_main: bool
) -> TrainerStates:
    """Return the bytes of a buffer whose optimizer is not distributed. `has_main`: main weights exist in float32."""
    numel = sum(parameter.numel for parameter in parameters)
    moments = sum(parameter.numel * parameter.num_moments for parameter in parameters)
    return TrainerStates(
        parameters=numel * itemsize,
        gradients=numel * FLOAT32,
        main_weights=numel * FLOAT32 * has_main,
        moments=moments * FLOAT32,
        saved=(numel * (itemsize + FLOAT32 * has_main) + moments * FLOAT32) // num_shards,
    )


def _estimate_numels_on_host(numels: Sequence[int], is_vector: Sequence[bool], fraction: float) -> list[int]:
    """Return the elements of each parameter that Megatron-Core would update on the host: matrices first.

    Its order within a layer differs, so this is wrong by at most one parameter per model chunk.
    """
    total = sum(max(numel, 0) for numel in numels)
    chosen_numels: list[int] = []
    for wants_vectors in (False, True):
        for numel, is_numel_of_vector in zip(numels, is_vector, strict=True):
            is_wanted = is_numel_of_vector is wants_vectors and numel > 0
            if is_wanted and sum(chosen_numels) < fraction * total:
                chosen_numels.append(numel)
    return chosen_numels


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """Elements `start` to `stop` of a gradient buffer. `parameters` has the range (start, stop) of each parameter."""

    start: int
    stop: int
    parameters: tuple[tuple[int, int], ...]

    def shard(self, index: int, *, num_shards: int) -> tuple[int, int]:
        part = (self.stop - self.start) // num_shards
        return self.start + index * part, self.start + (index + 1) * part


def _make_buckets(parameters: Sequence[Parameter], num_shards: int) -> list[_Bucket]:
    """Divide a buffer's elements into buckets, in Megatron-Core's order: last parameter first."""
    multiple = math.lcm(num_shards, _BUCKET_MULTIPLE)
    # Buckets are padded so that they split evenly over the shards. Megatron-Core also requires multiples of 128.
    buckets: list[_Bucket] = []
    ranges_in_bucket: list[tuple[int, int]] = []
    bucket_start = position = 0

    def close_bucket(end: int) -> int:
        nonlocal bucket_start, ranges_in_bucket
        stop = round_up(end, multiple=multiple)
        buckets.append(_Bucket(start=bucket_start, stop=stop, parameters=tuple(ranges_in_bucket)))
        bucket_start, ranges_in_bucket = stop, []
        return stop

    for parameter in reversed(parameters):
        position = round_up(position, multiple=_PARAMETER_MULTIPLE)
        if parameter.has_own_bucket and ranges_in_bucket:
            position = close_bucket(position)
        ranges_in_bucket.append((position, position + parameter.numel))
        position += parameter.numel
        if parameter.has_own_bucket:
            position = close_bucket(position)
    if ranges_in_bucket:
        close_bucket(position)
    return buckets


def _overlap_numel(parameter: tuple[int, int], shard: tuple[int, int]) -> int:
    """Return the elements shared by two ranges (first, end). Zero or negative: none."""
    (parameter_start, parameter_stop), (shard_start, shard_stop) = parameter, shard
    return min(parameter_stop, shard_stop) - max(parameter_start, shard_start)


def _pinned_bytes(size: int, is_pinned: bool) -> int:
    """torch rounds pinned memory up to powers of two."""
    return 1 << (size - 1).bit_length() if is_pinned and size else size
