"""Runs whose engines keep the base weights and receive a LoRA adapter: log-probs, metrics and bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.families.shape import read_model_shape
from megarl.reshard.layouts.vllm_adapters import VllmAdapterLayouts
from megarl.reshard.layouts.vllm_computed import VllmLayouts
from tests.end_to_end.recorded_metrics import metrics, unknown_metrics
from tests.end_to_end.train_command import train, write_inputs

pytestmark = pytest.mark.end_to_end

RECIPE = """
name: run
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, validation: {{heldout: data/heldout.jsonl}}, max_prompt_tokens: 96}}
cluster: {{ranks_per_node: {ranks}}}
trainer: {{max_tokens_per_microbatch: 1024, tp: {tp}}}
lora: {{rank: 4, alpha: 8, sync: adapter}}
optimizer: {{learning_rate: 1e-2}}
rollout: {{{placement}, kv_cache_gib: 0.02, sampling: {{max_new_tokens: 24}}}}
algorithm: {{old_logprobs: trainer, importance_sampling: tis}}
reward: {{functions: ["digits:digits"]}}
weights: {{verify_every: 1}}
train: {{steps: 4, prompts_per_step: 4, samples_per_prompt: 4}}
"""
SEPARATE = "placement: separate, ranks: 1, max_staleness: 0"


@pytest.mark.parametrize(
    ("placement", "ranks", "tp"),
    [pytest.param("tp: 1", 2, 2, id="colocated"), pytest.param(SEPARATE, 2, 1, id="apart")],
)
def test_an_engine_with_an_adapter_samples_from_the_trained_policy(
    placement: str,
    ranks: int,
    tp: int,
    tmp_path: Path,
    tiny_model: Callable[..., Path],
) -> None:
    model = tiny_model(num_layers=2, num_kv_heads=2)
    recipe = RECIPE.format(model=model, placement=placement, ranks=ranks, tp=tp)
    write_inputs(tmp_path, recipe, num_problems=64)
    train(tmp_path, "recipe.yaml")
    steps = [step for step in metrics(tmp_path / "runs/run") if step["step"]]
    assert len(steps) == 4
    assert max(step["logprob_gap/max"] for step in steps) <= 1e-5
    # The adapter learns, so a copy not sent would show in the next step's mismatch.
    assert min(step["train/grad_norm"] for step in steps) > 0
    num_engines = 1 if "separate" in placement else 2
    engines = VllmAdapterLayouts(
        VllmLayouts(read_model_shape(model), 1, num_engines), ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), 4
    )
    floor = sum(engines.adapter_bytes_on(rank, 4) for rank in range(num_engines))
    for step in steps:
        assert step["reshard/local_bytes"] + step["reshard/received_bytes"] == floor
        assert step["time/reshard_verify_seconds"] > 0
    assert (tmp_path / "runs/run/adapter/adapter_model.safetensors").is_file()
    assert unknown_metrics(tmp_path / "runs/run") == set()
