"""GRPO on a mixture of experts: trained and sampled with experts dealt out, by the experts that the engine chose."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from tests.end_to_end.recorded_metrics import metrics
from tests.end_to_end.train_command import train
from tools.make_dataset import make_dataset

pytestmark = pytest.mark.end_to_end

RECIPE = """
name: experts
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
cluster: {{ranks_per_node: 2}}
trainer:
  {{tp: 2, ep: 2, router_replay: true, offload: [optimizer, gradients, parameters], max_tokens_per_microbatch: 512,
    share_prefixes: auto}}
optimizer: {{learning_rate: 1e-3}}
rollout: {{tp: 2, kv_cache_gib: 0.02, sampling: {{max_new_tokens: 16}}, vllm: {{enable_expert_parallel: true}}}}
reward: {{functions: ["expert_reward:digits"]}}
weights: {{verify_every: 1}}
algorithm: {{dynamic_sampling: [0.0, 1.0], oversampling: 2.0}}
checkpoint: {{every_steps: 1, keep: 2}}
train: {{steps: 2, prompts_per_step: 4, samples_per_prompt: 4}}
"""
REWARD = """
from megarl.types import Reward

def digits(completion_text: str, answer: str, *, correct_score: float) -> Reward:
    share = sum(c.isdigit() for c in completion_text) / max(1, len(completion_text))
    return Reward(score=share, format_valid=True, answer_correct=len(completion_text) % 2 == 0)
"""


def test_experts_are_trained_where_the_engine_sent_its_tokens(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    model = tiny_model(family="qwen3_moe", num_layers=2, num_kv_heads=2)
    make_dataset(tmp_path / "data", sft=8, train=32, heldout=8)
    (tmp_path / "expert_reward.py").write_text(REWARD)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=model))
    train(tmp_path, "recipe.yaml")
    steps = [line for line in metrics(tmp_path / "runs/experts") if "train/loss" in line]
    assert len(steps) == 2 and all(step["train/grad_norm"] > 0 for step in steps)
    assert all(step["logprob_gap/max"] <= 1e-5 for step in steps)
    assert all("time/reshard_verify_seconds" in step for step in steps)
    assert all(step["rollout/routed_experts_bytes"] > 0 for step in steps)
    # The engine read each prompt once, so the samples of a group share its experts.
    assert all(step["perf/stored_tokens"] < 0.8 * step["perf/represented_tokens"] for step in steps)
    run = tmp_path / "runs/experts"
    # Groups wait over the checkpoint, and their experts with the ranks that sampled them.
    kept = {sha256(file.read_bytes()).hexdigest() for file in (run / "hf").glob("*.safetensors")}
    assert list((run / "checkpoints/step_000001").glob("routed_experts_*.safetensors"))
    shutil.rmtree(run / "checkpoints/step_000002")
    shutil.rmtree(run / "hf")
    (run / "status.json").unlink()  # it says that the run is finished
    assert "resuming from" in train(tmp_path, "runs/experts", "--resume")
    resumed = metrics(run)[-1]
    assert resumed["train/loss"] == steps[-1]["train/loss"] and resumed["logprob_gap/max"] <= 1e-5
    assert kept == {sha256(file.read_bytes()).hexdigest() for file in (run / "hf").glob("*.safetensors")}
