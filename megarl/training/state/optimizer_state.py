"""The state of a sharded optimizer in a checkpoint, as rectangular parts (boxes) of the model's tensors.

Megatron's formats either gather all values on all ranks (`fully_reshardable`) or require equal tensor- and
pipeline-parallel sizes (`dp_reshardable`). Here each rank's flat range of a parameter is cut into few boxes. Their
names and shapes are those of `fully_reshardable`. Nothing is gathered, and any parallel sizes can read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megarl.reshard.boxes import flat_boxes
from megarl.training.host.host_optimizer import is_hybrid, without_hybrid_settings
from megarl.training.muon.optimizer import MOMENTUM

_TENSORS = ("param", "exp_avg", "exp_avg_sq", MOMENTUM)
"""Names of the optimizer's tensors: main weights, Adam's two moments, Muon's momentum."""


def sharded_optimizer_state(
    optimizer: ChainedOptimizer, chunks: Mapping[str, Any], *, is_loading: bool, metadata: Mapping[str, Any]
) -> dict[Any, Any]:
    """Return a sharded state in the structure of Megatron's `ChainedOptimizer.sharded_state_dict`.

    `chunks`: sharded states of the model's chunks. The tensors of a distributed optimizer are the live ones.
    """
    optimizer_parts: list[Any] = optimizer.chained_optimizers
    if len(optimizer_parts) > 1:
        optimizer._synchronize_steps()
    states = {}
    for index, optimizer_part in enumerate(optimizer_parts):
        if isinstance(optimizer_part, DistributedOptimizer):
            if is_loading and not is_hybrid(optimizer_part):
                # Megatron's `load_state_dict` allocates missing moments, so that a checkpoint can be read into them.
                # Megatron-Core 0.16.1 does the same in its own `sharded_state_dict`.
                optimizer_part.load_state_dict(optimizer_part.state_dict())
            state = (
                without_hybrid_settings(optimizer_part.state_dict())
                if is_hybrid(optimizer_part)
                else optimizer_part.state_dict()
            )
            states[index] = {**state, "param_state": _make_optimizer_boxes(optimizer_part, chunks)}
        else:
            states[index] = optimizer_part.sharded_state_dict(chunks, is_loading=is_loading, metadata=metadata)
    return states[0] if len(optimizer_parts) == 1 else states


def copy_to_optimizer(optimizer: DistributedOptimizer, loaded: Mapping[Any, Any], chunks: Mapping[str, Any]) -> None:
    """Copy the loaded values into the optimizer's tensors. The loader may have read them into other memory."""
    live_boxes = _make_optimizer_boxes(optimizer, chunks)
    for parameter_index, boxes in live_boxes.items():
        for name, box in boxes.items():
            assert box.data is not None
            box.data.copy_(loaded[parameter_index][name].view_as(box.data))


def _make_optimizer_boxes(
    optimizer: DistributedOptimizer, chunks: Mapping[str, Any]
) -> dict[int, dict[str, ShardedTensor]]:
    """Return the boxes of each parameter that this rank stores, by the parameter's index on this rank."""
    sharded: dict[str, Any] = dict(chunks)
    sharded_tensors, _ = extract_sharded_tensors_and_factories(sharded)
    descriptions = {id(description.data): description for description in nested_values(sharded_tensors)}
    boxes_by_parameter = {}
    buffer_ranges: Any = optimizer.gbuf_ranges
    parts = [part for buffers in buffer_ranges for buckets in buffers.values() for bucket in buckets
             for part in bucket["param_map"].items()]  # fmt: skip
    for parameter_index, (parameter, range_map) in enumerate(parts):
        tensors = optimizer._get_main_param_and_optimizer_states(parameter)
        start, stop = range_map["param"].start, range_map["param"].end
        boxes_by_parameter[parameter_index] = {
            f"{name}.{box_index}": box
            for name in _TENSORS
            if name in tensors
            for box_index, box in enumerate(
                _cut_range_into_boxes(parameter, descriptions[id(parameter)], name, tensors[name], start, stop)
            )
        }
    return boxes_by_parameter


def _cut_range_into_boxes(
    parameter: Tensor, sharded: ShardedTensor | ShardedTensorFactory, name: str, values: Tensor, start: int, stop: int
) -> Iterator[ShardedTensor]:
    """Yield boxes that cover the elements `start` to `stop` of a flattened parameter [*shape].

    `values` [stop - start]: these elements in the optimizer's tensor `name`. `sharded`: the parameter's description.
    """
    # A factory splits a fused parameter (gate and up) into parts stored under separate keys.
    parts = sharded.build() if isinstance(sharded, ShardedTensorFactory) else sharded
    for part in nested_values({"": parts}):
        assert part.data.is_contiguous() and part.data.untyped_storage()._cdata == parameter.untyped_storage()._cdata
        part_start = part.data.storage_offset() - parameter.storage_offset()
        overlap_start, overlap_stop = max(start, part_start), min(stop, part_start + part.data.numel())
        if overlap_start >= overlap_stop:
            continue
        num_prepended, value_index = part.prepend_axis_num, overlap_start - start
        for offset, shape in flat_boxes(part.local_shape, overlap_start - part_start, overlap_stop - part_start):
            box_numel = prod(shape)
            box_shape = (1,) * num_prepended + shape
            offset_in_part = (0,) * num_prepended + offset
            yield ShardedTensor(
                key=f"optimizer.state.{name}.{part.key}",
                data=values.detach().view(-1)[value_index : value_index + box_numel].view(box_shape),
                dtype=values.dtype,
                local_shape=box_shape,
                global_shape=part.global_shape,
                global_offset=tuple(a + b for a, b in zip(part.global_offset, offset_in_part, strict=True)),
                axis_fragmentations=None,
                # Data-parallel ranks hold different ranges, so no box is a replica.
                replica_id=(*part.replica_id[:2], 0),
                allow_shape_mismatch=part.allow_shape_mismatch,
            )
            value_index += box_numel
