"""Rules of a family's page: how a Megatron parameter is composed of Hugging Face tensors.

A Megatron parameter is a sequence of blocks. A block is a sequence of segments. A segment is a range of one Hugging
Face tensor along the split dimension. Tensor parallelism splits every block into equal contiguous parts. A rank stores
its parts one after another.

This covers column, row and vocabulary splits. Megatron's interleaved query groups are one block, even if a rank's part
ends inside a group or a head. Its gate and up halves are two blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape

Place = Literal["first_stage", "every_layer", "last_stage", "last_of_several_stages"]
"""The pipeline stages with the parameter. `last_of_several_stages`: the last stage, only if there are several."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of indices, `start` to `stop`, of one Hugging Face tensor along the split dimension."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Rule:
    """A Megatron parameter and its Hugging Face tensors.

    `{layer}` and `{expert}` are local numbers in `parameter`, global numbers in `tensors`. `tensors` are Hugging Face
    names and shapes. `dim` is the dimension split by tensor parallelism, None for a replicated parameter. `padded`
    marks a vocabulary whose last rows belong to no Hugging Face tensor. `transformer_engine` is the parameter's name in
    Transformer Engine's layers if it differs: norms are fused into the following linear layer, experts are in one
    module. With `is_expert`, expert parallelism distributes the experts, and expert-tensor parallelism splits each.
    """

    parameter: str
    place: Place
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    dim: int | None
    blocks: tuple[tuple[Segment, ...], ...]
    padded: bool = False
    transformer_engine: str | None = None
    is_expert: bool = False


def _whole(tensor: str, shape: tuple[int, ...], dim: int) -> tuple[Segment, ...]:
    return (Segment(tensor, 0, shape[dim]),)


def replicated(
    parameter: str,
    tensor: str,
    shape: tuple[int, ...],
    place: Place = "every_layer",
    transformer_engine: str | None = None,
) -> Rule:
    """Return the rule of a parameter replicated on all tensor-parallel ranks."""
    return Rule(parameter, place, ((tensor, shape),), None, (_whole(tensor, shape, 0),), False, transformer_engine)


def row(parameter: str, tensor: str, shape: tuple[int, int]) -> Rule:
    """Return the rule of a weight split over its input features (Megatron's RowParallelLinear)."""
    return Rule(parameter, "every_layer", ((tensor, shape),), 1, (_whole(tensor, shape, 1),))


def vocabulary(parameter: str, tensor: str, model: ModelShape, place: Place) -> Rule:
    """Return the rule of a weight split over the vocabulary, padded at its end."""
    shape = (model.vocab_size, model.hidden_size)
    return Rule(parameter, place, ((tensor, shape),), 0, (_whole(tensor, shape, 0),), padded=True)


def gate_up(parameter: str, gate: str, up: str, shape: tuple[int, int]) -> Rule:
    """Return the storage rule of a gated MLP's weight. Megatron stores gate and up projection as one tensor, split over
    output features by tensor parallelism. On each rank the gate's rows come before the up projection's."""
    return Rule(
        parameter, "every_layer", ((gate, shape), (up, shape)), 0, (_whole(gate, shape, 0), _whole(up, shape, 0))
    )


def query_groups(parameter: str, q: str, k: str, v: str, model: ModelShape, features: tuple[int, ...]) -> Rule:
    """Return the rule of Megatron's fused QKV projection: for each key-value head its query heads, its key, its value.

    `features` is `(hidden_size,)` for the weight, `()` for the bias. The whole is split into equal parts. With fewer
    key-value heads than ranks, a part may begin or end inside a head.
    """
    width = model.head_dim
    queries = model.num_heads // model.num_kv_heads * width
    block = tuple(
        segment
        for group in range(model.num_kv_heads)
        for segment in (
            Segment(q, group * queries, (group + 1) * queries),
            Segment(k, group * width, (group + 1) * width),
            Segment(v, group * width, (group + 1) * width),
        )
    )
    key_shape = (model.num_kv_heads * width, *features)
    tensors = ((q, (model.num_heads * width, *features)), (k, key_shape), (v, key_shape))
    return Rule(parameter, "every_layer", tensors, 0, (block,))


def with_experts(dense: tuple[Rule, ...], model: ModelShape) -> tuple[Rule, ...]:
    """Return a dense family's rules with a router and experts in place of the feed-forward layer.

    Each expert is a parameter of its own, both in the local spec's sequence of experts and in Transformer Engine's
    grouped layers. The norm before a router is never fused.
    """
    mlp, theirs = "decoder.layers.{layer}.mlp.", "model.layers.{layer}.mlp."
    hidden, channels = model.hidden_size, model.moe_intermediate_size
    gate, up, down = (theirs + f"experts.{{expert}}.{kind}_proj.weight" for kind in ("gate", "up", "down"))

    def expert(rule: Rule, layer: str) -> Rule:
        return replace(rule, is_expert=True, transformer_engine=f"{mlp}experts.{layer}.weight{{expert}}")

    first, second = (f"{mlp}experts.local_experts.{{expert}}.linear_fc{i}.weight" for i in (1, 2))
    return (
        *(
            # A router reads the norm's output too, so no linear layer can absorb the norm.
            replace(rule, transformer_engine=None) if "pre_mlp_layernorm" in rule.parameter else rule
            for rule in dense
            if not rule.parameter.startswith(mlp)
        ),
        replicated(mlp + "router.weight", theirs + "gate.weight", (model.num_experts, hidden)),
        expert(gate_up(first, gate, up, (channels, hidden)), "linear_fc1"),
        expert(row(second, down, (hidden, channels)), "linear_fc2"),
    )
