"""Megatron's config from a model's shape, and the errors of its overrides."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch._subclasses.fake_tensor import FakeTensorMode

from megarl.config.libraries.library_settings import reserved_settings
from megarl.config.parallel import ParallelConfig
from megarl.config.sections.trainer import RecomputedModule
from megarl.families.config_json.rotary import Rotary
from megarl.families.registry import FAMILIES
from megarl.families.shape import padded_vocab_size, read_model_shape
from megarl.models import configuration
from megarl.models.attention import PackedRow
from megarl.models.configuration import (
    _expert_settings,
    _model_settings,
    _parallel_settings,
    name_refused_overrides,
    transformer_config,
)
from megarl.models.policy import accumulate_in_main_gradients
from megarl.types import ConfigError
from tests.shapes import small_shape


@pytest.fixture
def config(tiny_model: Callable[..., Path]) -> Callable[..., Any]:
    def make(pp: int = 1, **overrides: Any) -> Any:
        shape = read_model_shape(tiny_model(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=24))
        parallel = ParallelConfig(tp=2, pp=pp, dp=1, rollout_tp=1)
        return transformer_config(shape, parallel, dtype=torch.bfloat16, sequence_parallel=True, overrides=overrides)

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


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"window_size": [16, 0]}, "window_size"),
        ({"moe_z_loss_coeff": 1e-3}, "moe_z_loss_coeff = 0.001"),
    ],
)
def test_fields_without_effect_are_refused(config: Callable[..., Any], overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.megatron\.{re.escape(field)}.*no effect"):
        config(**overrides)
    assert config(**dict.fromkeys(overrides, 0)).attention_dropout == 0


def test_a_coefficient_turns_balancing_on(tiny_model: Callable[..., Path]) -> None:
    def made(**overrides: Any) -> TransformerConfig:
        shape = read_model_shape(tiny_model(family="qwen3_moe", num_layers=2, num_kv_heads=2))
        parallel = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
        return transformer_config(shape, parallel, dtype=torch.float32, sequence_parallel=False, overrides=overrides)

    assert made().moe_router_load_balancing_type == "none"
    assert made(moe_aux_loss_coeff=1e-3).moe_router_load_balancing_type == "aux_loss"
    for overrides in (
        {"moe_router_load_balancing_type": "seq_aux_loss"},
        {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 1e-3},
    ):
        with pytest.raises(ConfigError, match=r"trainer\.megatron\.moe_.*no effect"):
            made(**overrides)


@pytest.mark.parametrize("field", ["num_layers", "params_dtype", "calculate_per_token_loss"])
def test_what_the_model_or_the_recipe_decides_cannot_be_overridden(config: Callable[..., Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.megatron\.{field}: .* remove it"):
        config(**{field: 1})


def test_the_fields_that_others_decide_are_listed(config: Callable[..., Any], tiny_model: Callable[..., Path]) -> None:
    """The checks before a start know them from a list, the config from what it sets."""
    parallel = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
    dense = read_model_shape(tiny_model(num_layers=2))
    experts = read_model_shape(tiny_model(family="qwen3_moe", num_layers=2, num_kv_heads=2))
    set_here = _model_settings(dense) | _parallel_settings(parallel, torch.float32, False)
    # Set for models with trained MTP layers alone.
    of_mtp = ("mtp_num_layers", "mtp_loss_scaling_factor")
    assert {*set_here, "pipeline_model_parallel_layout", *of_mtp} == reserved_settings("megatron").keys()
    assert experts.router is not None
    of_experts = _expert_settings(experts.router, experts, parallel)
    assert {*of_experts, "moe_enable_routing_replay"} == reserved_settings("experts").keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_sets_is_listed(family: str) -> None:
    """The checks before a start know the settings of each family; windows have no effect and are refused as such."""
    settings = _model_settings(dataclasses.replace(small_shape(family), rotary=Rotary(1e4, attention_factor=1.2)))
    listed = reserved_settings("megatron") | reserved_settings("architecture")
    assert settings.keys() - listed.keys() <= {"window_size", "window_attn_skip_freq"}


def test_the_architecture_cannot_be_overridden() -> None:
    parallel = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
    for family, overrides in (
        ("gpt_oss", {"apply_rope_fusion": True}),
        ("qwen3", {"softmax_scale": 0.5}),
        ("qwen3", {"softmax_type": "learnable"}),
        ("qwen3", {"multi_latent_attention": True}),
        ("deepseek_v3", {"mscale": 2.0}),
        ("qwen3_next", {"linear_conv_kernel_dim": 3}),
    ):
        with pytest.raises(ConfigError, match=rf"trainer\.megatron\.{next(iter(overrides))}: follows from the model"):
            transformer_config(
                small_shape(family), parallel, dtype=torch.float32, sequence_parallel=False, overrides=overrides
            )


def test_products_in_fp8_are_scaled_by_blocks(tiny_model: Callable[..., Path]) -> None:
    shape, parallel = read_model_shape(tiny_model(num_layers=2)), ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "sequence_parallel": False}
    made = transformer_config(shape, parallel, **settings, fp8="blockwise", overrides={})
    assert (made.fp8, made.fp8_recipe, made.fp8_param) == ("e4m3", "blockwise", False)
    assert transformer_config(shape, parallel, **settings, overrides={}).fp8 is None
    with pytest.raises(ConfigError, match=r"trainer\.megatron\.fp8: .* remove it"):
        transformer_config(shape, parallel, **settings, fp8="blockwise", overrides={"fp8": "hybrid"})


@pytest.mark.parametrize(("ep", "expected"), [(1, "alltoall"), (2, "flex")])
def test_tokens_reach_other_ranks_by_deep_ep(tiny_model: Callable[..., Path], ep: int, expected: str) -> None:
    parallel = ParallelConfig(tp=1, pp=1, dp=2, rollout_tp=1, ep=ep)
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "sequence_parallel": False}
    for family in ("qwen3_moe", "qwen3"):
        shape = read_model_shape(tiny_model(family=family, num_layers=2, num_kv_heads=2))
        if ep > 1 and not shape.num_experts:
            continue
        made = transformer_config(shape, parallel, **settings, moe_dispatcher="flex", overrides={})
        assert made.moe_token_dispatcher_type == (expected if shape.num_experts else "alltoall")
        assert made.moe_flex_dispatcher_backend == "deepep"


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

    overrides = {"persist_layer_norm": True}

    def build() -> None:
        WrappedTorchNorm(config(**overrides), 8)

    told = r"trainer\.megatron\.persist_layer_norm = True\. Megatron-Core refuses it: persist_layer_norm not"
    with pytest.raises(ConfigError, match=told), name_refused_overrides(overrides):
        build()
    with pytest.raises(AssertionError, match="persist_layer_norm"), name_refused_overrides({}):
        build()


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and Transformer Engine, as far as Megatron's config asks about them."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils

    def rotate(t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.zeros_like(t)

    monkeypatch.setattr(configuration, "uses_transformer_engine", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", rotate)
    for name in FUSED_EXPERTS:
        monkeypatch.setattr(moe_utils, name, lambda *_: None, raising=False)


FUSED_EXPERTS = (
    "fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs", "fused_unpermute", "fused_topk_with_score_function",
    "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss",
)  # fmt: skip


def test_kernels_are_fused_where_transformer_engine_is(transformer_engine: None, config: Callable[..., Any]) -> None:
    made = config()
    assert made.apply_rope_fusion and made.bias_activation_fusion
    # Megatron's own layers would ask for apex's kernel, which is not here.
    assert not made.gradient_accumulation_fusion
    assert configuration.accumulates_in_transformer_engine(made, {})
    assert not configuration.accumulates_in_transformer_engine(made, {"gradient_accumulation_fusion": False})
    assert not config(apply_rope_fusion=False).apply_rope_fusion


def test_the_fused_accumulation_is_asked_of_layers_that_have_it(
    transformer_engine: None, config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = {"gradient_accumulation_fusion": True}
    made = config(**overrides)
    assert not made.gradient_accumulation_fusion
    assert configuration.accumulates_in_transformer_engine(made, overrides)
    monkeypatch.setattr(configuration.tensor_parallel_layers, "_grad_accum_fusion_available", True)
    made = config(**overrides)
    assert made.gradient_accumulation_fusion
    assert not configuration.accumulates_in_transformer_engine(made, overrides)


def test_the_fused_accumulation_needs_a_kernel(config: Callable[..., Any]) -> None:
    told = r"gradient_accumulation_fusion = True: needs Transformer Engine \(.+\) or apex's extension, .*; remove it"
    with pytest.raises(ConfigError, match=told):
        config(gradient_accumulation_fusion=True)


def test_on_the_cpu_nothing_is_fused(config: Callable[..., Any]) -> None:
    made = config()
    fused = ("apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion", "masked_softmax_fusion")
    assert not any(getattr(made, name) for name in fused)
    assert not configuration.accumulates_in_transformer_engine(made, {})


@pytest.mark.parametrize("router_replay", [False, True])
def test_a_replayed_router_is_not_fused(
    transformer_engine: None, tiny_model: Callable[..., Path], router_replay: bool
) -> None:
    """Megatron's fused router returns before it looks at the experts that are replayed."""
    made = transformer_config(
        read_model_shape(tiny_model(family="qwen3_moe", num_layers=2, num_kv_heads=2)),
        ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1),
        dtype=torch.bfloat16,
        sequence_parallel=False,
        router_replay=router_replay,
        overrides={},
    )
    assert made.moe_permute_fusion and made.moe_router_fusion is not router_replay


