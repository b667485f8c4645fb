"""Engines that could not do as they are asked, or would do it in another way than the trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.families.registry import FAMILIES
from megarl.preflight import check, warn_of_kept_kv
from megarl.types import ConfigError

RANKS_4 = {"ranks_per_node": 4}
SEPARATE = {"placement": "separate"}
TWO_ENGINES = SEPARATE | {"ranks": 2}


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"evaluation": {"sampling": {"top_p": 0.7, "top_k": 20}}}, id="truncated evaluation"),
        pytest.param({"rollout": {"vllm": {"logprobs_mode": "processed_logprobs"}}}, id="the log-probs that are asked"),
        pytest.param(
            {"loop": "sft", "rollout": {"sampling": {"max_new_tokens": 24, "top_p": 0.7}}},
            id="nothing sampled to train",
        ),
        pytest.param({"rollout": {"quantization": "fp8", "kv_cache_dtype": "fp8"}}, id="fp8"),
        pytest.param(
            {"rollout": {"quantization": "fp8_per_channel", "vllm": {"linear_backend": "Deep-GEMM"}}},
            id="fp8 by channel, moe_backend of no experts",
        ),
    ],
)
def test_the_limits_themselves_are_allowed(recipe: Callable[..., Recipe], changed: dict[str, Any]) -> None:
    assert check(recipe(**changed)).world_size == 1


def test_fp8_is_refused_for_experts_and_families_that_it_is_not_known_for(
    recipe: Callable[..., Recipe], tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"model": {"path": str(tiny_model(family="qwen3_moe", num_layers=2))}}
    vllm = {"moe_backend": "flashinfer_trtllm"}
    with pytest.raises(ConfigError) as caught:
        check(recipe(**experts, rollout={"quantization": "fp8", "vllm": vllm}))
    assert "rollout.vllm.moe_backend = 'flashinfer_trtllm': its kernels store FP8 weights" in str(caught.value)
    assert "set it to auto, triton, batched_triton or deep_gemm" in str(caught.value)
    with pytest.raises(ConfigError, match=r"vLLM has no such experts on a CPU; set rollout.quantization=fp8"):
        check(recipe(**experts, rollout={"quantization": "fp8_per_channel"}))
    monkeypatch.setitem(FAMILIES, "qwen3", dataclasses.replace(FAMILIES["qwen3"], is_quantisable=False))
    with pytest.raises(ConfigError) as caught:
        check(recipe(rollout={"quantization": "fp8"}))
    assert "rollout.quantization = fp8: megarl cannot write FP8 weights of a qwen3 model" in str(caught.value)
    assert "qwen3_moe; set rollout.quantization=none" in str(caught.value)


def test_keys_and_values_that_outlive_their_weights_are_told(recipe: Callable[..., Recipe]) -> None:
    rollout = TWO_ENGINES | {"max_staleness": 1, "recompute_kv": False}
    made = recipe(cluster=RANKS_4, rollout=rollout, algorithm={"importance_sampling": "tis"})
    check(made)
    [told] = warn_of_kept_kv(made)
    assert told.startswith("rollout.recompute_kv = false: requests interrupted by a reshard continue with the old keys")
