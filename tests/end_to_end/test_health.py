"""Real runs that break rules of health: each rule warns, none warns in a sound run, and a stuck run can stop.

Each run is a few steps of a tiny model with random weights on one CPU rank. Thresholds are the defaults unless a run
sets its own.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model
from tools.runs import output_end, run_megarl

pytestmark = pytest.mark.end_to_end

STUCK = ["no_gradient", "constant_reward", "truncated", "no_end_of_sequence"]
RECIPE = """
name: run
loop: rl
model: {path: model, dtype: float32}
data: {train: data/train.jsonl, max_prompt_tokens: 96}
cluster: {ranks_per_node: 1}
trainer: {max_tokens_per_microbatch: 1024}
optimizer: {learning_rate: 1e-3}
rollout: {kv_cache_gib: 0.25, sampling: {max_new_tokens: 6}}
reward: {functions: ["graders.py:digits"]}
train: {steps: 4, prompts_per_step: 4, samples_per_prompt: 8}
"""
GRADERS = '''
def nothing(completion_text):
    return 0.0


def digits(completion_text):
    """The share of digits: a model with random weights can learn to write them."""
    return sum(c.isdigit() for c in completion_text) / max(1, len(completion_text))


_calls = 0


def growing(completion_text, num_tokens):
    """A reward whose scale doubles about every step, as a reward without bounds may grow."""
    global _calls
    _calls += 1
    return 2 ** (_calls / 16) * hash_of(completion_text)


def hash_of(completion_text):
    """A number from 0 to 1 that nothing can learn."""
    return sum(completion_text.encode()) % 97 / 97


def words(completion_text):
    """Whether the answer is not digits: what the reward `digits` unteaches."""
    return digits(completion_text) < 0.3
'''

HACKED = (
    "reward.functions=[graders.py:digits, {name: graders.py:words, weight: 0, judges_answer: true}]",
    "data.validation.heldout=data/heldout.jsonl", "evaluation.every_steps=4", "evaluation.max_problems=8",
    "evaluation.sampling.temperature=1.0", "train.steps=24", "optimizer.learning_rate=1e-2",
)  # fmt: skip

RUNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sound": ((), ("rollout.sampling.stop=[e]", "rollout.sampling.max_new_tokens=24")),
    # Few tokens: a random model draws the end of sequence by chance.
    "stuck": (
        tuple(STUCK),
        (
            "reward.functions=[graders.py:nothing]",
            "health.window=2",
            "train.steps=2",
            "train.prompts_per_step=2",
            "train.samples_per_prompt=2",
            "rollout.sampling.max_new_tokens=2",
        ),
    ),
    "hot": (
        ("learning_rate", "entropy_collapsed"),
        ("optimizer.learning_rate=1e-1", "model.dtype=bfloat16", "train.steps=12"),
    ),
    "growing": (
        ("grad_norm_rising",),
        ("reward.functions=[graders.py:growing]", "algorithm.normalize_by_std=false", "train.steps=9"),
    ),
    # A gap of 0.01 nats needs a deeper model than this one: its thresholds are lower.
    "apart": (
        ("mismatch_rising",),
        (
            "model.dtype=bfloat16",
            "optimizer.learning_rate=3e-2",
            "optimizer.warmup_steps=16",
            "train.steps=16",
            "health.logprob_gap_high=0.002",
            "health.logprob_gap_rise=5",
        ),
    ),
    "hacked": (("validation_falling",), HACKED),
    # Only a model that is sure of its tokens can fall apart, so this run begins with the model of the one before.
    "noise": (
        ("entropy_exploding",),
        (
            "model.path=runs/hacked/hf",
            "algorithm.entropy_coefficient=10.0",
            "optimizer.learning_rate=1e-2",
            "train.steps=20",
        ),
    ),
}
"""Rules that a run must break, and its overrides of RECIPE, by name."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recipe, graders, data and the model."""
    folder = tmp_path_factory.mktemp("health")
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "graders.py").write_text(GRADERS, encoding="utf-8")
    make_tiny_model(folder / "model", num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=2)
    make_dataset(folder / "data", sft=8, train=64, heldout=16)
    return folder


def train(folder: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Train one of RUNS, or resume it, with further overrides."""
    return run_megarl("train", "recipe.yaml", f"name={name}", *RUNS[name][1], *overrides, folder=folder)


def broken_rules(folder: Path, name: str) -> list[str]:
    """Return the rules that a run broke, in order."""
    status = json.loads((folder / "runs" / name / "status.json").read_text(encoding="utf-8"))
    return [finding["rule"] for finding in status.get("health", ())]


def warnings(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the rules that warned on a run's screen, in order."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("warning: health, ")]
    return [line.removeprefix("warning: health, ").partition(":")[0] for line in lines]


def test_a_run_that_cannot_learn_stops_and_a_resume_does_not_warn_twice(folder: Path) -> None:
    stopped = train(folder, "stuck", "train.on_unhealthy=stop", "train.steps=3")
    assert stopped.returncode == 79, stopped.stdout + stopped.stderr
    assert "train.on_unhealthy = stop: health, no_gradient: reward/zero_variance_groups is 1 " in stopped.stderr
    assert warnings(stopped) == STUCK and broken_rules(folder, "stuck") == STUCK
    status = json.loads((folder / "runs/stuck/status.json").read_text())
    assert (status["step"], status["exit_code"]) == (2, 79)
    assert (folder / "runs/stuck/checkpoints/step_000002").is_dir()

    resumed = train(folder, "stuck", "train.steps=3", "optimizer.learning_rate=0.5", "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert warnings(resumed) == ["learning_rate"]
    assert broken_rules(folder, "stuck") == [*STUCK, "learning_rate"]


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in RUNS if name != "stuck"])
def test_a_run_breaks_its_rules(folder: Path, name: str) -> None:
    if name == "noise" and not (folder / "runs/hacked/hf").exists():
        train(folder, "hacked")
    done = train(folder, name)
    assert done.returncode == 0, output_end(done)
    expected, broken = RUNS[name][0], broken_rules(folder, name)
    assert set(expected) <= set(broken) if expected else not broken
