"""Qwen3-Next: gated delta-nets in three of four layers, gated attention in the fourth, experts as in Qwen2-MoE.

The layer for multi-token prediction (`mtp.`) is copied unchanged, or trained (`families.mtp`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.families.config_json.config_values import quote, size
from megarl.families.config_json.rotary import read_rotary
from megarl.families.delta_net import DeltaNet
from megarl.families.family import DEFAULTS, Family
from megarl.families.mtp import OWN_PREFIX, MtpForm
from megarl.families.pages import llama, qwen3
from megarl.families.parts import LayerKind, Parts, Router
from megarl.families.reading import (
    DEFAULT_EXPERTS,
    experts_of_layers,
    grouped_query,
    refuse_biases,
    softmax_router,
)
from megarl.families.tensors import stacks
from megarl.families.tensors.rules import Rule, Segment, replicate, row, with_experts, with_shared_expert
from megarl.types import DataError

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape

LINEAR = llama.LAYER + "linear_attn."
MIXERS = {"full_attention": "attention", "linear_attention": "linear_attention"}
"""Kind of a layer's mixer (`LayerKind.mixer`), by the values of `layer_types`."""
KEYS = ("query", "key", "value", "z", "beta", "alpha")
"""Parts of a delta-net's input projection, named by the ends of their keys in Megatron-Core 0.16.1's checkpoints."""


def read(config: Mapping[str, Any]) -> Parts:
    experts = experts_of_layers(config, size(config, "num_hidden_layers"))
    return read_hybrid(config, softmax_router(config), experts, OWN_PREFIX)


def read_hybrid(config: Mapping[str, Any], router: Router | None, has_experts: Sequence[bool], mtp: MtpForm) -> Parts:
    """Return the parts of a model with delta-nets and gated attention. `has_experts` has one value per layer."""
    refuse_biases(config)
    if config.get("attn_output_gate", True) is not True:
        raise DataError(
            f"attn_output_gate is {quote(config['attn_output_gate'])}: transformers computes this family's attention "
            "with output gates only; use another model."
        )
    key_heads, value_heads = size(config, "linear_num_key_heads"), size(config, "linear_num_value_heads")
    if value_heads % key_heads:
        raise DataError(
            f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}; "
            "use another model."
        )
    attention = grouped_query(config, qkv_bias=False, qk_norm=True)
    kinds = zip(_read_mixers(config), has_experts, strict=True)
    return Parts(
        replace(attention, has_output_gate=True),
        read_rotary(config, fraction=0.25),
        router,
        tuple(LayerKind(mixer=mixer, has_experts=layer_has_experts) for mixer, layer_has_experts in kinds),
        linear_attention=DeltaNet(
            key_heads,
            value_heads,
            size(config, "linear_key_head_dim"),
            size(config, "linear_value_head_dim"),
            size(config, "linear_conv_kernel_dim"),
        ),
        has_zero_centered_norms=True,
        # One is vLLM's default, and released config.json files may lack the field.
        num_kept_layers=size({mtp.num_layers_field: 1, **config}, mtp.num_layers_field, null=0),
    )


def _read_mixers(config: Mapping[str, Any]) -> list[Any]:
    """Return the mixer of each layer. Raises DataError for an unknown mixer, or if all layers have the same one."""
    num_layers, layer_types = size(config, "num_hidden_layers"), config.get("layer_types")
    if layer_types is None:
        # Releases without the field have an interval. Its default is that of transformers.
        interval = size(config, "full_attention_interval")
        layer_types = [
            "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)
        ]
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or set(layer_types) != set(MIXERS):
        raise DataError(
            f"layer_types is {quote(layer_types)}; it must have {num_layers} entries, each {' or '.join(MIXERS)}, "
            "with at least one of both."
        )
    return [MIXERS[kind] for kind in layer_types]


def rules(model: ModelShape) -> tuple[Rule, ...]:
    """Return the rules that map checkpoint tensors to Megatron parameters.

    The input projections of delta-nets are reordered from key heads to kinds of channels.
    """
    linear = delta_net(model)
    value_heads_per_key_head = linear.num_value_heads // linear.num_key_heads
    value_rows_per_key_head = value_heads_per_key_head * linear.value_dim
    rows_per_key_head = 2 * (linear.key_dim + value_rows_per_key_head)
    qkvz_name, rates_name = LINEAR + "in_proj_qkvz.weight", LINEAR + "in_proj_ba.weight"

    def segments_of_heads(tensor: str, step: int, start: int, length: int) -> tuple[Segment, ...]:
        first_rows = (head * step + start for head in range(linear.num_key_heads))
        return tuple(Segment(tensor, first_row, first_row + length) for first_row in first_rows)

    # The checkpoint has q, k, v, z of one key head after another, Megatron all heads of q, then of k, and so on.
    blocks = (
        segments_of_heads(qkvz_name, rows_per_key_head, 0, linear.key_dim),
        segments_of_heads(qkvz_name, rows_per_key_head, linear.key_dim, linear.key_dim),
        segments_of_heads(qkvz_name, rows_per_key_head, 2 * linear.key_dim, value_rows_per_key_head),
        segments_of_heads(
            qkvz_name, rows_per_key_head, 2 * linear.key_dim + value_rows_per_key_head, value_rows_per_key_head
        ),
        segments_of_heads(rates_name, 2 * value_heads_per_key_head, 0, value_heads_per_key_head),
        segments_of_heads(rates_name, 2 * value_heads_per_key_head, value_heads_per_key_head, value_heads_per_key_head),
    )
    hidden = model.hidden_size
    tensors = (
        (qkvz_name, (linear.num_key_heads * rows_per_key_head, hidden)),
        (rates_name, (2 * linear.num_value_heads, hidden)),
    )
    return hybrid_rules(model, tensors, blocks)


