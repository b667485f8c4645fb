"""Each rule of health warns in a real tiny run that breaks it, and no rule warns in a sound run.

Each run is a few steps of a tiny model with random weights on one CPU rank. Thresholds are the defaults unless a run
sets its own. The rules that warned are read from the run's status.json. A row per run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model
from tools.runs import output_end, run_megarl

DURATION = {"small": "15 s (the run `stuck`)", "full": "minutes: seven runs of 2 to 24 steps (not timed)"}
SMALL = {"only": ["stuck"]}
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
        ("no_gradient", "constant_reward", "truncated", "no_end_of_sequence"),
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
STARTS = {"noise": "hacked"}
"""Runs that begin with another run's model: only a model that is sure of its tokens can fall apart."""


def make_inputs(folder: Path) -> None:
    """Write recipe, graders, data and the model."""
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "graders.py").write_text(GRADERS, encoding="utf-8")
    make_tiny_model(folder / "model", num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=2)
    make_dataset(folder / "data", sft=8, train=64, heldout=16)


def train(folder: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Train one of RUNS, or resume it, with further overrides."""
    return run_megarl("train", "recipe.yaml", f"name={name}", *RUNS[name][1], *overrides, folder=folder)


def broken_rules(folder: Path, name: str) -> list[str]:
    """Return the rules that a run broke, in order."""
    status = json.loads((folder / "runs" / name / "status.json").read_text(encoding="utf-8"))
    return [finding["rule"] for finding in status.get("health", ())]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=RUNS, help="one of the runs; may be given several times")
    parser.add_argument("--folder", type=Path, help="keep the runs in this new folder")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        make_inputs(folder)
        asked = options.only or list(RUNS)
        for name in [name for name in RUNS if name in asked or name in [STARTS.get(other) for other in asked]]:
            started = time.monotonic()
            done = train(folder, name)
            seconds = time.monotonic() - started
            expected, found = RUNS[name][0], broken_rules(folder, name) if done.returncode == 0 else []
            met = done.returncode == 0 and (set(expected) <= set(found) if expected else not found)
            warned = output_end(done) if done.returncode else ", ".join(found) or "none"
            yield {"run": name, "seconds": seconds, "warned": warned, "met": met}
