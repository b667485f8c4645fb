"""Run folders as runs leave them, made by formulas: metrics, samples, tokens, attempts."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.algorithms.estimates import mean_with_interval

RECIPE = """name: {name}
loop: {loop}
seed: {seed}
model:
  path: models/tiny
train:
  steps: {steps}
  prompts_per_step: 16
optimizer:
  learning_rate: {rate}
algorithm:
  advantage: {advantage}
"""


def row(step: int, steps: int, chance: random.Random, slope: float) -> dict[str, float | None]:
    """A step's metrics, as an RL run logs them."""
    gain = 1 - math.exp(-slope * step / steps)
    noise = chance.gauss(0, 0.03)
    seconds = {"rollout": 2.1 - 0.8 * gain, "logprobs": 0.2, "train": 1.1 + noise, "reshard": 0.05}
    return {
        "step": step,
        "reward/mean": 0.1 + 0.8 * gain + noise,
        "reward/std": 0.45 - 0.3 * gain,
        "reward/accuracy": 0.1 + 0.8 * gain + noise,
        "reward/errors": float(step % 17 == 5),
        "reward/zero_variance_groups": 0.2 + 0.6 * gain,
        "rollout/completion_tokens/mean": 30 + 60 * gain + 40 * noise,
        "rollout/completion_tokens/max": 128.0,
        "rollout/truncated": 0.1 * (1 - gain),
        "rollout/turns/mean": 1.0,
        "kl/reference": 0.02 * gain * (1 + noise),
        "train/entropy": 1.4 - gain + noise,
        "train/loss": noise,
        "train/grad_norm": 0.6 + noise,
        "train/clip_fraction": 0.01 * gain,
        "train/tokens": 4096.0 + 1000 * gain,
        "logprob_gap/mean": 2e-7 * (1 + abs(noise)),
        "logprob_gap/max": 1e-5 * (1 + 10 * abs(noise)),
        "staleness/mean": 0.0,
        "time/step_seconds": sum(seconds.values()) + 0.1,
        **{f"time/{phase}_seconds": value for phase, value in seconds.items()},
        "time/reshard_wire_seconds": 0.03,
    }


