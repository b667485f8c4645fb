"""A separate engine that is killed, one that falls silent: others take over, it is started again, nothing is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.child_processes import is_alive, rank_processes
from tests.end_to_end.recorded_metrics import unknown_metrics
from tests.forked_command import MEGARL
from tests.logged_steps import logged_steps
from tools.make_dataset import make_dataset

pytestmark = pytest.mark.end_to_end

RECIPE = """
name: run
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{train: data/train.jsonl, max_prompt_tokens: 96}}
cluster: {{ranks_per_node: 3, verb_timeout_seconds: 5}}
trainer: {{max_tokens_per_microbatch: 1024}}
optimizer: {{learning_rate: 1e-3}}
rollout: {{placement: separate, ranks: 2, kv_cache_gib: 0.02, sampling: {{max_new_tokens: 48}}}}
reward: {{functions: ["held:share_of_digits"]}}
algorithm: {{old_logprobs: trainer}}
# Only transfers that create a new group are verified.
weights: {{verify_every: 0}}
train: {{steps: 400, prompts_per_step: 4, samples_per_prompt: 4}}
"""
STEPS_OF_EPOCH = 16
REWARD = """
import os
import time

from megarl.types import Reward


def share_of_digits(completion_text, answer, correct_score):
    time.sleep(0.0 if os.path.exists("fast") else 0.02)
    return Reward(sum(c.isdigit() for c in completion_text) / max(1, len(completion_text)), True, False)
"""
PATIENCE_SECONDS = 200.0
"""Maximum seconds of one wait. Shorter than the test's own time limit, so that a failure shows the run's screen."""
BUSY_SECONDS = 10.0
"""Seconds that other processes of the machine may add to a start, which takes less than a second here."""


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Callable[..., Path]) -> Path:
    make_dataset(tmp_path / "data", sft=8, train=64, heldout=8)
    (tmp_path / "held.py").write_text(REWARD)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=tiny_model(num_layers=2)))
    return tmp_path


def start(folder: Path) -> subprocess.Popen[str]:
    with (folder / "screen").open("w") as screen:
        return subprocess.Popen(
            [*MEGARL, "train", "recipe.yaml"],
            cwd=folder,
            stdout=screen,
            stderr=subprocess.STDOUT,
            text=True,
        )


def until(driver: subprocess.Popen[str], folder: Path, is_reached: Callable[[], object]) -> float:
    """Wait for an event; returns for how long, in seconds."""
    began = time.monotonic()
    while not is_reached():
        assert driver.poll() is None, (folder / "screen").read_text()
        assert time.monotonic() - began < PATIENCE_SECONDS, (folder / "screen").read_text()
        time.sleep(0.02)
    return time.monotonic() - began


def step_of(folder: Path) -> int:
    file = folder / "runs/run/metrics.jsonl"
    # The driver may be writing the last line at this moment.
    lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def steps_of(folder: Path) -> list[dict[str, float]]:
    """The lines of all steps, without that of the evaluation before them."""
    return [step for step in logged_steps(folder / "runs/run") if step["step"]]


def logged(folder: Path, text: str) -> list[str]:
    """Return the text that matches in the run's output, or its first group."""
    return re.findall(text, re.sub(r"\s+", " ", (folder / "screen").read_text()))


def start_seconds(folder: Path) -> float:
    """Return the seconds that the run's own ranks took to start, with their models and engines."""
    lines = map(json.loads, (folder / "runs/run/metrics.jsonl").read_text().splitlines())
    return next(line["time/start_seconds"] for line in lines if "time/start_seconds" in line)


