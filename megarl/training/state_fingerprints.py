"""Fingerprints of a rank's training state, by the names that its tensors have in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica

from megarl.reshard.fingerprint import Fingerprint, fingerprint
from megarl.training.checkpoint import Model, changed_models, models_to_save, sharded_states


def state_fingerprints(models: Mapping[str, Model], *, with_optimizer: bool) -> dict[str, Fingerprint]:
    """Return the fingerprints of this rank's parts of the state's tensors, by name.

    `models` are those of a checkpoint, by the prefix of their tensors; frozen models with their first weights are left
    out. The sum over all ranks does not depend on the layout: each element counts on one rank only. Megatron stacks
    equal layers in one tensor; here each layer has a name of its own, as in `decoder.layers.mlp.linear_fc1.weight[3]`.
    `with_optimizer` adds main weights and moments.
    """
    found: dict[str, Fingerprint] = {}
    for prefix, model in models_to_save(models, changed_models(models)).items():
        state = sharded_states({prefix: model}, is_loading=False)
        # A fused parameter (gate and up) is stored in parts, under separate names.
        apply_factories(state)
        for part in nested_values(state):
            if not isinstance(part, ShardedTensor) or not is_main_replica(part.replica_id) or part.data is None:
                continue
            if not with_optimizer and "optimizer." in part.key:
                continue
            values = part.data.reshape((1,) * part.prepend_axis_num + part.local_shape)
            if part.allow_shape_mismatch:
                # Rows that only pad the vocabulary have random values, which differ between layouts and are never used.
                values = values[: max(model.shape.vocab_size - part.global_offset[0], 0)]
            name = _name(part)
            found[name] = found.get(name, Fingerprint()) + fingerprint(values, part.global_offset)
    return found


def _name(part: ShardedTensor) -> str:
    """Return the name of a tensor in a checkpoint, with the layer's number if Megatron stacks equal layers."""
    is_stacked = ".layers." in part.key and not any(word.isdigit() for word in part.key.split("."))
    return f"{part.key}[{part.global_offset[0]}]" if is_stacked else part.key
