"""A checkpoint for Megatron-LM and the model in memory have the same architecture."""

from __future__ import annotations

import pytest
import torch

from megarl.checkpoint.torch_dist import common_state
from megarl.config.parallel import ParallelConfig
from megarl.families.megatron_settings import architecture_settings
from megarl.families.published import PUBLISHED
from megarl.families.shape import shape_from_config
from megarl.models.configuration import transformer_config

ONE = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-14B", "openai/gpt-oss-20b", "zai-org/GLM-4.7-Flash"])
def test_both_uses_have_the_same_settings(name: str) -> None:
    shape = shape_from_config(dict(PUBLISHED[name]))
    config = vars(transformer_config(shape, ONE, dtype=torch.bfloat16, sequence_parallel=False, overrides={}))
    arguments = vars(common_state(shape, ONE)["args"])
    # A family may replace a setting: biases of linear layers in gpt-oss.
    names = architecture_settings(shape).keys() & config.keys() & arguments.keys()
    assert len(names) > 8
    assert {key: config[key] for key in names} == {key: arguments[key] for key in names}
