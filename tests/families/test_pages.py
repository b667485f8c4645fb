"""Pages of families: parts read from config.json, kinds of layers, and refusals by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.families.flops import forward_flops
from megarl.families.model_tensors import hf_tensors, layers_by_template, list_copied_prefixes, list_rules
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape, shape_from_config, value_head_fields
from megarl.families.tensors.rules import Variant, overlap, replicate
from megarl.types import DataError
from tests.shapes import small_shape

SIZES = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 13, "moe_intermediate_size": 6, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN = SIZES | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "norm_topk_prob": True}
GLM = SIZES | {
    "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 2,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "attention_bias": True,
}  # fmt: skip


def read(config: dict[str, Any], **fields: Any) -> ModelShape:
    return shape_from_config(config | fields)


def test_glm_s_parts_are_read() -> None:
    shape = read(GLM)
    assert shape.router is not None
    assert (shape.router.score, shape.router.has_bias, shape.router.scale) == ("sigmoid", True, 2.5)
    assert (shape.num_experts, shape.shared_intermediate_size, shape.expert_layers) == (8, 12, (2,))
    assert shape.attention.qkv_bias and not shape.attention.qk_norm
    assert list_copied_prefixes(shape) == ("model.layers.3.",)
    tensors = hf_tensors(shape)
    assert tensors["model.layers.2.mlp.gate.e_score_correction_bias"] == (8,)
    assert "model.layers.1.mlp.down_proj.weight" in tensors and "model.layers.2.mlp.down_proj.weight" not in tensors
    assert not any("q_norm" in name for name in tensors)
    assert any("q_norm" in name for name in hf_tensors(read(GLM, use_qk_norm=True)))


@pytest.mark.parametrize(
    "fields",
    [
        {"partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_the_rotated_fraction_is_read_from_both_places(fields: dict[str, Any]) -> None:
    assert read(GLM, **fields, head_dim=8).rotary.fraction == 0.25 and read(GLM).rotary.fraction == 0.5
    assert read(GLM, **fields, head_dim=8).rotary_channels == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob false"),
        ({"n_group": 2, "topk_group": 2}, "n_group 2, topk_group 2, num_experts_per_tok 2"),
        ({"n_group": 3, "topk_group": 1}, "n_group 3"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok 1"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace 3 leaves none of the 3 layers"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25 rotates 1 of the 4 channels"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor 0.1 rotates 0 of the 4 channels"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings true"),
        ({"mlp_bias": True}, "mlp_bias is not supported for Glm4MoeForCausalLM"),
    ],
)
def test_glm_s_other_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        read(GLM, **fields)


def test_groups_that_all_libraries_choose_alike_are_read() -> None:
    shape = read(GLM, n_group=4, topk_group=1)
    assert shape.router is not None and (shape.router.num_groups, shape.router.top_groups) == (4, 1)


def test_qwen_s_dense_layers_are_read() -> None:
    """Transformers: a layer has experts if its number from 1 is a multiple of the step and it is not listed."""
    assert read(QWEN).kinds == () and read(QWEN).expert_layers == (0, 1, 2)
    assert read(QWEN, mlp_only_layers=[0]).expert_layers == (1, 2)
    assert read(QWEN, decoder_sparse_step=2).expert_layers == (1,)
    assert read(QWEN, decoder_sparse_step=2, num_hidden_layers=4, mlp_only_layers=[3]).expert_layers == (1,)
    with pytest.raises(DataError, match=r"mlp_only_layers is \[3\]; it must list layers from 0 to 2"):
        read(QWEN, mlp_only_layers=[3])
    with pytest.raises(DataError, match="leave no layer with experts"):
        read(QWEN, mlp_only_layers=[1], decoder_sparse_step=2)


def test_a_softmax_router_needs_two_experts_where_weights_are_normalised() -> None:
    with pytest.raises(DataError, match="num_experts_per_tok 1 with normalised weights"):
        read(QWEN, num_experts_per_tok=1)
    assert read(QWEN, num_experts_per_tok=1, norm_topk_prob=False).top_k == 1


def test_two_rules_share_a_norm_in_different_layers() -> None:
    shape = small_shape("glm4_moe")
    norms = [rule for rule in list_rules(shape) if rule.tensors[0][0].endswith("post_attention_layernorm.weight")]
    assert [(rule.layers, rule.transformer_engine is None) for rule in norms] == [
        (frozenset({0}), False), (frozenset({1, 2, 3}), True),
    ]  # fmt: skip
    assert not overlap(*norms)
    assert layers_by_template(norms, shape) == {norms[0].tensors[0][0]: (0, 1, 2, 3)}


def test_a_variant_may_replicate_what_is_split() -> None:
    rule = replicate("local", "tensor", (4, 2))
    split = type(rule)("local", rule.place, rule.tensors, 0, rule.blocks, transformer_engine=Variant("fused", True))
    assert (split.resolve(False).parameter, split.resolve(False).dim) == ("local", 0)
    assert (split.resolve(True).parameter, split.resolve(True).dim) == ("fused", None)


def test_flops_count_each_kind_of_layer() -> None:
    """Two dense layers; one with a router of 8, two chosen experts and a shared one of twice an expert's size."""
    attention = 2 * 8 * (4 + 2) * 4
    dense, routed = 3 * 8 * 12, 3 * 8 * (2 * 6 + 12) + 8 * 8
    matrices = 2 * (3 * attention + 2 * dense + routed + 8 * 13)
    tokens = 5
    scores = 3 * 4 * 4 * 4 * tokens * tokens / 2
    assert forward_flops(read(GLM), np.array([tokens])) == tokens * matrices + scores


