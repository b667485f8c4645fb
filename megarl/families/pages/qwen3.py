"""Qwen3 (dense): Llama with an RMSNorm over each query and key head."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from megarl.families.config_json import windows
from megarl.families.family import Family
from megarl.families.pages import llama, qwen2
from megarl.families.reading import read_dense
from megarl.families.tensors.rules import Rule, replicate

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape


def rules(model: ModelShape) -> tuple[Rule, ...]:
    """Return the rules that map checkpoint tensors to Megatron parameters: Llama's, and two norms."""
    return (
        *llama.rules(model),
        *(
            replicate(
                f"{llama.DECODER}self_attention.{letter}_layernorm.weight",
                f"{llama.LAYER}self_attn.{letter}_norm.weight",
                (model.head_dim,),
            )
            for letter in "qk"
        ),
    )


FAMILY = Family(
    "Qwen3ForCausalLM",
    partial(read_dense, qk_norm=True, windows=windows.from_a_layer_on),
    rules,
    {**qwen2.FIELDS, "head_dim": 128},
    is_quantisable=True,
    has_adapter_slots=True,
)
