"""Runs whose reshards interrupt requests: keys and values computed anew are the new weights', kept ones are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.recorded_metrics import metrics, unknown_metrics
from tests.end_to_end.train_command import train, write_inputs

pytestmark = pytest.mark.end_to_end

RECIPE = """
name: run
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
cluster: {{ranks_per_node: 2}}
trainer: {{max_tokens_per_microbatch: 1024}}
optimizer: {{learning_rate: 1e-2}}
rollout:
  {{placement: separate, ranks: 1, max_staleness: 1, kv_cache_gib: 0.02, recompute_kv: {recompute},
    sampling: {{max_new_tokens: 160}}}}
reward: {{functions: ["digits:digits"]}}
algorithm: {{old_logprobs: trainer, importance_sampling: tis}}
weights: {{verify_every: 1}}
train: {{steps: 5, prompts_per_step: 2, samples_per_prompt: 4}}
"""


@pytest.mark.parametrize("recomputes", [True, False])
def test_the_mismatch_of_interrupted_requests(
    tmp_path: Path, tiny_model: Callable[..., Path], recomputes: bool
) -> None:
    recipe = RECIPE.format(model=tiny_model(num_layers=2), recompute=str(recomputes).lower())
    write_inputs(tmp_path, recipe, num_problems=64)
    said = train(tmp_path, "recipe.yaml")
    steps = [step for step in metrics(tmp_path / "runs/run") if step["step"]]
    assert len(steps) == 5 and max(step["staleness/span/max"] for step in steps) == 1
    assert sum(step["staleness/tokens/age_0"] for step in steps[1:] if "staleness/tokens/age_0" in step) > 0
    gap = max(step["logprob_gap/max"] for step in steps if "logprob_gap/max" in step)
    assert gap <= 1e-5 if recomputes else gap > 1e-4, gap
    assert ("continue with the old keys" in said) is not recomputes
    assert unknown_metrics(tmp_path / "runs/run") == set()