TEXT = SIZES | {
    "head_dim": 8, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
}  # fmt: skip
VISION = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": TEXT}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "weights of quant_method 'fp8' cannot be trained"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"text_config": TEXT | {"quantization_config": {"quant_method": "fp8"}}}, "weights of quant_method 'fp8'"),
        ({"text_config": TEXT | {"torch_dtype": "int8"}}, "torch_dtype is 'int8'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, but text_config.tie_word_embeddings is missing"),
    ],
)
def test_number_formats_are_checked_in_and_outside_of_the_text_section(fields: dict[str, Any], message: str) -> None:
    assert read(VISION).family == "qwen3_5"
    with pytest.raises(DataError, match=re.escape(message)):
        read(VISION, **fields)


EXPERTS = TEXT | {"num_experts": 4, "architectures": ["Qwen3_5MoeForCausalLM"]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False; for this family it is always True"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    ],
)
def test_fields_that_libraries_do_not_read_are_refused(fields: dict[str, Any], message: str) -> None:
    assert read(EXPERTS, attn_output_gate=True, norm_topk_prob=True, mlp_only_layers=[]).expert_layers == (0, 1, 2, 3)
    with pytest.raises(DataError, match=re.escape(message)):
        read(EXPERTS, **fields)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.section])
def test_a_reward_model_s_class_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    """transformers has no such class for some families; then the name is derived."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text("{}")
    [first, *others] = value_head_fields(tmp_path, small_shape(family))["architectures"]
    derived = FAMILIES[family].architecture.replace("ForCausalLM", "ForSequenceClassification")
    assert first == CLASSES.get(family, derived) and others in ([], [derived])


@pytest.mark.parametrize(
    ("architecture", "family", "page"),
    [
        ("MiniMaxM2ForCausalLM", "minimax_m2", "minimax_m2"),
        ("Gemma3ForCausalLM", "gemma3_text", "gemma3_text"),
        ("Olmo3ForCausalLM", "olmo3", "olmo3"),
        ("Olmo3ForSequenceClassification", "../olmo3", "NAME"),
    ],
)
def test_another_family_is_refused_with_the_module_to_write(architecture: str, family: str, page: str) -> None:
    message = rf"{architecture} is not supported; supported are .*Qwen3ForCausalLM, .*megarl/families/pages/{page}\.py"
    with pytest.raises(DataError, match=message):
        shape_from_config({"architectures": [architecture], "model_type": family})
