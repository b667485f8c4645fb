"""Megatron's config from a model's shape, and the errors of its overrides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.decided_fields import EXPERT_FIELDS, TRANSFORMER_FIELDS
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import padded_vocab_size, read_model_shape
from megarl.models.configuration import (
    _expert_settings,
    _model_settings,
    _split_settings,
    refusals_named,
    transformer_config,
)
from megarl.types import ConfigError


@pytest.fixture
def config(tiny_model: Callable[..., Path]) -> Callable[..., Any]:
    def make(pp: int = 1, **overrides: Any) -> Any:
        shape = read_model_shape(tiny_model(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=24))
        layout = ParallelConfig(tp=2, pp=pp, dp=1, rollout_tp=1)
        return transformer_config(shape, layout, dtype=torch.bfloat16, sequence_parallel=True, overrides=overrides)

    return make


def test_sizes(config: Callable[..., Any]) -> None:
    made = config(pp=2)
    assert (made.num_layers, made.hidden_size, made.ffn_hidden_size) == (2, 128, 256)
    assert (made.num_attention_heads, made.num_query_groups, made.kv_channels) == (4, 2, 24)
    assert (made.tensor_model_parallel_size, made.pipeline_model_parallel_size) == (2, 2)
    assert made.qk_layernorm and made.bf16 and made.sequence_parallel and made.variable_seq_lengths


def test_overrides_win(config: Callable[..., Any]) -> None:
    assert config(recompute_granularity="selective").recompute_granularity == "selective"
    assert config(hidden_dropout=0.25).hidden_dropout == 0.25


@pytest.mark.parametrize("field", ["num_layers", "params_dtype", "calculate_per_token_loss"])
def test_what_the_model_or_the_recipe_decides_cannot_be_overridden(config: Callable[..., Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.megatron\.{field}: .* remove it"):
        config(**{field: 1})


def test_the_fields_that_others_decide_are_listed(config: Callable[..., Any], tiny_model: Callable[..., Path]) -> None:
    """The checks before a start know them from a list, the config from what it sets."""
    layout = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
    dense = read_model_shape(tiny_model(num_layers=2))
    experts = read_model_shape(tiny_model(family="qwen3_moe", num_layers=2, num_kv_heads=2))
    set_here = _model_settings(dense) | _split_settings(layout, torch.float32, False)
    assert set_here.keys() == TRANSFORMER_FIELDS.keys()
    assert {*_expert_settings(experts, layout), "moe_enable_routing_replay"} == EXPERT_FIELDS.keys()


def test_an_unknown_override_names_the_nearest(config: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.megatron\.recompute_granularty: .* mean recompute_granularity\?"):
        config(recompute_granularty="full")
    with pytest.raises(ConfigError, match=r"trainer\.megatron\.zzzzz: [^?]*$"):
        config(zzzzz=1)


def test_what_megatron_refuses_is_a_config_error(config: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.megatron: Megatron-Core refuses these settings: .*fp16"):
        config(fp16=True)


def test_what_megatron_refuses_while_it_builds_is_a_config_error(config: Callable[..., Any]) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    overrides = {"layernorm_zero_centered_gamma": True}

    def build() -> None:
        WrappedTorchNorm(config(**overrides), 8)

    told = (
        r"trainer\.megatron\.layernorm_zero_centered_gamma = True\. Megatron-Core refuses it: zero_centered_gamma not"
    )
    with pytest.raises(ConfigError, match=told), refusals_named(overrides):
        build()
    with pytest.raises(AssertionError, match="zero_centered_gamma"), refusals_named({}):
        build()


@pytest.mark.parametrize(
    ("vocabulary", "tp", "expected"),
    [
        pytest.param(128, 2, 128, id="fits"),
        pytest.param(129, 2, 192, id="to the next 64"),
        pytest.param(151936, 8, 151936, id="Qwen3"),
        pytest.param(1, 128, 128, id="more ranks than 64"),
        pytest.param(65, 3, 192, id="three ranks"),
    ],
)
def test_padded_vocabulary(vocabulary: int, tp: int, expected: int) -> None:
    assert padded_vocab_size(vocabulary, tp) == expected