def sample(step: int, number: int, gain: float, chance: random.Random) -> dict[str, Any]:
    """A record of samples/."""
    right = chance.random() < 0.1 + 0.8 * gain
    total = number // 4 * 3 + step
    words = " and ".join(f"{part} makes {total + part}" for part in range(2 + int(6 * gain)))
    return {
        "prompt": [{"role": "user", "content": f"Calculate {total} + {number // 4}."}],
        "completion": f"First {words}. So the answer is \\boxed{{{total + number // 4 if right else total}}}",
        "answer": str(total + number // 4),
        "reward": float(right),
        "reward_failure": None,
        "answer_correct": right,
        "format_valid": True,
        "finish_reason": "stop",
        "tokens": len(words.split()) + 8,
    }


def tokens_record(step: int, best: bool, chance: random.Random) -> dict[str, Any]:
    """A record of tokens/."""
    texts = re.findall(
        r"\S+ ?|\n", "First 7 plus 8 makes 15 , then 15 plus 6 makes 21 .\nSo it is \\ boxed { 21 } <|im_end|>"
    )
    engine = [round(-abs(chance.gauss(0, 0.7)), 4) for _ in texts]
    return {
        "prompt": [{"role": "user", "content": "Calculate 7 + 8 + 6."}],
        "answer": "21",
        "reward": float(best),
        "answer_correct": best,
        "tokens": len(texts),
        "columns": {
            "text": texts,
            "advantage": [0.7 if best else -1.2] * len(texts),
            "rollout_logprob": engine,
            "logprob_gap": [chance.gauss(0, 1e-6) for _ in texts],
            "trainer_logprob": [round(value + chance.gauss(0, 1e-4), 6) for value in engine],
            "weight_version": [step - 1] * 9 + [step] * (len(texts) - 9),
            "turn": [0] * len(texts),
        },
    }


def attempt_of(step: int) -> dict[str, Any]:
    """An attempt of several turns."""
    said = [("I ask for the price.", 0.0, "The tea costs 6 euros."), ("So it is \\boxed{6}", 1.0, "")]
    return {
        **sample(step, 0, 0.5, random.Random(step)),
        "source": "shop",
        "problem": 3,
        "turns": [
            {"completion": text, "reward": reward, "observation": [{"role": "tool", "content": reply}] if reply else []}
            for text, reward, reply in said
        ],
    }


def lines(path: Path, records: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def make_run(folder: Path, *, steps: int = 40, seed: int = 0, slope: float = 4.0, **changes: Any) -> Path:
    """A finished RL run, its samples at every fifth step, two starts. `changes` are those of the recipe."""
    chance = random.Random(seed)
    folder.mkdir(parents=True)
    given = {
        "name": folder.name,
        "loop": "rl",
        "seed": seed,
        "steps": steps,
        "rate": 2e-4,
        "advantage": "grpo",
    } | changes
    recipe = RECIPE.format(**given)
    (folder / "config.yaml").write_text(recipe)
    (folder / "status.json").write_text(json.dumps({"state": "done", "step": steps, "cause": None, "exit_code": 0}))
    logged = [row(step, steps, chance, slope) for step in range(1, steps + 1)]
    every = max(1, steps // 8)
    for done in logged[every - 1 :: every]:
        done["val/heldout/accuracy"] = (done["reward/mean"] or 0) - 0.05
    lines(folder / "metrics.jsonl", [{"step": 0, "val/heldout/accuracy": 0.05, "time/step_seconds": 4.0}, *logged])
    for step in range(0, steps + 1, every):
        gain = 1 - math.exp(-slope * step / steps)
        held_out = [{"set": "heldout", **sample(0, number, gain, chance), "source": ""} for number in range(12)]
        training = [sample(step, number, gain, chance) for number in range(24)] if step else []
        lines(folder / f"samples/step_{step:06d}.jsonl", [*training, *held_out, *([attempt_of(step)] if step else [])])
        if step:
            lines(
                folder / f"tokens/step_{step:06d}.jsonl", [tokens_record(step, best, chance) for best in (True, False)]
            )
    start = {
        "started": "2031-05-02T09:00:00+00:00",
        "machine": {"host": "node1", "cores": 16},
        "versions": {"torch": "9.9"},
    }
    ends: list[Mapping[str, Any]] = [
        {"ended": "2031-05-02T09:20:00+00:00", "state": "failed", "step": every, "cause": "PeerLostError: rank 1 died"},
        {"ended": "2031-05-02T10:00:00+00:00", "state": "done", "step": steps, "resumed_step": every},
    ]
    for number, end in enumerate(ends, 1):
        home = folder / f"logs/attempt_{number}"
        home.mkdir(parents=True)
        (home / "config.yaml").write_text(recipe.replace("prompts_per_step: 16", f"prompts_per_step: {8 * number}"))
        (home / "attempt.json").write_text(json.dumps({**start, **end}))
        lines(home / "notices.jsonl", [{"step": number, "text": f"warning {number}"}])
    return folder


def make_evaluation(folder: Path, right: Sequence[Sequence[bool]], *, name: str = "math", **changes: Any) -> Path:
    """The folder of an evaluation of one set: which attempts at each problem are right. `changes` are of its recipe."""
    folder.mkdir(parents=True)
    recipe = {"name": "r", "loop": "rl", "model": {"path": "models/tiny"}, **changes}
    (folder / "config.yaml").write_text(json.dumps(recipe))
    records = [
        {
            "set": name,
            "attempt": attempt,
            "final_answer": str(problem if is_right else 99),
            "source": "single_turn",
            "problem": problem,
            "prompt": [{"role": "user", "content": f"Calculate {problem} + 0."}],
            "rendered_prompt": f"<|im_start|>user\nCalculate {problem} + 0.<|im_end|>\n<|im_start|>assistant\n",
            "completion": f"It is {problem if is_right else 99}.",
            "answer": str(problem),
            "reward": float(is_right),
            "answer_correct": is_right,
            "finish_reason": "stop",
            "tokens": 5,
        }
        for problem, attempts in enumerate(right)
        for attempt, is_right in enumerate(attempts)
    ]
    lines(folder / "answers.jsonl", records)
    accuracy = mean_with_interval([sum(attempts) / len(attempts) for attempts in right])
    sets = {name: {"problems": len(right), "measures": {"accuracy": accuracy._asdict()}}}
    (folder / "metrics.json").write_text(json.dumps({"model": f"{folder.name}/hf", "sets": sets, "metrics": {}}))
    return folder
