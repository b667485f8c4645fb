"""A trainer rank that is killed, and a run that is resized: processes continue, and training as if nothing happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.child_processes import is_alive
from tests.end_to_end.recorded_metrics import unknown_metrics
from tests.end_to_end.train_command import train
from tests.forked_command import MEGARL
from tests.held_run import PATIENCE_SECONDS, REWARD, HeldRun, assert_trained_alike, steps_of
from tools.make_dataset import make_dataset

pytestmark = pytest.mark.end_to_end

STEPS = 10
RECIPE = f"""
name: run
loop: rl
model: {{path: MODEL, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
trainer: {{max_tokens_per_microbatch: 1024}}
optimizer: {{learning_rate: 1e-3}}
rollout: {{kv_cache_gib: 0.02, sampling: {{max_new_tokens: 24}}}}
reward: {{functions: ["own:share_of_digits"]}}
algorithm: {{old_logprobs: trainer}}
weights: {{verify_every: 0}}
train: {{steps: {STEPS}, prompts_per_step: 4, samples_per_prompt: 4}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Path:
    """A folder with a recipe, and its run `calm` on one rank."""
    folder = tmp_path_factory.mktemp("recovery")
    make_dataset(folder / "data", sft=8, train=64, heldout=8)
    (folder / "own.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE.replace("MODEL", str(tiny_model(num_layers=2))))
    train(folder, "recipe.yaml", "name=calm")
    return folder


def resize(run: HeldRun, *sizes: str) -> None:
    command = [*MEGARL, "resize", str(run.path), *sizes]
    subprocess.run(command, cwd=run.path.parents[1], check=True, timeout=PATIENCE_SECONDS)


def recoveries_of_a_run_like_the_calm_one(folder: Path, run: HeldRun) -> list[dict[str, float]]:
    """Assert that a run has trained all steps as the calm one did. Returns its steps after a loss or a resize."""
    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert_trained_alike(steps_of(folder / "runs/calm"), steps)
    return [step for step in steps if "fault/recovery_seconds" in step]


def test_a_run_survives_a_killed_rank_and_changes_its_layout_twice(folder: Path) -> None:
    options = ("cluster.ranks_per_node=2", "cluster.recover=restart", "checkpoint.replicate=1")
    run = HeldRun(folder, "run", "recipe.yaml", *options)
    # After one step its copy may still be on its way; without a complete copy the run would begin again.
    with run.held(after=2):
        first = run.ranks()
        os.kill(first[1], signal.SIGKILL)
        killed_after = len(run.steps())
    with run.held(after=killed_after + 1):
        second = run.ranks()
        assert sorted(second) == [0, 1] and not {*first.values()} & {*second.values()}
        resize(run, "cluster.ranks_per_node=1")
        shrunk_after = len(run.steps())
    # A resize follows the step in progress.
    with run.held(after=shrunk_after + 2):
        third = run.ranks()
        assert sorted(third) == [0]
        resize(run, "cluster.ranks_per_node=2", "trainer.tp=2", "rollout.tp=2")
    run.finish()
    recovered = recoveries_of_a_run_like_the_calm_one(folder, run)
    assert [step["fault/recoveries"] for step in recovered] == [1.0, 1.0, 1.0]
    # All ranks read the copies in the memory of their node.
    assert [step["fault/restored_bytes"] for step in recovered] == [0.0] * 3
    assert not unknown_metrics(run.path)
    assert not any(is_alive(process) for ranks in (first, second, third) for process in ranks.values())
    status = json.loads((run.path / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, STEPS)


def test_separate_engines_start_again_with_a_trainer_of_other_sizes(folder: Path) -> None:
    separate = ("cluster.ranks_per_node=3", "rollout.placement=separate", "rollout.ranks=1")
    run = HeldRun(folder, "separate", "recipe.yaml", *separate, "cluster.recover=shrink", "checkpoint.replicate=1")
    with run.held(after=1):
        first = run.ranks()
        os.kill(first[1], signal.SIGKILL)
        killed_after = len(run.steps())
    with run.held(after=killed_after + 1):
        # One trainer is left. The engine's rank counts on from the trainers'.
        shrunk = run.ranks()
        assert sorted(shrunk) == [0, 1]
        resize(run, "cluster.ranks_per_node=4", "trainer.tp=2", "rollout.ranks=2")
        resized_after = len(run.steps())
    with run.held(after=resized_after + 2):
        grown = run.ranks()
        assert sorted(grown) == [0, 1, 2, 3]
        # A whole replica of two ranks takes the place of the two.
        resize(run, "cluster.ranks_per_node=3", "trainer.tp=1", "rollout.tp=2")
        changed_after = len(run.steps())
    with run.held(after=changed_after + 2):
        last = run.ranks()
        assert sorted(last) == [0, 1, 2]
    run.finish()
    recovered = recoveries_of_a_run_like_the_calm_one(folder, run)
    assert [step["fault/recoveries"] for step in recovered] == [1.0, 1.0, 1.0]
    assert not any(is_alive(process) for one in (first, shrunk, grown, last) for process in one.values())
