"""Recipes whose engines cannot receive LoRA adapters instead of merged weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import Recipe
from megarl.planner.defaults import memory_defaults, with_memory_defaults
from megarl.preflight import check
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
    monkeypatch.setattr("megarl.planner.gpus_of_run.runs_on_cpu", lambda: False)
    with pytest.raises(ConfigError, match=r"lora.sync = adapter: vLLM's kernels .* set model.dtype=bfloat16"):
        check(made)


def test_merged_weights_allow_all_of_it(recipe: Callable[..., Recipe]) -> None:
    check(recipe(lora={"rank": 8}, rollout={"quantization": "fp8"}))


MOE = {"family": "qwen3_moe", "num_layers": 2}
CHOICES = {
    "dense": ({}, {}, {}, "adapter", ""),
    "attention of experts": (MOE, {"targets": ["qkv_proj", "o_proj"]}, {}, "adapter", ""),
    "experts": (MOE, {}, {}, "merged", "experts in this model"),
    "latent attention": (
        {"family": "deepseek_v3", "num_layers": 2}, {"targets": ["o_proj"]}, {}, "merged", "adapters of a deepseek_v3"
    ),
    "rank": ({}, {"rank": 513}, {}, "merged", "lora.rank = 513"),
    "fp8": ({}, {}, {"rollout": {"quantization": "fp8"}}, "merged", "rollout.quantization = fp8"),
    "a drafter of its own": (
        {}, {}, {"rollout": {"vllm": {"speculative_config": {"method": "eagle3", "model": "m"}}}}, "merged",
        "rollout.vllm.speculative_config",
    ),
    "overlap": (
        {}, {}, {"rollout": {"placement": "separate", "ranks": 1}, "cluster": {"ranks_per_node": 2},
                 "weights": {"overlap": True}},
        "merged", "overlap with training",
    ),
    "exact": ({}, {}, {"trainer": {"exact": True}}, "merged", "trainer.exact"),
    "written": ({}, {"sync": "merged"}, {}, "merged", ""),
}  # fmt: skip
"""Models, LoRA settings and other settings, with what a start chooses and a part of the reason that it prints."""


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.parametrize("is_start", [True, False])
def test_adapters_are_sent_where_the_engine_can_take_them(
    case: str, is_start: bool, recipe: Callable[..., Recipe], tiny_model: Callable[..., Path]
) -> None:
    model, lora, others, sync, reason = CHOICES[case]
    settings = {"model": {"path": str(tiny_model(**model))}} if model else {}
    written = recipe(**settings, **others, lora={"rank": 8} | lora)
    chosen = with_memory_defaults(written, is_start=is_start)
    assert (chosen.lora.sync, chosen.sends_adapter) == (sync, sync == "adapter")
    lines = [line for line in memory_defaults(written, chosen) if line.startswith("lora.sync")]
    assert len(lines) == bool(reason)
    assert all(line.startswith("lora.sync = merged by default: ") and reason in line for line in lines)
    # The choice is final: a resume, which reads the chosen value, prints no reason again.
    assert with_memory_defaults(chosen, is_start=is_start).lora == chosen.lora
    assert not [line for line in memory_defaults(chosen, chosen) if line.startswith("lora.sync")]


def test_engines_of_an_evaluation_and_runs_without_adapters_need_no_slots(recipe: Callable[..., Recipe]) -> None:
    assert not with_memory_defaults(recipe(lora={"rank": 8}), is_trained=False).sends_adapter
    assert with_memory_defaults(recipe(), is_start=True).lora.sync == "auto"
