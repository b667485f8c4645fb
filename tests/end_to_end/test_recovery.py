"""A trainer rank that is killed, and a run that is resized: processes continue, and training as if nothing happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from tests.child_processes import is_alive, rank_processes
from tests.end_to_end.recorded_metrics import unknown_metrics
from tests.end_to_end.train_command import train
from tests.forked_command import MEGARL

pytestmark = pytest.mark.end_to_end

STEPS = 10
RECIPE = f"""
name: run
loop: rl
model: {{path: MODEL, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
trainer: {{max_tokens_per_microbatch: 1024}}
optimizer: {{learning_rate: 1e-3}}
rollout: {{kv_cache_gib: 0.25, sampling: {{max_new_tokens: 24}}}}
reward: {{functions: ["own:share_of_digits"]}}
algorithm: {{old_logprobs: trainer}}
weights: {{verify_every: 0}}
train: {{steps: {STEPS}, prompts_per_step: 4, samples_per_prompt: 4}}
"""
REWARD = """
import os
import time

from megarl.types import Reward


def share_of_digits(completion_text, answer, correct_score):
    # The test holds the run in the middle of a step while it acts.
    while os.path.exists("hold"):
        time.sleep(0.02)
    return Reward(sum(c.isdigit() for c in completion_text) / max(1, len(completion_text)), True, False)
"""
PATIENCE_SECONDS = 300.0


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Callable[..., Path], tool: Callable[[str], ModuleType]) -> Path:
    tool("make_dataset").make_dataset(tmp_path / "data", sft=8, train=64, heldout=8)
    (tmp_path / "own.py").write_text(REWARD)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("MODEL", str(tiny_model(num_layers=2))))
    return tmp_path


def steps_of(folder: Path, name: str) -> list[dict[str, float]]:
    file = folder / f"runs/{name}/metrics.jsonl"
    # The driver may be writing the last line at this moment.
    lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return [line for line in map(json.loads, lines) if line["step"]]


def wait_for(driver: subprocess.Popen[str], folder: Path, is_reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_reached():
        assert driver.poll() is None, (folder / "screen").read_text()
        assert time.monotonic() < deadline, (folder / "screen").read_text()
        time.sleep(0.02)


def resize(folder: Path, *sizes: str) -> None:
    command = [*MEGARL, "resize", "runs/run", *sizes]
    subprocess.run(command, cwd=folder, check=True, timeout=PATIENCE_SECONDS)


@contextmanager
def held(driver: subprocess.Popen[str], folder: Path, after: int) -> Iterator[None]:
    """Context: the run waits in the middle of a step, after at least so many complete ones."""
    wait_for(driver, folder, lambda: len(steps_of(folder, "run")) >= after)
    (folder / "hold").touch()
    yield
    (folder / "hold").unlink()


def test_a_run_survives_a_killed_rank_and_changes_its_layout_twice(folder: Path) -> None:
    train(folder, "recipe.yaml", "name=calm")
    with (folder / "screen").open("w") as screen:
        driver = subprocess.Popen(
            [*MEGARL, "train", "recipe.yaml", "cluster.ranks_per_node=2",
             "cluster.recover=restart", "checkpoint.replicate=1"],
            cwd=folder, stdout=screen, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    with held(driver, folder, after=1):
        first = rank_processes(driver.pid)
        os.kill(first[1], signal.SIGKILL)
        killed_after = len(steps_of(folder, "run"))
    with held(driver, folder, after=killed_after + 1):
        second = rank_processes(driver.pid)
        assert second[0] == first[0] and second[1] != first[1]
        resize(folder, "cluster.ranks_per_node=1")
        shrunk_after = len(steps_of(folder, "run"))
    # A resize follows the step in progress.
    with held(driver, folder, after=shrunk_after + 2):
        assert rank_processes(driver.pid) == {0: first[0]}
        resize(folder, "cluster.ranks_per_node=2", "trainer.tp=2", "rollout.tp=2")
    assert driver.wait(PATIENCE_SECONDS) == 0, (folder / "screen").read_text()

    calm, steps = steps_of(folder, "calm"), steps_of(folder, "run")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for expected, found in zip(calm, steps, strict=True):
        for name in ("reward/mean", "train/loss", "train/grad_norm", "train/entropy", "rollout/sampled_tokens"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (found["step"], name)
    recovered = [step for step in steps if "fault/recovery_seconds" in step]
    assert [step["fault/recoveries"] for step in recovered] == [1.0, 1.0, 1.0]
    # The new process of the killed rank received that rank's state from the other one.
    assert recovered[0]["fault/restored_bytes"] > 0
    assert not unknown_metrics(folder / "runs/run")
    assert not any(is_alive(process) for process in (*first.values(), *second.values()))
    status = json.loads((folder / "runs/run/status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, STEPS)
