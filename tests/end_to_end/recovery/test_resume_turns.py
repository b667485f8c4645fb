"""A killed run of two environments, one of two turns with truncated sampling, ends as one that was left alone."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from megarl.rollout.state import ARRAYS, STATE, TIMES
from tests.forked_command import MEGARL
from tests.logged_steps import logged_steps
from tools.make_dataset import make_dataset

pytestmark = pytest.mark.end_to_end

ROOT = Path(__file__).resolve().parents[3]
STEPS = 4
RECIPE = """
name: whole
runs_folder: {folder}/runs
loop: rl
model: {{path: {model}, dtype: float32}}
data: {{max_prompt_tokens: 96}}
mixture:
  sums:
    data: {{train: {folder}/data/train.jsonl}}
  games:
    data: {{train: "environment:64"}}
    rollout: {{environment: "{folder}/game.py:Twice", max_turns: 2, truncated_turn: close,
      sampling: {{max_new_tokens: 12, temperature: 1.5, top_p: 0.9}}}}
cluster: {{ranks_per_node: 1}}
trainer: {{max_tokens_per_microbatch: 512}}
optimizer: {{learning_rate: 2e-3}}
rollout: {{kv_cache_gib: 0.05, sampling: {{max_new_tokens: 12}}}}
reward: {{functions: ["{folder}/game.py:judge"]}}
algorithm: {{dynamic_sampling: [0.0, 1.0], oversampling: 2.0}}
train: {{steps: {steps}, prompts_per_step: 4, samples_per_prompt: 4}}
checkpoint: {{every_steps: 1, keep: 2}}
"""
# What counts as right is as good as drawn by lot, so that some groups are left out and others wait.
GAME = """
from megarl.environments import Start, Step
from megarl.types import Reward


def share_of_digits(text):
    return sum(c.isdigit() for c in text) / max(1, len(text))


def judge(completion_text):
    return Reward(share_of_digits(completion_text), True, len(completion_text) % 2 == 0)


class Twice:
    makes_problems = True

    async def reset(self, problem, seed):
        return Start(({"role": "user", "content": f"Problem {problem.index}: digits."},))

    async def step(self, turn):
        reward, is_right = share_of_digits(turn.text), len(turn.text) % 2 == 0
        if turn.number:
            return Step(reward=reward, done=True, answer_correct=is_right)
        return Step(({"role": "user", "content": f"{len(turn.text)} letters. More."},), reward=reward)

    async def close(self):
        pass
"""


@pytest.mark.long
def test_turns_and_truncated_sampling_of_a_mixture_go_on_bit_equal_after_a_kill(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    make_dataset(tmp_path / "data", sft=8, train=64, heldout=8)
    (tmp_path / "game.py").write_text(GAME)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path, model=tiny_model(num_layers=2), steps=STEPS))
    whole, killed = tmp_path / "runs/whole", tmp_path / "runs/killed"
    train(recipe)
    with started(recipe, "name=killed") as driver:
        try:
            while not (killed / "checkpoints/step_000001").is_dir():
                assert driver.poll() is None, driver.communicate()
                time.sleep(0.01)
        finally:
            driver.kill()
        driver.communicate(timeout=600)
        assert driver.returncode == -signal.SIGKILL
    newest = max((killed / "checkpoints").glob("step_??????"))
    waiting = [one for one in json.loads((newest / STATE).read_text())["waiting"] if one["source"] == "games"]
    assert waiting and all(len(one["texts"]) == 2 for one in waiting)
    assert any("kept_sets" in name for name in load_file(newest / ARRAYS))
    train(killed, "--resume")
    status = json.loads((killed / "status.json").read_text())
    assert status["resumed_step"] == int(newest.name.removeprefix("step_")) < STEPS

    assert (killed / "hf/model.safetensors").read_bytes() == (whole / "hf/model.safetensors").read_bytes()
    last = f"checkpoints/step_{STEPS:06d}/manifest.json"
    files = [json.loads((run / last).read_text())["files"] for run in (killed, whole)]
    # These name the run and the moment.
    for name in files[0].keys() - {"driver.json", ".metadata", TIMES}:
        assert files[0][name] == files[1][name], name
    steps = [list(map(untimed, logged_steps(run))) for run in (killed, whole)]
    assert steps[0] == steps[1]
    for step in steps[0][1:]:
        assert step["logprob_gap/max"] <= 1e-5 and step["rollout/candidates_left/mean"] > 1
        assert step["environment/games/turns/mean"] == 2 and step["environment/games/observed_tokens/mean"] > 10
        assert step["environment/sums/turns/mean"] == 1 and step["environment/sums/observed_tokens/max"] == 0
    assert len({step["train/loss"] for step in steps[0][1:]}) == STEPS, "nothing was trained"
    samples = [{path.name: path.read_bytes() for path in (run / "samples").iterdir()} for run in (killed, whole)]
    assert samples[0] == samples[1]

    # What the environment asked, and what it said to each turn.
    shown = [one for name in samples[0] for one in lines(whole / "samples" / name) if one["source"] == "games"]
    assert shown
    for one in shown:
        assert one["prompt"] == [{"role": "user", "content": f"Problem {one['problem']}: digits."}]
        first, second = one["turns"]
        hint = f"{len(first['completion'])} letters. More."
        assert first["observation"] == [{"role": "user", "content": hint}] and not second["observation"]
        assert one["reward"] == first["reward"] + second["reward"]


def started(recipe_or_run: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*MEGARL, "train", str(recipe_or_run), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(recipe_or_run: Path, *arguments: str) -> None:
    with started(recipe_or_run, *arguments) as driver:
        output, _ = driver.communicate(timeout=1200)
    assert driver.returncode == 0, output


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def untimed(step: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in step.items()
        if not any(group in name for group in ("time/", "perf/", "memory/", "plan/"))
    }
