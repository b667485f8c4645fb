"""Qwen3.5, Qwen3.6 and Qwen3.8, dense and with experts: Qwen3-Next with separate input projections of the delta-nets.

megarl trains and samples text only. Exports contain the vision tower (`model.visual.`) of the base model, unchanged.
The layer for multi-token prediction (`mtp.`) is copied or trained (`families.mtp`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.families.config_json.config_values import mapping, quote, size
from megarl.families.family import Family, no_aliases
from megarl.families.mtp import OWN_PREFIX
from megarl.families.pages import llama, qwen3_next
from megarl.families.pages.qwen3_next import LINEAR, delta_net
from megarl.families.parts import Parts
from megarl.families.reading import softmax_router
from megarl.families.tensors import stacks
from megarl.families.tensors.packed import Alias, Axis
from megarl.families.tensors.rules import Rule, Segment
from megarl.types import DataError

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape

QKV, GATE, BETA, ALPHA = (f"{LINEAR}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
MTP = OWN_PREFIX._replace(num_layers_field="mtp_num_hidden_layers")
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def read_dense(config: Mapping[str, Any]) -> Parts:
    return qwen3_next.read_hybrid(_without_image_rope(config), None, [False] * size(config, "num_hidden_layers"), MTP)


def read_experts(config: Mapping[str, Any]) -> Parts:
    """Return the parts of a model with experts in all layers. Raises DataError for other values of its fields."""
    # transformers and vLLM 0.30 have experts in all layers and normalise their weights. They read none of these fields.
    fixed_fields = {"norm_topk_prob": (None, True), "mlp_only_layers": (None, []), "decoder_sparse_step": (None, 1)}
    for field, values in fixed_fields.items():
        if config[field] not in values:
            raise DataError(f"{field} is {quote(config[field])}; for this family it is always {values[1]}.")
    router = softmax_router({**config, "norm_topk_prob": True})
    return qwen3_next.read_hybrid(_without_image_rope(config), router, [True] * size(config, "num_hidden_layers"), MTP)


def _without_image_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without the rotary settings for images, which text does not need."""
    rope = {name: value for name, value in mapping(config, "rope_parameters").items() if name not in _OF_IMAGES}
    return {**config, "rope_parameters": rope}


def rules(model: ModelShape) -> tuple[Rule, ...]:
    """Return the rules that map checkpoint tensors to Megatron parameters.

    They are Qwen3-Next's, with separate input projections of the delta-nets.
    """
    linear, hidden = delta_net(model), model.hidden_size
    keys, values, heads = linear.key_channels, linear.value_channels, linear.num_value_heads
    tensors = (
        (QKV, (linear.convolved_channels, hidden)),
        (GATE, (values, hidden)),
        (BETA, (heads, hidden)),
        (ALPHA, (heads, hidden)),
    )
    blocks = (
        (Segment(QKV, 0, keys),),
        (Segment(QKV, keys, 2 * keys),),
        (Segment(QKV, 2 * keys, 2 * keys + values),),
        (Segment(GATE, 0, values),),
        (Segment(BETA, 0, heads),),
        (Segment(ALPHA, 0, heads),),
    )
    return qwen3_next.hybrid_rules(model, tensors, blocks)


def aliases(model: ModelShape) -> tuple[Alias, ...]:
    """Return the places of the experts' tensors in packed tensors; empty if the files have one tensor per expert.

    Packed tensors are gate_up_proj [experts, 2 * channels, hidden_size], all gates before all ups, and down_proj
    [experts, hidden_size, channels].
    """
    layers_and_packing = [(llama.LAYER, model.packs_experts)]
    if model.num_draft_layers:
        layers_and_packing.append((MTP.layer, model.packs_draft_experts))
    experts, hidden, channels = model.num_experts, model.hidden_size, model.moe_intermediate_size
    layer_aliases: list[Alias] = []
    for layer in (layer for layer, packs in layers_and_packing if packs):
        packed_prefix = layer + "mlp.experts."
        expert_prefix, packed_gate_up = packed_prefix + "{expert}.", packed_prefix + "gate_up_proj"
        gate_up_shape = (experts, 2 * channels, hidden)
        layer_aliases += (
            Alias(expert_prefix + "gate_proj.weight", packed_gate_up, gate_up_shape, (Axis(1), Axis(2))),
            Alias(expert_prefix + "up_proj.weight", packed_gate_up, gate_up_shape, (Axis(1, channels), Axis(2))),
            Alias(
                expert_prefix + "down_proj.weight",
                packed_prefix + "down_proj",
                (experts, hidden, channels),
                (Axis(1), Axis(2)),
            ),
        )
    return tuple(layer_aliases)


def vllm_stacks(model: ModelShape) -> tuple[stacks.Stack, ...]:
    """Return vLLM's parameters as stacks of Hugging Face tensors.

    vLLM joins the four input projections of a delta-net into two parameters: queries, keys, values and gates
    (`in_proj_qkvz`); both rates (`in_proj_ba`).
    """
    linear = delta_net(model)
    # The rows of QKV are queries, keys and values. Each of the three is split over the ranks by itself.
    keys, num_qkv_rows = linear.key_channels, linear.convolved_channels
    qkv_rows = ((0, keys), (keys, 2 * keys), (2 * keys, num_qkv_rows))
    qkvz_parts = (*(stacks.Part(QKV, "even", part) for part in qkv_rows), stacks.Part(GATE, "even"))
    rate_parts = (stacks.Part(BETA, "even"), stacks.Part(ALPHA, "even"))
    return (
        *qwen3_next.hybrid_stacks(model),
        stacks.Stack(LINEAR + "in_proj_qkvz.weight", 0, qkvz_parts),
        stacks.Stack(LINEAR + "in_proj_ba.weight", 0, rate_parts),
    )


def _make_family(architecture: str, *, has_experts: bool, classifier: str = "") -> Family:
    read, family_aliases = (read_experts, aliases) if has_experts else (read_dense, no_aliases)
    defaults = {**qwen3_next.FIELDS, "num_key_value_heads": 2 if has_experts else 4}
    return Family(
        architecture,
        read,
        rules,
        defaults,
        stacks=vllm_stacks,
        draft_layers=MTP,
        aliases=family_aliases,
        classifier=classifier,
    )


def _with_vision(text: Family) -> Family:
    """Return the family for checkpoints with a vision tower: trained and sampled as a text model."""
    return replace(
        text,
        classifier="",
        architecture=text.architecture.replace("ForCausalLM", "ForConditionalGeneration"),
        engine_architecture=text.architecture,
        section="text_config",
        prefix="model.language_model.",
        copied_prefixes=("model.visual.",),
    )


# In transformers 5.23, Qwen3_5ForSequenceClassification is the model with a vision tower.
DENSE_TEXT = _make_family("Qwen3_5ForCausalLM", has_experts=False, classifier="Qwen3_5TextForSequenceClassification")
EXPERTS_TEXT = _make_family("Qwen3_5MoeForCausalLM", has_experts=True)
DENSE, EXPERTS = _with_vision(DENSE_TEXT), _with_vision(EXPERTS_TEXT)