def check_that_nothing_is_lost_or_doubled(folder: Path, steps: list[dict[str, float]]) -> None:
    """Each problem of an epoch has its four samples once, and all tokens that were counted are in them."""
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    drawn: Counter[tuple[int, int]] = Counter()
    for number, step in enumerate(steps):
        text = (folder / f"runs/run/samples/step_{number + 1:06d}.jsonl").read_text()
        samples = [json.loads(line) for line in text.splitlines()]
        assert sorted(Counter(sample["problem"] for sample in samples).values()) == [4] * 4
        drawn.update((number // STEPS_OF_EPOCH, sample["problem"]) for sample in samples)
        assert sum(sample["tokens"] for sample in samples) == step["rollout/sampled_tokens"]
    assert set(drawn.values()) == {4} and len(drawn) == 4 * len(steps)


def is_back(folder: Path, last_step: int) -> bool:
    """Whether both engines sample after a reshard that compared their weights with the trainer's.

    `last_step` was the last one with a line when the loss was logged: the reshard of the next may have been before it.
    """
    return any(
        step["rollout/replicas"] == 2 and step.get("time/reshard_verify_seconds", 0.0) > 0
        for step in steps_of(folder)
        if step["step"] > last_step
    )


def check_that_a_return_is_verified(steps: list[dict[str, float]]) -> None:
    """The reshard with which a replica came back compared the engines' weights with the trainer's."""
    back = [step for before, step in pairwise(steps) if step["rollout/replicas"] > before["rollout/replicas"]]
    # Who is back before the step's reshard has been missed in no step.
    assert all(step.get("time/reshard_verify_seconds", 0.0) > 0 for step in back)


def test_the_run_goes_on_and_the_engine_comes_back(folder: Path) -> None:
    driver = start(folder)
    try:
        until(driver, folder, lambda: step_of(folder) >= 3)
        ranks = rank_processes(driver.pid)
        assert sorted(ranks) == [0, 1, 2]
        os.kill(ranks[1], signal.SIGKILL)
        back = until(driver, folder, lambda: logged(folder, "the engine of rank 1 is lost"))
        last_step = step_of(folder)
        assert back < 2.0 + BUSY_SECONDS
        assert logged(folder, "was killed by SIGKILL")
        back += until(driver, folder, lambda: logged(folder, "the engine of rank 1 has started again"))
        back += until(driver, folder, lambda: is_back(folder, last_step))
        again = rank_processes(driver.pid)
        assert again[1] != ranks[1] and again[0] == ranks[0] and again[2] == ranks[2]

        os.kill(again[2], signal.SIGSTOP)
        until(driver, folder, lambda: logged(folder, "the engine of rank 2 is lost"))
        last_step = step_of(folder)
        # Mostly `advance`; or it was stopped in what comes between two of them.
        assert logged(folder, "did not (?:answer `|come to )")
        assert not is_alive(again[2])
        until(driver, folder, lambda: is_back(folder, last_step))
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(PATIENCE_SECONDS) == 75, (folder / "screen").read_text()
    finally:
        driver.kill()
        driver.wait()
    returns = [float(seconds) for seconds in logged(folder, r"has started again in ([\d.]+) s")]
    assert len(returns) == 2 and max(back, *returns) <= 2 * start_seconds(folder) + BUSY_SECONDS, (back, returns)
    steps = steps_of(folder)
    assert steps[0]["rollout/replicas"] == steps[-1]["rollout/replicas"] == 2
    # Who is lost in another call has no requests.
    if logged(folder, "(?:during|answer) `advance`"):
        assert sum(step["rollout/lost_requests"] for step in steps) > 0
    assert all(step["logprob_gap/max"] <= 1e-5 for step in steps)
    check_that_nothing_is_lost_or_doubled(folder, steps)
    check_that_a_return_is_verified(steps)
    assert unknown_metrics(folder / "runs/run") == set()


def test_without_any_engine_the_run_ends(folder: Path) -> None:
    driver = start(folder)
    try:
        until(driver, folder, lambda: step_of(folder) >= 1)
        ranks = rank_processes(driver.pid)
        for rank in (1, 2):
            os.kill(ranks[rank], signal.SIGKILL)
        assert driver.wait(PATIENCE_SECONDS) == 76, (folder / "screen").read_text()
    finally:
        driver.kill()
        driver.wait()
    assert not any(map(is_alive, ranks.values()))
    assert json.loads((folder / "runs/run/status.json").read_text())["exit_code"] == 76
