"""gpt-oss: attention with sinks, a window in every other layer, biases everywhere, experts with a clamped SwiGLU.

Files pack all experts of a layer into one transposed tensor, with alternating gate and up rows. Released files are
MXFP4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.families.config_json.config_values import quote, size
from megarl.families.config_json.rotary import read_rotary, rope_settings
from megarl.families.family import DEFAULTS, Family
from megarl.families.pages import llama, qwen2
from megarl.families.parts import LayerKind, Parts, Router
from megarl.families.reading import check_normalised, grouped_query, refuse_biases, top_k
from megarl.families.tensors import stacks
from megarl.families.tensors.packed import Alias, Axis
from megarl.families.tensors.rules import Rule, Segment, Variant, replicate, with_experts
from megarl.types import DataError

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape

_ATTENTION = llama.LAYER + "self_attn."
_MLP = llama.LAYER + "mlp."
_EXPERT = _MLP + "experts.{expert}."
_ALPHA, _LIMIT = 1.702, 7.0
"""Constants of the clamped SwiGLU in Megatron-Core 0.16.1 (alpha) and vLLM 0.30 (both)."""


def read(config: Mapping[str, Any]) -> Parts:
    """Return the parts of a gpt-oss model. Raises DataError for values that vLLM 0.30 ignores."""
    refuse_biases(config, ignored=("attention_bias",))
    num_layers, window = size(config, "num_hidden_layers"), size(config, "sliding_window")
    expected_types = [("sliding_attention", "full_attention")[layer % 2] for layer in range(num_layers)]
    # vLLM 0.30 has these values in its code and ignores config.json.
    fixed_values = {
        "attention_bias": True,
        "swiglu_alpha": _ALPHA,
        "swiglu_limit": _LIMIT,
        "tie_word_embeddings": False,
    }
    fixed_values |= {"layer_types": expected_types, "rms_norm_eps": 1e-5}
    for field, value in fixed_values.items():
        if config.get(field) not in (None, value):
            raise DataError(f"{field} is {quote(config[field])}; in vLLM 0.30 it is always {quote(value)}.")
    # vLLM 0.30 ignores a factor of attention in the file, so only YaRN's default is allowed.
    rotary = read_rotary(config)
    usual_rope = {**rope_settings(config), "attention_factor": None, "mscale": None}
    usual_rotary = read_rotary({**config, "rope_parameters": usual_rope, "rope_scaling": None})
    if rotary.scaling != "yarn" or rotary != usual_rotary:
        raise DataError(
            "rope_parameters: for this family vLLM 0.30 supports only YaRN with the default attention factor; use "
            "rope_type yarn without attention_factor and mscale."
        )
    num_experts = size(config, "num_local_experts")
    num_chosen = top_k(config, num_experts)
    check_normalised(num_chosen)
    router = Router(num_experts, num_chosen, size(config, "intermediate_size"))
    layer_kinds = tuple(LayerKind(has_experts=True, window=0 if layer % 2 else window) for layer in range(num_layers))
    return Parts(grouped_query(config, qkv_bias=True, qk_norm=False), rotary, router, layer_kinds)


def rules(model: ModelShape) -> tuple[Rule, ...]:
    """Return the rules that map checkpoint tensors to Megatron parameters.

    They are Qwen2's, with experts, their biases, and a sink for each head.
    """
    hidden = (model.hidden_size,)
    router_bias = replicate(llama.DECODER + "mlp.router.bias", _MLP + "router.bias", (model.num_experts,))
    output_bias = replicate(llama.DECODER + "self_attention.linear_proj.bias", _ATTENTION + "o_proj.bias", hidden)
    expert_rules = with_experts((*qwen2.rules(model), output_bias), model, router="router")
    sinks = replicate(
        llama.DECODER + "self_attention.core_attention.softmax_offset", _ATTENTION + "sinks", (model.num_heads,)
    )
    return (*expert_rules, router_bias, replace(sinks, dim=0), *_make_expert_bias_rules(model))


def _make_expert_bias_rules(model: ModelShape) -> tuple[Rule, Rule]:
    """Return the rules of the biases of gate and up projection (split over ranks) and down projection."""
    channels, hidden = model.moe_intermediate_size, model.hidden_size
    gate, up = (Segment(f"{_EXPERT}{kind}_proj.bias", 0, channels) for kind in ("gate", "up"))
    down = Segment(_EXPERT + "down_proj.bias", 0, hidden)

    def bias_rule(layer: str, dim: int | None, *segments: Segment) -> Rule:
        """Return the rule of one bias per expert. `segments`: the checkpoint tensors that it joins."""
        experts = llama.DECODER + "mlp.experts."
        return Rule(
            f"{experts}local_experts.{{expert}}.{layer}.bias",
            "every_layer",
            tuple((segment.tensor, (segment.stop,)) for segment in segments),
            dim,
            tuple((segment,) for segment in segments),
            transformer_engine=Variant(f"{experts}{layer}.bias{{expert}}"),
            is_expert=True,
        )

    return bias_rule("linear_fc1", 0, gate, up), bias_rule("linear_fc2", None, down)


def aliases(model: ModelShape) -> tuple[Alias, ...]:
    """Return the places of single experts' weights and biases in the packed, transposed tensors."""
    experts, hidden, channels = model.num_experts, model.hidden_size, model.moe_intermediate_size
    packed_prefix = _MLP + "experts."
    gate_up, down = packed_prefix + "gate_up_proj", packed_prefix + "down_proj"
    # Gate and up rows alternate in files, so each is every second index, from `offset` on. Weights are transposed.
    return (
        *(
            alias
            for offset, kind in enumerate(("gate", "up"))
            for alias in (
                Alias(
                    f"{_EXPERT}{kind}_proj.weight",
                    gate_up,
                    (experts, hidden, 2 * channels),
                    (Axis(2, offset, 2), Axis(1)),
                ),
                Alias(f"{_EXPERT}{kind}_proj.bias", gate_up + "_bias", (experts, 2 * channels), (Axis(1, offset, 2),)),
            )
        ),
        Alias(_EXPERT + "down_proj.weight", down, (experts, channels, hidden), (Axis(2), Axis(1))),
        Alias(_EXPERT + "down_proj.bias", down + "_bias", (experts, hidden), (Axis(1),)),
    )


