"""Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from megarl.families.config_json import windows
from megarl.families.family import DEFAULTS, Family
from megarl.families.pages import llama
from megarl.families.reading import read_dense
from megarl.families.tensors.rules import Rule, query_groups

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape


def rules(model: ModelShape) -> tuple[Rule, ...]:
    """Return the rules that map checkpoint tensors to Megatron parameters: Llama's, and the biases."""
    return (*llama.rules(model), qkv_bias_rule(model))


def qkv_bias_rule(model: ModelShape) -> Rule:
    q, k, v = (f"{llama.LAYER}self_attn.{letter}_proj.bias" for letter in "qkv")
    return query_groups(llama.DECODER + "self_attention.linear_qkv.bias", q, k, v, model, ())


FIELDS = {
    **DEFAULTS,
    **windows.DEFAULTS,
    "num_key_value_heads": 32,
    "head_dim": None,
    "max_position_embeddings": 32768,
}
"""Values of missing fields in Qwen2 models."""

FAMILY = Family(
    "Qwen2ForCausalLM",
    partial(
        read_dense,
        qkv_bias=True,
        windows=windows.from_a_layer_on,
        # transformers' Qwen2 does not read these fields: it always has QKV biases and never others.
        ignored=("attention_bias", "mlp_bias"),
    ),
    rules,
    FIELDS,
    is_quantisable=True,
    has_adapter_slots=True,
)
