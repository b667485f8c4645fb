"""Qwen2 and Qwen2.5: Llama with biases on the query, key and value projections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.families import llama, windows
from megarl.families.family import Family
from megarl.families.rules import Rule, query_groups

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape


def rules(model: ModelShape) -> tuple[Rule, ...]:
    """Return the rules of a Qwen2 model."""
    q, k, v = (f"{llama.LAYER}self_attn.{letter}_proj.bias" for letter in "qkv")
    return (*llama.rules(model), query_groups(llama.DECODER + "self_attention.linear_qkv.bias", q, k, v, model, ()))


FAMILY = Family(
    "Qwen2ForCausalLM",
    rules,
    qkv_bias=True,
    # transformers' Qwen2 does not read these fields: it always has QKV biases and never others.
    ignored_fields=frozenset({"attention_bias", "mlp_bias"}),
    is_quantisable=True,
    windows=windows.from_a_layer_on,
)
