"""Show each rule of health with a real tiny run that breaks it, and a sound run that breaks none: one line a run.

    python tools/check_health.py [--only stuck --only hacked]

Each run is a few steps of a tiny model with random weights on one CPU rank. Thresholds are the defaults
where a run does not say otherwise. What a run shows is read from its status.json. Exits with 1 where a run does not
show its rules.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

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
"""By name: the rules that a run must break, and its overrides of RECIPE."""
STARTS = {"noise": "hacked"}
"""Runs that begin with another run's model: only a model that is sure of its tokens can fall apart."""


def prepare(folder: Path) -> None:
    """Write recipe, graders, data and the model."""
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "graders.py").write_text(GRADERS, encoding="utf-8")
    sizes = ("--num-layers", "1", "--hidden-size", "64", "--num-heads", "2", "--num-kv-heads", "2")
    for tool, *given in (
        ("make_tiny_model.py", "--out", "model", *sizes),
        ("make_dataset.py", "--out", "data", "--sft", "8", "--train", "64", "--heldout", "16"),
    ):
        command = [sys.executable, str(ROOT / "tools" / tool), *given]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)


def train(folder: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Train one of RUNS, or resume it, with further overrides."""
    command = [sys.executable, "-m", "megarl", "train", "recipe.yaml", f"name={name}", *RUNS[name][1], *overrides]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def broken(folder: Path, name: str) -> list[str]:
    """The rules that a run broke, in order."""
    status = json.loads((folder / "runs" / name / "status.json").read_text(encoding="utf-8"))
    return [finding["rule"] for finding in status.get("health", ())]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=RUNS, help="one of the runs; may be given several times")
    parser.add_argument("--folder", type=Path, help="keep the runs in this new folder")
    options = parser.parse_args(arguments)
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder)
        print(f"{'run':10} {'seconds':>7}  {'shown':5}  rules that warned")
        asked = options.only or list(RUNS)
        for name in [name for name in RUNS if name in asked or name in [STARTS.get(other) for other in asked]]:
            began = time.monotonic()
            done = train(folder, name)
            seconds = time.monotonic() - began
            found = broken(folder, name) if done.returncode == 0 else []
            wanted = RUNS[name][0]
            is_shown = done.returncode == 0 and (set(wanted) <= set(found) if wanted else not found)
            failed |= not is_shown
            print(
                f"{name:10} {seconds:7.1f}  {'yes' if is_shown else 'NO':5}  {', '.join(found) or 'none'}", flush=True
            )
            if done.returncode:
                print(done.stdout + done.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
