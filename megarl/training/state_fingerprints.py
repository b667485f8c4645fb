"""Fingerprints of a rank's training state, by the names that its tensors have in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica

from megarl.reshard.fingerprint import Fingerprint, fingerprint
from megarl.training.checkpoint import Model, sharded_states


def state_fingerprints(models: Mapping[str, Model], *, with_optimizer: bool) -> dict[str, Fingerprint]:
    """Return the fingerprints of this rank's parts of the state's tensors, by name.

    `models` are those of a checkpoint, by the prefix of their tensors. The sum over all ranks does not depend on the
    layout, because of several equal copies only the main one counts. Megatron stacks equal layers in one tensor; here
    each layer has a name of its own, as in `decoder.layers.mlp.linear_fc1.weight[3]`. `with_optimizer` adds main
    weights and moments.
    """
    state = sharded_states(models, is_loading=False)
    # A fused parameter (gate and up) is stored in parts, under separate names.
    apply_factories(state)
    found: dict[str, Fingerprint] = {}
    for part in nested_values(state):
        if not isinstance(part, ShardedTensor) or not is_main_replica(part.replica_id):
            continue
        if part.data is None or not (with_optimizer or "optimizer." not in part.key):
            continue
        name = _name(part)
        values = part.data.reshape((1,) * part.prepend_axis_num + part.local_shape)
        found[name] = found.get(name, Fingerprint()) + fingerprint(values, part.global_offset)
    return found


def _name(part: ShardedTensor) -> str:
    """Return the name of a tensor in a checkpoint, with the layer's number if Megatron stacks equal layers."""
    is_stacked = ".layers." in part.key and not any(word.isdigit() for word in part.key.split("."))
    return f"{part.key}[{part.global_offset[0]}]" if is_stacked else part.key
