"""Two teachers, one for each source, in a layout of their own, on two ranks; and a run that is taken up again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.recorded_metrics import metrics
from tests.end_to_end.train_command import train, write_inputs
from tools.make_dataset import make_dataset

pytestmark = pytest.mark.end_to_end

RECIPE = """
name: whole
loop: distillation
model: {{path: {student}, dtype: float32}}
data: {{max_prompt_tokens: 96}}
mixture:
  sums: {{data: {{train: data/train.jsonl, validation: {{heldout: data/heldout.jsonl}}}}}}
  pairs:
    data: {{train: data/heldout.jsonl}}
    distillation: {{teacher: {other}}}
cluster: {{ranks_per_node: 2}}
trainer: {{tp: 2, max_tokens_per_microbatch: 512, offload: [optimizer, gradients, parameters]}}
optimizer: {{learning_rate: 5e-3}}
rollout: {{tp: 2, kv_cache_gib: 0.02, sampling: {{max_new_tokens: 12}}}}
distillation: {{teacher: {teacher}, tp: 1, loss: full_vocabulary}}
train: {{steps: 5, prompts_per_step: 8, samples_per_prompt: 4, updates_per_step: 2}}
evaluation: {{max_problems: 4}}
checkpoint: {{every_steps: 3, keep: 3}}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("distillation")
    make_dataset(folder / "data", sft=8, train=64, heldout=16)
    wide = {"initializer_range": 0.12, "num_layers": 2}
    recipe = RECIPE.format(
        student=tiny_model(**wide),
        teacher=tiny_model(seed=3, hidden_size=96, tie_word_embeddings=False, **wide),
        other=tiny_model(seed=4, family="llama", **wide),
    )
    (folder / "recipe.yaml").write_text(recipe)
    train(folder, "recipe.yaml")
    return folder / "runs"


def test_the_policy_comes_nearer_to_its_teachers(runs: Path) -> None:
    first, *steps = metrics(runs / "whole")
    assert "val/heldout/accuracy" in first and len(steps) == 5
    divergences = [step["distillation/divergence"] for step in steps]
    assert divergences[0] > 0.3 and divergences[-1] < 0.8 * divergences[0]
    for step in steps:
        assert step["train/loss"] == pytest.approx(step["distillation/divergence"], rel=0.1)
        assert step["logprob_gap/max"] < 1e-3 and step["train/update_skipped"] == 0
        assert {"reward/mean", "environment/sums/share", "train/entropy"} <= step.keys()
    assert "val/heldout/accuracy" in steps[-1]
    assert json.loads((runs / "whole/hf/config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_a_run_taken_up_again_ends_bit_equal(runs: Path) -> None:
    shutil.copytree(runs / "whole", runs / "again")
    for left in ("checkpoints/step_000005", "hf"):
        shutil.rmtree(runs / "again" / left)
    (runs / "again/status.json").unlink()  # it says that the run is finished
    assert "resuming from" in train(runs.parent, "recipe.yaml", "name=again", "--resume")
    timeless = [
        [
            {k: v for k, v in step.items() if not any(group in k for group in ("time/", "perf/", "memory/", "plan/"))}
            for step in metrics(runs / name)
        ]
        for name in ("whole", "again")
    ]
    assert timeless[0] == timeless[1]
    contents = [(runs / name / "hf/model.safetensors").read_bytes() for name in ("whole", "again")]
    assert contents[0] == contents[1]


WITH_REWARDS = """
name: run
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
cluster: {{ranks_per_node: 1}}
trainer: {{max_tokens_per_microbatch: 1024}}
optimizer: {{learning_rate: 1e-3}}
rollout: {{kv_cache_gib: 0.02, sampling: {{max_new_tokens: 12}}}}
reward: {{functions: ["digits:digits"]}}
train: {{steps: 2, prompts_per_step: 4, samples_per_prompt: 4}}
"""


def test_rewards_train_next_to_a_teacher(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """A teacher equal to the policy adds nothing to the first step's advantages, but to the second one's."""
    model = tiny_model(num_layers=2)
    write_inputs(tmp_path, WITH_REWARDS.format(model=model), num_problems=16)
    taught = ["loop=distillation", f"distillation.teacher={model}"]
    rewarded = [*taught, "distillation.use_task_rewards=true", "distillation.kl_coefficient=5"]
    norms = {}
    for name, overrides in {"rl": ["loop=rl"], "teacher": taught, "both": rewarded}.items():
        train(tmp_path, "recipe.yaml", *overrides, f"name={name}")
        norms[name] = [step["train/grad_norm"] for step in metrics(tmp_path / "runs" / name) if step["step"]]
    assert norms["both"][0] == pytest.approx(norms["rl"][0], rel=1e-4) and norms["rl"][0] > 1e-3
    assert norms["teacher"][0] < 1e-3 * norms["rl"][0]
    assert norms["both"][1] != pytest.approx(norms["rl"][1], rel=1e-2)
