"""Arguments in common.pt against the settings of a real Megatron model of each family."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megarl.checkpoint.torch_dist import common_state
from megarl.config.parallel import ParallelConfig
from megarl.families.registry import FAMILIES
from megarl.models.configuration import _expert_settings, _model_settings, transformer_config
from tests.shapes import small_shape

LAYOUT = ParallelConfig(1, 1, 1, 1)
OTHER_NAMES = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "gated_linear_unit": "swiglu",
    "activation_func": "quick_geglu",
}
"""Megatron-LM's arguments with other names than Megatron-Core's settings."""
OF_THE_RUN = {
    "softmax_scale", "moe_router_dtype", "moe_grouped_gemm", "moe_flex_dispatcher_backend", "moe_enable_deepep",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
}  # fmt: skip
"""Settings of a run, not of the architecture. YaRN's scale follows from the rotary embeddings."""
RENAMED = {"rope_type"}
"""A setting with another value here: plain embeddings are YaRN with the factor 1 in megarl."""


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_are_megatrons_settings(family: str) -> None:
    shape = small_shape(family)
    arguments = common_state(shape, LAYOUT)["args"]
    settings = _model_settings(shape)
    if shape.router:
        settings |= _expert_settings(shape.router, shape, LAYOUT)
    made = transformer_config(shape, LAYOUT, dtype=torch.float32, sequence_parallel=False, overrides={})
    for name in sorted(settings.keys() - OF_THE_RUN):
        assert hasattr(arguments, OTHER_NAMES.get(name, name)), name
    known = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    common = [name for name in vars(arguments) if name in known & settings.keys() - RENAMED]
    assert len(common) >= 10
    assert [name for name in common if getattr(arguments, name) != getattr(made, name)] == []


def test_the_arguments_are_plain_data() -> None:
    """Megatron's loader and megarl's check read common.pt without running code from it."""
    values = vars(common_state(small_shape("gpt_oss"), LAYOUT)["args"]).values()
    assert all(isinstance(value, bool | int | float | str | list | tuple | None) for value in values)
