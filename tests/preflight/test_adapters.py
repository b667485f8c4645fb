"""Recipes whose engines cannot receive LoRA adapters instead of merged weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import Recipe
from megarl.preflight import check
from megarl.preflight.model import adapters
from megarl.types import ConfigError

ADAPTER = {"rank": 8, "sync": "adapter"}


def test_experts_and_other_families_are_refused(recipe: Callable[..., Recipe], tiny_model: Callable[..., Path]) -> None:
    experts = {"model": {"path": str(tiny_model(family="qwen3_moe", num_layers=2))}}
    with pytest.raises(ConfigError, match=r"down_proj and gate_up_proj in lora.targets are .*lora.targets=\[qkv_pr"):
        check(recipe(**experts, lora=ADAPTER))
    check(recipe(**experts, lora=ADAPTER | {"targets": ["qkv_proj", "o_proj"]}))
    latent = {"model": {"path": str(tiny_model(family="deepseek_v3", num_layers=2))}}
    with pytest.raises(ConfigError, match=r"of a deepseek_v3 model into vLLM, only of llama, mistral, qwen2, qwen3"):
        check(recipe(**latent, lora=ADAPTER | {"targets": ["qkv_proj", "o_proj"]}))


def test_float32_is_refused_on_gpus_only(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe(model={"dtype": "float32"}, lora=ADAPTER)
    check(made)
    monkeypatch.setattr(adapters, "runs_on_cpu", lambda: False)
    with pytest.raises(ConfigError, match=r"lora.sync = adapter: vLLM's kernels .* set model.dtype=bfloat16"):
        check(made)


def test_merged_weights_allow_all_of_it(recipe: Callable[..., Recipe]) -> None:
    check(recipe(lora={"rank": 8}, rollout={"quantization": "fp8"}))
