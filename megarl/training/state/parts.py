"""Parts of a training state on this rank: slices of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica
from torch import Tensor

from megarl.training.state.checkpoint import Model, changed_models, models_to_save, sharded_states


class StatePart(NamedTuple):
    """A rectangular slice (box) of one tensor of the training state, as this rank stores it.

    `values` [*shape] is the live memory. `start` is the index of its first element in the full tensor. If several ranks
    store the same slice, `is_main` is True on exactly one. `key` is the tensor's name in checkpoints, where Megatron
    stacks layers of equal shape. `name` has the layer too: `decoder.layers.mlp.linear_fc1.weight[3]` is layer 3.
    """

    key: str
    name: str
    start: tuple[int, ...]
    values: Tensor
    is_main: bool


def state_parts(models: Mapping[str, Model]) -> Iterator[StatePart]:
    """Yield this rank's parts of the state, without rows that only pad the vocabulary.

    `models` are by the prefix of their tensors; frozen models with unchanged weights are left out. Missing moments are
    allocated, as zeros.
    """
    for prefix, model in models_to_save(models, changed_models(models)).items():
        state = sharded_states({prefix: model}, is_loading=False)
        # A fused parameter (gate and up) is stored in parts, under separate names.
        apply_factories(state)
        for part in nested_values(state):
            if not isinstance(part, ShardedTensor) or part.data is None:
                continue
            start = part.global_offset
            values = part.data.detach().view((1,) * part.prepend_axis_num + part.local_shape)
            if part.allow_shape_mismatch:
                # Rows that only pad the vocabulary are never used. Their random values differ between layouts.
                values = values[: max(model.shape.vocab_size - start[0], 0)]
            if values.numel():
                yield StatePart(part.key, _part_name(part), start, values, is_main_replica(part.replica_id))


def _part_name(part: ShardedTensor) -> str:
    is_stacked = ".layers." in part.key and not any(word.isdigit() for word in part.key.split("."))
    return f"{part.key}[{part.global_offset[0]}]" if is_stacked else part.key
