"""Rules of a model family: the Hugging Face tensors that make up a Megatron parameter.

A Megatron parameter is a sequence of blocks, and a block a sequence of segments. A segment is a range of one Hugging
Face tensor along the split dimension. Tensor parallelism splits every block into equal contiguous parts. A rank stores
its parts one after another. A gate and up projection has two blocks. Megatron's interleaved query groups are one block,
even if a rank's part ends inside a group or a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape

Place = Literal["first_stage", "every_layer", "last_stage", "last_of_several_stages"]
"""Pipeline stages with the parameter. `last_of_several_stages`: the last stage, unless it is the only one."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Indices `start` to `stop` (excluded) of one Hugging Face tensor along the split dimension."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Variant:
    """A parameter in Transformer Engine's layers: its name, and whether it is replicated.

    Transformer Engine fuses a norm into the linear layer after it, and puts all experts into one module.
    """

    parameter: str
    is_replicated: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """A Megatron parameter and its Hugging Face tensors.

    In `parameter`, `{layer}` and `{expert}` are numbers on the rank; in `tensors`, numbers in the whole model. Two
    rules may share tensors. They may also name the same parameter, in different layers.
    """

    parameter: str
    """Name of the parameter in Megatron's own layers, for example `decoder.layers.{layer}.mlp.linear_fc2.weight`."""
    place: Place
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes of the Hugging Face tensors."""
    dim: int | None
    """Dimension split by tensor parallelism. None: the parameter is replicated."""
    blocks: tuple[tuple[Segment, ...], ...]
    """Blocks of the parameter, in order. Each is split over the tensor-parallel ranks."""
    padded: bool = False
    """Whether the parameter has further vocabulary rows after the rows of the Hugging Face tensor."""
    transformer_engine: Variant | None = None
    """Differences in Transformer Engine's layers. None: no difference."""
    is_expert: bool = False
    """Whether the parameter belongs to one expert. Ranks have different experts, and may split an expert."""
    layers: frozenset[int] | None = None
    """Numbers, from 0, of the layers with this parameter. None: all layers."""
    is_buffer: bool = False
    """Whether the parameter is an untrained buffer of Megatron's module."""
    dtype: Literal["model", "float32"] = "model"
    """Data type: the model's, or always float32."""
    block_keys: tuple[str, ...] = ()
    """Key endings of the blocks, if Megatron's checkpoints store each block separately. Empty: one key."""

    def has_layer(self, layer: int) -> bool:
        """Return whether a layer has this parameter. `layer` -1 stands for parameters outside of layers."""
        return layer < 0 or self.layers is None or layer in self.layers

    def rename_tensors(self, rename: Callable[[str], str]) -> Rule:
        tensors = tuple((rename(name), shape) for name, shape in self.tensors)
        blocks = tuple(tuple(replace(part, tensor=rename(part.tensor)) for part in block) for block in self.blocks)
        return replace(self, tensors=tensors, blocks=blocks)

    def resolve(self, transformer_engine: bool) -> Rule:
        """Return the rule for Transformer Engine's layers, or for Megatron's own layers."""
        variant = self.transformer_engine
        if variant is None or not transformer_engine:
            return replace(self, transformer_engine=None)
        dim = None if variant.is_replicated else self.dim
        return replace(self, parameter=variant.parameter, dim=dim, transformer_engine=None)


def overlap(first: Rule, second: Rule) -> bool:
    if first.layers is None or second.layers is None:
        return True
    return bool(first.layers & second.layers)


def _whole_segment(tensor: str, shape: tuple[int, ...], dim: int) -> tuple[Segment, ...]:
    return (Segment(tensor, 0, shape[dim]),)


def replicate(
    parameter: str,
    tensor: str,
    shape: tuple[int, ...],
    place: Place = "every_layer",
    transformer_engine: str | None = None,
) -> Rule:
    """Return the rule of a parameter replicated on all tensor-parallel ranks."""
    variant = Variant(transformer_engine) if transformer_engine else None
    return Rule(parameter, place, ((tensor, shape),), None, (_whole_segment(tensor, shape, 0),), False, variant)


def column(parameter: str, tensor: str, shape: tuple[int, int]) -> Rule:
    """Return the rule of a weight split over its output features (Megatron's ColumnParallelLinear)."""
    return Rule(parameter, "every_layer", ((tensor, shape),), 0, (_whole_segment(tensor, shape, 0),))


def row(parameter: str, tensor: str, shape: tuple[int, int]) -> Rule:
    """Return the rule of a weight split over its input features (Megatron's RowParallelLinear)."""
    return Rule(parameter, "every_layer", ((tensor, shape),), 1, (_whole_segment(tensor, shape, 1),))


def vocabulary(parameter: str, tensor: str, model: ModelShape, place: Place) -> Rule:
    """Return the rule of a weight split over the vocabulary, padded at its end."""
    shape = (model.vocab_size, model.hidden_size)
    return Rule(parameter, place, ((tensor, shape),), 0, (_whole_segment(tensor, shape, 0),), padded=True)


def gate_up(parameter: str, gate: str, up: str, shape: tuple[int, int]) -> Rule:
    """Return the rule of gate and up projection in one tensor, split over output features.

    A rank has the gate's rows before the up projection's.
    """
    return Rule(
        parameter,
        "every_layer",
        ((gate, shape), (up, shape)),
        0,
        (_whole_segment(gate, shape, 0), _whole_segment(up, shape, 0)),
    )


