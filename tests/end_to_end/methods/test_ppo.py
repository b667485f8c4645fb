"""A reward model from pairs, then PPO on its scores with a critic that starts from it; and taken up again half-way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.recorded_metrics import metrics, unknown_metrics
from tests.end_to_end.train_command import train
from tools.make_dataset import make_dataset

pytestmark = pytest.mark.end_to_end

PAIRS = """
name: reward
loop: reward_model
model: {{path: {model}, dtype: float32}}
data: {{train: data/pairs.jsonl, validation: {{heldout: data/heldout_pairs.jsonl}}}}
cluster: {{ranks_per_node: 2}}
trainer: {{tp: 2, max_tokens_per_microbatch: 512}}
optimizer: {{learning_rate: 2e-3}}
train: {{steps: 8, prompts_per_step: 16}}
"""
PPO = """
name: whole
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, validation: {{heldout: data/heldout.jsonl}}, ptx: data/sft.jsonl,
  max_prompt_tokens: 96}}
cluster: {{ranks_per_node: 2}}
trainer: {{tp: 2, max_tokens_per_microbatch: 512, offload: [optimizer, gradients, parameters]}}
optimizer: {{learning_rate: 2e-3}}
critic: {{path: runs/reward/hf, optimizer: {{learning_rate: 3e-3}}, warmup_steps: 1, updates_per_step: 2}}
rollout: {{tp: 2, kv_cache_gib: 0.02, sampling: {{max_new_tokens: 12}}}}
reward: {{model: runs/reward/hf, model_weight: 2.0, model_clip: 5.0}}
algorithm: {{preset: ppo, ptx_coefficient: 0.2, ptx_conversations: 6}}
train: {{steps: 5, prompts_per_step: 4, samples_per_prompt: 4, updates_per_step: 2}}
evaluation: {{max_problems: 4}}
checkpoint: {{every_steps: 3, keep: 3}}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("ppo")
    make_dataset(folder / "data", sft=16, train=64, heldout=16)
    for name, text in (("pairs", PAIRS), ("ppo", PPO)):
        (folder / f"{name}.yaml").write_text(text.format(model=tiny_model()))
    train(folder, "pairs.yaml")
    train(folder, "ppo.yaml")
    return folder / "runs"


@pytest.mark.long
def test_a_reward_model_is_learned(runs: Path) -> None:
    first, *steps = metrics(runs / "reward")
    # A new head scores everything alike.
    assert first["val/heldout/accuracy"] == 0.5 and steps[0]["train/loss"] == pytest.approx(0.6931472, abs=1e-5)
    assert steps[-1]["train/loss"] < 0.6 and steps[-1]["val/heldout/accuracy"] > 0.6
    config = json.loads((runs / "reward/hf/config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"] and config["id2label"] == {"0": "LABEL_0"}


def test_a_critic_learns_beside_the_policy(runs: Path) -> None:
    first, *steps = metrics(runs / "whole")
    assert "val/heldout/accuracy" in first and len(steps) == 5
    for step in steps:
        assert {"critic/loss", "critic/grad_norm", "critic/explained", "reward/model", "kl/reference"} <= step.keys()
        # No answer of random weights is right: all reward is the model's, twice.
        assert step["reward/mean"] == pytest.approx(2 * step["reward/model"], abs=1e-5) and step["reward/std"] > 0
    assert "train/loss" not in steps[0] and steps[0]["kl/reference"] == pytest.approx(0, abs=1e-5)
    assert all("train/ptx_loss" in step for step in steps[1:])
    assert steps[-1]["kl/reference"] != 0 and steps[-1]["train/ptx_loss"] < steps[1]["train/ptx_loss"]
    assert steps[-1]["critic/loss"] < steps[0]["critic/loss"]
    critic = json.loads((runs / "whole/hf_critic/config.json").read_text())
    assert critic["architectures"] == ["Qwen3ForSequenceClassification"]
    assert json.loads((runs / "whole/hf/config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_every_metric_is_in_the_table(runs: Path) -> None:
    for name in ("reward", "whole"):
        assert unknown_metrics(runs / name) == set()


def test_a_run_taken_up_again_ends_bit_equal(runs: Path) -> None:
    shutil.copytree(runs / "whole", runs / "again")
    for left in ("checkpoints/step_000005", "hf", "hf_critic"):
        shutil.rmtree(runs / "again" / left)
    (runs / "again/status.json").unlink()  # it says that the run is finished
    assert "resuming from" in train(runs.parent, "ppo.yaml", "name=again", "--resume")
    timeless = [
        [
            {k: v for k, v in step.items() if not k.startswith(("time/", "perf/", "memory/", "plan/"))}
            for step in metrics(runs / name)
        ]
        for name in ("whole", "again")
    ]
    assert timeless[0] == timeless[1]
    for model in ("hf", "hf_critic"):
        contents = [(runs / name / model / "model.safetensors").read_bytes() for name in ("whole", "again")]
        assert contents[0] == contents[1], model
