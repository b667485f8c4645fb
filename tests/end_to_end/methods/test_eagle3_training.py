"""A run whose engines draft tokens with an EAGLE-3 drafter that the run trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.recorded_metrics import metrics, unknown_metrics
from tests.end_to_end.train_command import train, write_inputs
from tests.models.drafts.eagle3 import make_eagle3

pytestmark = pytest.mark.end_to_end

STEPS = 8
RECIPE = """
name: {name}
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
cluster: {{ranks_per_node: 2}}
trainer: {{tp: 2, max_tokens_per_microbatch: 1024{training}}}
optimizer: {{learning_rate: 5e-3, schedule: constant}}
rollout:
  {{tp: 2, kv_cache_gib: 0.02, sampling: {{max_new_tokens: 24}},
    vllm: {{speculative_config: {{method: eagle3, model: {drafter}, num_speculative_tokens: 2}}}}}}
reward: {{functions: ["digits:digits"]}}
weights: {{verify_every: 1}}
checkpoint: {{every_steps: {half}}}
train: {{steps: {steps}, prompts_per_step: 8, samples_per_prompt: 8}}
"""


TRAINING = ", drafter_learning_rate: 1e-2, drafter_steps: 2"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_drafts_of_a_trained_drafter_are_accepted_more_often(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """A policy that changes is drafted by a drafter that follows it, and by one that stays as it was."""
    model = tiny_model(num_layers=8, num_heads=4, num_kv_heads=2, head_dim=32, initializer_range=0.1)
    drafter = make_eagle3(tmp_path / "drafter", model, draft_vocab_size=300)
    accepted: dict[str, list[float]] = {}
    for name, training in {"trained": TRAINING, "frozen": ""}.items():
        recipe = RECIPE.format(name=name, model=model, drafter=drafter, steps=STEPS, half=STEPS // 2, training=training)
        write_inputs(tmp_path, recipe, num_problems=64)
        train(tmp_path, "recipe.yaml")
        steps = [step for step in metrics(tmp_path / f"runs/{name}") if step["step"]]
        assert len(steps) == STEPS
        # Accepted drafts are the policy's tokens, so the trainer finds the engine's log-probs for them.
        assert max(step["logprob_gap/max"] for step in steps) <= 2e-5
        for metric in ("drafter/loss", "perf/drafts_accepted", "perf/accepted_length"):
            print(name, metric, [round(step.get(metric, 0), 4) for step in steps])
        accepted[name] = [step["perf/drafts_accepted"] for step in steps]
        assert unknown_metrics(tmp_path / f"runs/{name}") == set()
    before, after = np.mean(accepted["trained"][:2]), np.mean(accepted["trained"][-2:])
    assert after > before + 0.05 and after > np.mean(accepted["frozen"][-2:]) + 0.05
    old, new = (read_drafter(folder) for folder in (drafter, tmp_path / "runs/trained/drafter"))
    assert old.keys() == new.keys() and not (tmp_path / "runs/frozen/drafter").exists()
    for name, tensor in new.items():
        assert (name in ("d2t", "t2d")) == torch.equal(tensor, old[name]), name


def read_drafter(folder: Path) -> dict[str, Any]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