def query_groups(parameter: str, q: str, k: str, v: str, model: ModelShape, features: tuple[int, ...]) -> Rule:
    """Return the rule of Megatron's fused QKV projection: for each key-value head its query heads, its key, its value.

    With output gates, Megatron has a group's gates after its query heads; the checkpoint has each gate after its head.
    `features` is `(hidden_size,)` for the weight, `()` for the bias. The whole is split into equal parts: if tp exceeds
    the number of key-value heads, a part may begin or end inside a head.
    """
    head_dim, heads_per_group = model.head_dim, model.num_heads // model.num_kv_heads
    block = tuple(
        segment
        for group in range(model.num_kv_heads)
        for segment in (
            *_query_segments(
                q,
                range(group * heads_per_group, (group + 1) * heads_per_group),
                head_dim,
                model.attention.has_output_gate,
            ),
            Segment(k, group * head_dim, (group + 1) * head_dim),
            Segment(v, group * head_dim, (group + 1) * head_dim),
        )
    )
    key_shape = (model.num_kv_heads * head_dim, *features)
    query_rows = model.num_heads * head_dim * (2 if model.attention.has_output_gate else 1)
    tensors = ((q, (query_rows, *features)), (k, key_shape), (v, key_shape))
    return Rule(parameter, "every_layer", tensors, 0, (block,))


def _query_segments(tensor: str, heads: range, width: int, has_gates: bool) -> tuple[Segment, ...]:
    """Return the rows of these heads: all queries, then their gates, which alternate by head in files."""
    if not has_gates:
        return (Segment(tensor, heads.start * width, heads.stop * width),)
    row_ranges = ((0, width), (width, 2 * width))
    return tuple(
        Segment(tensor, 2 * head * width + start, 2 * head * width + stop)
        for start, stop in row_ranges
        for head in heads
    )


def with_experts(dense: tuple[Rule, ...], model: ModelShape, router: str = "gate") -> tuple[Rule, ...]:
    """Add a router and experts to a dense family's rules, in the layers with experts.

    `router` is the router's name in the checkpoint. Each expert is a separate parameter.
    """
    mlp, checkpoint_mlp = "decoder.layers.{layer}.mlp.", "model.layers.{layer}.mlp."
    hidden, channels = model.hidden_size, model.moe_intermediate_size
    gate, up, down = (checkpoint_mlp + f"experts.{{expert}}.{kind}_proj.weight" for kind in ("gate", "up", "down"))
    expert_layers = model.layers_where(lambda kind: kind.has_experts)
    dense_layers = model.layers_where(lambda kind: not kind.has_experts)

    def make_expert_rule(rule: Rule, layer: str) -> Rule:
        variant = Variant(f"{mlp}experts.{layer}.weight{{expert}}")
        return replace(rule, is_expert=True, transformer_engine=variant, layers=expert_layers)

    fc1, fc2 = (f"{mlp}experts.local_experts.{{expert}}.linear_fc{i}.weight" for i in (1, 2))
    # Layers without experts keep the dense feed-forward network.
    feed_forward = tuple(rule for rule in dense if rule.parameter.startswith(mlp))
    norm = next(rule for rule in dense if "pre_mlp_layernorm" in rule.parameter)
    return (
        *(rule for rule in dense if rule not in feed_forward and rule is not norm),
        *(replace(rule, layers=dense_layers) for rule in (norm, *feed_forward) if dense_layers != frozenset()),
        # A router reads the norm's output too, so no linear layer can absorb the norm.
        replace(norm, transformer_engine=None, layers=expert_layers),
        replace(
            replicate(mlp + "router.weight", f"{checkpoint_mlp}{router}.weight", (model.num_experts, hidden)),
            layers=expert_layers,
        ),
        make_expert_rule(gate_up(fc1, gate, up, (channels, hidden)), "linear_fc1"),
        make_expert_rule(row(fc2, down, (hidden, channels)), "linear_fc2"),
    )


def with_shared_expert(rules: tuple[Rule, ...], model: ModelShape, checkpoint_name: str) -> tuple[Rule, ...]:
    """Add the model's shared expert, if any, to the rules of the layers with experts.

    `checkpoint_name` is its name in the checkpoint: `shared_expert` or `shared_experts`.
    """
    hidden, shared_size = model.hidden_size, model.shared_intermediate_size
    if not shared_size:
        return rules
    megatron_prefix, checkpoint_prefix = (
        "decoder.layers.{layer}.mlp.shared_experts.",
        "model.layers.{layer}.mlp." + checkpoint_name,
    )
    gate, up, down = (f"{checkpoint_prefix}.{kind}_proj.weight" for kind in ("gate", "up", "down"))
    shared_rules = (
        gate_up(megatron_prefix + "linear_fc1.weight", gate, up, (shared_size, hidden)),
        row(megatron_prefix + "linear_fc2.weight", down, (hidden, shared_size)),
    )
    if model.router and model.router.has_shared_gate:
        # The shared expert's gate is a single row, replicated by Megatron-Core 0.16.1 on all ranks.
        shared_rules = (
            replicate(megatron_prefix + "gate_weight", checkpoint_prefix + "_gate.weight", (1, hidden)),
            *shared_rules,
        )
    expert_layers = model.layers_where(lambda kind: kind.has_experts)
    return (*rules, *(replace(rule, layers=expert_layers) for rule in shared_rules))


def router_bias_rule(model: ModelShape) -> Rule:
    """Return the rule of the router's bias: a float32 buffer in Megatron that affects only the choice of experts."""
    parameter, tensor = (
        "decoder.layers.{layer}.mlp.router.expert_bias",
        "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    )
    rule = replicate(parameter, tensor, (model.num_experts,))
    expert_layers = model.layers_where(lambda kind: kind.has_experts)
    return replace(rule, layers=expert_layers, is_buffer=True, dtype="float32")
