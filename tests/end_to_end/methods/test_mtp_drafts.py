"""A run whose engines draft tokens with the layer for multi-token prediction that the run trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.recorded_metrics import metrics, unknown_metrics
from tests.end_to_end.train_command import train, write_inputs

pytestmark = pytest.mark.end_to_end

STEPS = 6
RECIPE = """
name: run
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
cluster: {{ranks_per_node: 2}}
trainer: {{tp: 2, max_tokens_per_microbatch: 1024, mtp_loss_coefficient: 1.0}}
optimizer: {{learning_rate: 1e-2}}
rollout:
  {{tp: 2, kv_cache_gib: 0.02, sampling: {{max_new_tokens: 24}},
    vllm: {{speculative_config: {{method: mtp, num_speculative_tokens: 2}}}}}}
reward: {{functions: ["digits:digits"]}}
weights: {{verify_every: 1}}
train: {{steps: {steps}, prompts_per_step: 4, samples_per_prompt: 4}}
"""


@pytest.mark.long
def test_a_run_drafts_with_the_layer_that_it_trains(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    model = tiny_model(family="glm4_moe", num_layers=2, hidden_size=64, head_dim=32, num_mtp_layers=1)
    write_inputs(tmp_path, RECIPE.format(model=model, steps=STEPS), num_problems=64)
    train(tmp_path, "recipe.yaml")
    steps = [step for step in metrics(tmp_path / "runs/run") if step["step"]]
    assert len(steps) == STEPS
    # Accepted drafts are the policy's tokens, so the trainer finds the engine's log-probs for them.
    assert max(step["logprob_gap/max"] for step in steps) <= 2e-5
    assert all(0 <= step["perf/drafts_accepted"] <= 1 for step in steps)
    assert all(1 <= step["perf/accepted_length"] <= 3 for step in steps)
    assert steps[-1]["mtp/loss"] < steps[0]["mtp/loss"] - 0.1
    assert unknown_metrics(tmp_path / "runs/run") == set()
