"""Scaled rotary embeddings and sliding windows of config.json: what is read, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.families.config_json.rotary import Rotary
from megarl.families.shape import shape_from_config
from megarl.types import DataError

SIZES = {
    "hidden_size": 8, "intermediate_size": 11, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 13, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 128}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SWITCHED_ON = {"use_sliding_window": True, "sliding_window": 5}


def config(architecture: str, **fields: Any) -> dict[str, Any]:
    experts = EXPERTS if "Moe" in architecture else {}
    return SIZES | experts | {"architectures": [architecture + "ForCausalLM"]} | fields


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_theta": 5e5}, Rotary(5e5)),
        ({"rope_type": "dynamic", "factor": 2.0}, Rotary(1e4)),
        ({"type": "linear", "factor": 2.0}, Rotary(1e4, "linear", 2.0)),
        (YARN, Rotary(1e4, "yarn", 4.0, 128.0, attention_factor=1.1386294361119891)),
        (
            YARN | {"attention_factor": 2, "truncate": False},
            Rotary(1e4, "yarn", 4.0, 128.0, attention_factor=2.0, truncate=False),
        ),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, Rotary(1e4, "yarn", 4.0, 128.0)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_rotary_embeddings_are_read_from_both_forms(field: str, rope: dict[str, Any], expected: Rotary) -> None:
    assert shape_from_config(config("Qwen3", **{field: rope})).rotary == expected


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope"}, "rope_type longrope is not supported; supported are default, linear, dynamic"),
        ({"rope_type": "linear"}, "rope parameter factor is missing"),
        ({"rope_type": "yarn", "factor": 4.0}, "rope parameter original_max_position_embeddings is missing"),
        (YARN | {"factor": 0.5}, "factor 0.5: YaRN extends the context"),
        (YARN | {"factor": "4"}, "factor is '4'; it must be a positive number"),
        (YARN | {"factor": 2.0}, r"max_position_embeddings 512 exceeds .* \* factor = 256"),
        (YARN | {"attn_factor": 1.0}, "rope parameter attn_factor is not supported with rope_type yarn"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor 4.0 must be smaller"),
        # transformers and vLLM take other values for missing ones, or fail.
        (LLAMA3 | {ORIGINAL: None}, "original_max_position_embeddings is missing"),
        (LLAMA3 | {"high_freq_factor": None}, "high_freq_factor is missing"),
        (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; models of this family rotate all"),
    ],
)
def test_other_rotary_embeddings_are_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        shape_from_config(config("Llama", rope_parameters=rope))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; models of this family rotate all channels"),
        ({"rope_parameters": YARN, ORIGINAL: 64}, "original_max_position_embeddings is 64, but the rope parameter"),
        ({"rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 2.0}}, "two names of one setting"),
    ],
)
def test_two_places_of_one_setting_must_agree(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        shape_from_config(config("Llama", **fields))


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        (config("Mistral"), (4096,) * 3),
        (config("Mistral", sliding_window=None), ()),
        (config("Mistral", sliding_window=7), (7,) * 3),
        (config("Llama", sliding_window=7), ()),
        (config("Qwen2", sliding_window=7), ()),
        (config("Qwen2", **SWITCHED_ON, max_window_layers=0), (5,) * 3),
        (config("Qwen3", **SWITCHED_ON, layer_types=["sliding_attention"] * 3), (5,) * 3),
        (config("Qwen3Moe", **SWITCHED_ON), (5,) * 3),
    ],
)
def test_windows_are_those_of_transformers_and_vllm(fields: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert shape_from_config(fields).windows == windows


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (config("Qwen2", **SWITCHED_ON), "0 of 3 layers have a window; vLLM 0.30 needs it in all layers"),
        (config("Qwen3", **SWITCHED_ON, max_window_layers=1), "2 of 3 layers have a window"),
        (config("Qwen2Moe", **SWITCHED_ON), "give different layers of this family a window"),
        (config("Llama", layer_types=["sliding_attention"] * 3), "sliding_attention is not supported"),
        (config("Mistral", layer_types=["full_attention"] * 3), "a window in every layer; remove full_attention"),
        (config("Qwen3", layer_types=["full_attention"]), "layer_types has 1 entries for 3 layers"),
        (config("Qwen3", layer_types=["linear_attention"] * 3), "layer_types is .*linear_attention"),
        (config("Mistral", sliding_window=-1), "sliding_window is -1; it must be a whole number"),
    ],
)
def test_other_windows_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        shape_from_config(fields)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_fields_that_only_the_engine_reads_are_refused(family: str) -> None:
    unchanged = config(family, is_causal=True, logit_scale=1.0, qk_norm=False, dual_chunk_attention_config=None)
    assert shape_from_config(unchanged) == shape_from_config(config(family))
    changed_fields = {"is_causal": False, "logit_scale": 0.5, "qk_norm": True, "dual_chunk_attention_config": {"a": 1}}
    for name, value in changed_fields.items():
        with pytest.raises(DataError, match=rf"{name} is .*another model than the trainer; use a model without it"):
            shape_from_config(config(family, **{name: value}))
