"""A policy loss and an advantage of the user's own, by import path, on real ranks: bit-equal to the built-in ones."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.train_command import write_inputs
from tools.runs import run_megarl

pytestmark = pytest.mark.end_to_end

RECIPE = """
name: built_in
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
cluster: {{ranks_per_node: 2}}
trainer: {{tp: 2, max_tokens_per_microbatch: 512}}
optimizer: {{learning_rate: 1e-3}}
rollout: {{tp: 2, kv_cache_gib: 0.02, sampling: {{max_new_tokens: 16}}}}
reward: {{functions: ["digits:digits"]}}
algorithm: {{clip_high: 0.3}}
train: {{steps: 2, prompts_per_step: 4, samples_per_prompt: 4, updates_per_step: 2}}
"""
OWN = """
import torch


def loss(policy_logprobs, old_logprobs, advantages, *, clip_low, clip_high, scale: float = 0.0):
    ratios = (policy_logprobs - old_logprobs.detach()).clamp(-20.0, 20.0).exp()
    bounded = ratios.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -scale * torch.minimum(ratios * advantages, bounded * advantages), {"ratio": ratios.detach()}


def advantage(rewards, groups, *, normalize_by_std):
    assert normalize_by_std
    found = torch.zeros_like(rewards)
    for group in groups.unique():
        own = rewards[groups == group]
        if own.min() < own.max():
            centered = own - own.mean()
            found[groups == group] = centered / ((centered.square().sum() / (len(own) - 1)).sqrt() + 1e-6)
    return found
"""


@pytest.fixture(scope="module")
def train(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("own_functions")
    (folder / "own").mkdir()
    (folder / "own/functions.py").write_text(OWN)
    write_inputs(folder, RECIPE.format(model=tiny_model()), num_problems=32)

    def run(*overrides: str) -> subprocess.CompletedProcess[str]:
        return run_megarl("train", "recipe.yaml", *overrides, folder=folder)

    run.folder = folder  # type: ignore[attr-defined]
    return run


def weights(run: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (run / "hf").glob("*.safetensors")}


@pytest.mark.long
def test_own_functions_train_to_the_same_weights(train: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    folder = train.folder  # type: ignore[attr-defined]
    own = "algorithm.policy_loss=own/functions.py:loss"
    for overrides in (
        (),
        ("name=both", own, "algorithm.policy_loss_kwargs.scale=1.0", "algorithm.advantage=own.functions:advantage"),
        ("name=still", own),
    ):
        done = train(*overrides)
        assert done.returncode == 0, done.stdout + done.stderr
    built_in = weights(folder / "runs/built_in")
    assert built_in and weights(folder / "runs/both") == built_in
    # Its own keyword reaches the loss: at a scale of zero nothing is learned.
    assert weights(folder / "runs/still") != built_in


def test_own_functions_that_do_not_fit_are_refused_before_a_start(
    train: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = train("name=no", "algorithm.policy_loss=own/functions.py:advantage")
    assert done.returncode == 2
    assert "does not take policy_logprobs, old_logprobs, advantages" in done.stderr
    assert not (train.folder / "runs/no").exists()  # type: ignore[attr-defined]
