"""Configs of models with latent attention: what is read, and what is refused with field, value and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from megarl.checkpoint.safetensors import changed_config
from megarl.config import RolloutConfig
from megarl.engine.vllm_arguments import engine_arguments
from megarl.families.parts import Latent
from megarl.families.shape import read_model_shape, shape_from_config
from megarl.files.model_folder import SINGLE
from megarl.types import DataError

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7, "intermediate_size": 11,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 13, "q_lora_rank": None,
    "kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 4, "n_routed_experts": 8,
    "num_experts_per_tok": 4, "moe_intermediate_size": 6, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "max_position_embeddings": 160,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4}
FLASH = {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "n_group": 1, "topk_group": 1}


def test_parts() -> None:
    shape = shape_from_config(CONFIG)
    assert shape.attention == Latent(2, 0, 5, 3, 2, 4)
    assert [kind.has_experts for kind in shape.layers] == [False, True, True]
    assert (shape.num_kept_layers, shape.shared_intermediate_size) == (1, 12)
    assert shape_from_config(CONFIG | {"q_lora_rank": 9}).attention == Latent(2, 9, 5, 3, 2, 4)
    # 2 heads of 5 channels from 7; then 7 to 5 + 2; 5 to 2 heads of 3 + 4; and 2 heads of 4 back to 7.
    assert shape.attention.projection_elements(7) == 7 * 10 + 7 * 7 + 5 * 14 + 8 * 7
    assert Latent(2, 9, 5, 3, 2, 4).projection_elements(7) == 9 * (7 + 10) + 7 * 7 + 5 * 14 + 8 * 7
    assert shape.attention.cached_numbers(tp=2) == 7


@pytest.mark.parametrize(
    ("rope", "factor", "mscale"),
    [
        pytest.param({}, 1.0, 0.0, id="default"),
        # 0.1 * ln(40) = 0.3688879454
        pytest.param({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, 1.0, id="equal"),
        pytest.param({"mscale": 1.0, "mscale_all_dim": 0.5}, 1.3688879454 / 1.1844439727, 0.5, id="different"),
    ],
)
def test_yarn(rope: dict[str, float], factor: float, mscale: float) -> None:
    rotary = shape_from_config(CONFIG | ({"rope_scaling": YARN | rope} if rope else {})).rotary
    assert rotary.attention_factor == pytest.approx(factor, rel=1e-9)
    assert rotary.score_mscale == mscale


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_method": None}, "topk_method is missing; vLLM needs"),
        ({"scoring_func": "softmax"}, 'scoring_func is .softmax.; vLLM needs "sigmoid"'),
        ({"tie_word_embeddings": True}, "tie_word_embeddings true"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"rope_interleave": False}, "rope_interleave false"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace is missing"),
        ({"num_key_value_heads": 1}, "num_key_value_heads 1 differs from num_attention_heads 2"),
        ({"topk_group": 4}, "num_experts_per_tok // topk_group is 2"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type .linear."),
        ({"rope_scaling": YARN | {"mscale": 1.0}}, "mscale and mscale_all_dim"),
        ({"rope_scaling": YARN | {"truncate": False}}, "rope parameter truncate"),
        (FLASH | {"mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types"),
    ],
)
def test_what_would_be_computed_differently_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        shape_from_config(CONFIG | change)


def test_a_folder_of_transformers_5_gets_the_fields_of_vllm(tmp_path: Path) -> None:
    """The router's bias shows the method. transformers 5 writes neither its name nor GLM-4.7-Flash's first layers."""
    config = {name: value for name, value in CONFIG.items() if name not in ("topk_method", "scoring_func")}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(DataError, match="topk_method is missing; vLLM needs"):
        read_model_shape(tmp_path)
    save_file({"model.layers.1.mlp.gate.e_score_correction_bias": np.zeros(8, np.float32)}, tmp_path / SINGLE)
    assert read_model_shape(tmp_path) == shape_from_config(CONFIG)
    assert json.loads(changed_config(path, None)) == CONFIG
    arguments = engine_arguments(str(tmp_path), RolloutConfig(), max_model_len=64, dtype="float32", seed=0)
    assert arguments.hf_overrides == {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    path.write_text(json.dumps(config | {"scoring_func": "softmax"}))
    with pytest.raises(DataError, match=r'scoring_func is .softmax.; vLLM needs "sigmoid"'):
        read_model_shape(tmp_path)

    flash = {name: value for name, value in (config | FLASH).items() if name != "first_k_dense_replace"}
    for kinds, first in ((["dense", "dense", "sparse"], 2), (["sparse"] * 3, 0), (None, 1)):
        path.write_text(json.dumps(flash | {"mlp_layer_types": kinds}))
        assert [kind.has_experts for kind in read_model_shape(tmp_path).layers] == [n >= first for n in range(3)]
        assert json.loads(changed_config(path, None))["first_k_dense_replace"] == first
    path.write_text(json.dumps(flash | {"mlp_layer_types": ["dense", "sparse", "dense"]}))
    with pytest.raises(DataError, match=r"mlp_layer_types is .*; first_k_dense_replace gives"):
        read_model_shape(tmp_path)


def test_glm_flash_needs_no_method_of_routing() -> None:
    config = {name: value for name, value in (CONFIG | FLASH).items() if name not in ("topk_method", "scoring_func")}
    assert shape_from_config(config).family == "glm4_moe_lite"