def hybrid_rules(
    model: ModelShape, tensors: tuple[tuple[str, tuple[int, ...]], ...], blocks: tuple[tuple[Segment, ...], ...]
) -> tuple[Rule, ...]:
    """Return the rules of a model with delta-nets and gated attention.

    `tensors` and `blocks` compose a delta-net's input projection, in the order queries, keys, values, gates, beta,
    alpha.
    """
    is_linear = model.layers_where(lambda kind: kind.mixer == "linear_attention")
    is_full = model.layers_where(lambda kind: kind.mixer == "attention")
    mixer_prefix = llama.DECODER + "self_attention."
    attention_rules = (
        replace(rule, layers=is_full) if rule.parameter.startswith((mixer_prefix, llama.DECODER + "input_")) else rule
        for rule in qwen3.rules(model)
    )
    delta_net_rules = _delta_net_rules(model, tensors, blocks)
    # Rules without layers are dropped: a model of few layers may have only one kind.
    mixed_rules = tuple(
        rule
        for rule in (*attention_rules, *(replace(rule, layers=is_linear) for rule in delta_net_rules))
        if rule.layers != frozenset()
    )
    if model.router is None:
        return mixed_rules
    return with_shared_expert(with_experts(mixed_rules, model), model, "shared_expert")


def _delta_net_rules(
    model: ModelShape, tensors: tuple[tuple[str, tuple[int, ...]], ...], blocks: tuple[tuple[Segment, ...], ...]
) -> tuple[Rule, ...]:
    """Return the rules of a delta-net, which Megatron names `self_attention`. Arguments as in `hybrid_rules`."""
    linear, mixer_prefix = delta_net(model), llama.DECODER + "self_attention."
    convolution, key_channels = LINEAR + "conv1d.weight", linear.key_channels
    convolved_rows = (
        (0, key_channels),
        (key_channels, 2 * key_channels),
        (2 * key_channels, linear.convolved_channels),
    )
    heads = (linear.num_value_heads,)
    return (
        replicate(
            llama.DECODER + "input_layernorm.weight",
            llama.LAYER + "input_layernorm.weight",
            (model.hidden_size,),
            transformer_engine=mixer_prefix + "in_proj.layer_norm_weight",
        ),
        Rule(mixer_prefix + "in_proj.weight", "every_layer", tensors, 0, blocks, block_keys=KEYS),
        Rule(
            mixer_prefix + "conv1d.weight",
            "every_layer",
            ((convolution, (linear.convolved_channels, 1, linear.width)),),
            0,
            tuple((Segment(convolution, start, stop),) for start, stop in convolved_rows),
            block_keys=KEYS[:3],
        ),
        *(
            Rule(
                mixer_prefix + name,
                "every_layer",
                ((LINEAR + name, heads),),
                0,
                ((Segment(LINEAR + name, 0, *heads),),),
            )
            for name in ("A_log", "dt_bias")
        ),
        replicate(mixer_prefix + "out_norm.weight", LINEAR + "norm.weight", (linear.value_dim,)),
        row(mixer_prefix + "out_proj.weight", LINEAR + "out_proj.weight", (model.hidden_size, linear.value_channels)),
    )


def vllm_stacks(model: ModelShape) -> tuple[stacks.Stack, ...]:
    return (
        *hybrid_stacks(model),
        stacks.Stack(LINEAR + "in_proj_qkvz.weight", 0, (stacks.Part(LINEAR + "in_proj_qkvz.weight", "even"),)),
        stacks.Stack(LINEAR + "in_proj_ba.weight", 0, (stacks.Part(LINEAR + "in_proj_ba.weight", "even"),)),
    )


def hybrid_stacks(model: ModelShape) -> tuple[stacks.Stack, ...]:
    """Return vLLM's parameters of all layers, except the input projections of delta-nets."""
    linear = delta_net(model)
    convolution, key_channels = LINEAR + "conv1d.weight", linear.key_channels
    convolved_rows = (
        (0, key_channels),
        (key_channels, 2 * key_channels),
        (2 * key_channels, linear.convolved_channels),
    )
    return (
        *stacks.standard(model),
        stacks.Stack(convolution, 0, tuple(stacks.Part(convolution, "even", rows) for rows in convolved_rows)),
        stacks.Stack(LINEAR + "A_log", 0, (stacks.Part(LINEAR + "A_log", "even"),), dtype="float32"),
        stacks.Stack(LINEAR + "dt_bias", 0, (stacks.Part(LINEAR + "dt_bias", "even"),)),
        stacks.row(LINEAR + "out_proj.weight"),
    )


def delta_net(model: ModelShape) -> DeltaNet:
    assert isinstance(model.linear_attention, DeltaNet)
    return model.linear_attention


FIELDS = {
    **DEFAULTS,
    **DEFAULT_EXPERTS,
    "full_attention_interval": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "norm_topk_prob": True,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}
"""Values of missing fields in Qwen3-Next models."""

FAMILY = Family("Qwen3NextForCausalLM", read, rules, FIELDS, stacks=vllm_stacks, draft_layers=OWN_PREFIX)
