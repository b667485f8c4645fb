"""Llama: pre-norm blocks with grouped-query attention and a gated feed-forward layer. Other families extend it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.families.family import DEFAULTS, Family
from megarl.families.reading import read_dense
from megarl.families.tensors.rules import Rule, gate_up, query_groups, replicate, row, vocabulary

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"
LAYER = "model.layers.{layer}."
DECODER = "decoder.layers.{layer}."


def rules(model: ModelShape) -> tuple[Rule, ...]:
    """Return the rules that map checkpoint tensors to Megatron parameters of a Llama model.

    With several pipeline stages, a tied output layer is a copy of the embedding on the last stage.
    """
    hidden, feed_forward = model.hidden_size, model.intermediate_size
    attention, mlp = LAYER + "self_attn.", LAYER + "mlp."
    q, k, v = (f"{attention}{letter}_proj.weight" for letter in "qkv")
    # A value head replaces the output layer. It has one row, so it is replicated. With a single stage, a tied output
    # layer is the embedding itself.
    if model.has_value_head:
        head = replicate("value_head.weight", VALUE_HEAD, (1, hidden), "last_stage")
    elif model.tie_word_embeddings:
        head = vocabulary("output_layer.weight", EMBEDDING, model, "last_of_several_stages")
    else:
        head = vocabulary("output_layer.weight", HEAD, model, "last_stage")
    return (
        vocabulary("embedding.word_embeddings.weight", EMBEDDING, model, "first_stage"),
        # Transformer Engine fuses each norm into the linear layer after it.
        replicate(
            DECODER + "input_layernorm.weight",
            LAYER + "input_layernorm.weight",
            (hidden,),
            transformer_engine=DECODER + "self_attention.linear_qkv.layer_norm_weight",
        ),
        query_groups(DECODER + "self_attention.linear_qkv.weight", q, k, v, model, (hidden,)),
        row(
            DECODER + "self_attention.linear_proj.weight",
            attention + "o_proj.weight",
            (hidden, model.num_heads * model.head_dim),
        ),
        replicate(
            DECODER + "pre_mlp_layernorm.weight",
            LAYER + "post_attention_layernorm.weight",
            (hidden,),
            transformer_engine=DECODER + "mlp.linear_fc1.layer_norm_weight",
        ),
        gate_up(
            DECODER + "mlp.linear_fc1.weight", mlp + "gate_proj.weight", mlp + "up_proj.weight", (feed_forward, hidden)
        ),
        row(DECODER + "mlp.linear_fc2.weight", mlp + "down_proj.weight", (hidden, feed_forward)),
        replicate("decoder.final_layernorm.weight", "model.norm.weight", (hidden,), "last_stage"),
        head,
    )


FAMILY = Family(
    "LlamaForCausalLM",
    read_dense,
    rules,
    {**DEFAULTS, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048},
    is_quantisable=True,
    has_adapter_slots=True,
)