def vllm_stacks(model: ModelShape) -> tuple[stacks.Stack, ...]:
    """Return vLLM's parameters as stacks of Hugging Face tensors.

    vLLM names attention `attn` instead of `self_attn`. In the experts, gate and up rows alternate.
    """
    attention, live_experts = llama.LAYER + "attn.", _MLP + "experts.routed_experts."
    return (
        stacks.vocabulary(llama.EMBEDDING, "model.embedding.weight"),
        stacks.vocabulary(llama.HEAD),
        *(stacks.qkv(_ATTENTION, kind, attention) for kind in ("weight", "bias")),
        stacks.row(_ATTENTION + "o_proj.weight", attention + "o_proj.weight"),
        stacks.Stack(attention + "o_proj.bias", 0, (stacks.Part(_ATTENTION + "o_proj.bias", "copy"),)),
        stacks.Stack(attention + "sinks", 0, (stacks.Part(_ATTENTION + "sinks", "even"),)),
        *(
            stacks.gate_up(_EXPERT, f"{live_experts}w13_{kind}", kind)._replace(stacks_experts=True, alternates=True)
            for kind in ("weight", "bias")
        ),
        stacks.row(_EXPERT + "down_proj.weight", live_experts + "w2_weight")._replace(stacks_experts=True),
        # vLLM adds the bias on every rank before the sum over ranks, so all ranks except the first have zeros.
        stacks.Stack(
            live_experts + "w2_bias", 0, (stacks.Part(_EXPERT + "down_proj.bias", "first"),), stacks_experts=True
        ),
    )


def settings(model: ModelShape) -> Mapping[str, Any]:
    return {
        "add_bias_linear": True,
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": _LIMIT,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
    }


_FIELDS = {
    **DEFAULTS,
    "attention_bias": True,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
}

FAMILY = Family(
    "GptOssForCausalLM", read, rules, _FIELDS, stacks=vllm_stacks, settings=settings, aliases=aliases, reads_mxfp4=True
)