@pytest.mark.parametrize("is_fused", [True, False])
def test_the_fused_rope_reads_nothing_from_the_gpu(
    transformer_engine: None,
    cuda_factories: None,
    config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    is_fused: bool,
) -> None:
    """Fake CUDA tensors have no values: whoever waits for one fails."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    made, device = config(apply_rope_fusion=is_fused), torch.device("cuda", 0)
    one_rank: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    # Where CUDA is said to be there, fake tensors are made by its own factories.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with FakeTensorMode():
        query = torch.zeros(12, 4, 24, dtype=torch.bfloat16, device=device)
        angles = torch.zeros(8, 1, 1, 24, device=device)
        lengths = PackedRow.from_lengths([4, 8], device, "thd").cu_seqlens_q
        with nullcontext() if is_fused else pytest.raises(RuntimeError):
            assert apply_rotary_pos_emb(query, angles, made, lengths, cp_group=one_rank).shape == query.shape


class TransformerEngineLinear(torch.nn.Linear):
    """A layer with the switch of Transformer Engine's linear layers."""

    fuse_wgrad_accumulation = False


def test_layers_with_the_switch_accumulate_in_place() -> None:
    chunk = torch.nn.Sequential(TransformerEngineLinear(2, 2), torch.nn.Linear(2, 2))
    accumulate_in_main_gradients(chunk)
    assert chunk[0].fuse_wgrad_accumulation and not hasattr(chunk[1], "fuse_wgrad_accumulation")


def test_modules_that_are_computed_anew(tiny_model: Callable[..., Path]) -> None:
    def made(*modules: str) -> Any:
        return transformer_config(
            read_model_shape(tiny_model(num_layers=2)),
            ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1),
            dtype=torch.bfloat16,
            sequence_parallel=False,
            recompute="selective",
            recompute_modules=modules,
            overrides={},
        )

    assert made("layernorm", "mlp").recompute_modules == ["layernorm", "mlp"]
    with pytest.raises(ConfigError, match="moe_act in recompute_modules is only supported with moe_grouped_gemm"):
        made("moe_act")


def test_the_modules_of_a_recipe_are_megatrons() -> None:
    """All that its TransformerConfig takes but multi-latent attention's, which no family here has."""
    source = inspect.getsource(TransformerConfig.__post_init__)
    allowed = re.search(r"allowed_modules = (\{[^}]*\})", source)
    assert allowed is not None
    # Megatron-Core 0.19 also knows the norm of its own delta-nets; those of megarl are other modules.
    others = {"mla_up_proj", "gdn_norm_out"}
    assert ast.literal_eval(allowed[1]) - others == set(get_args(RecomputedModule))


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
