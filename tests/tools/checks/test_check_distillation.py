"""The smallest part of the check of distillation: one step of sampled tokens, between models that are there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import check
from tools.checks import distillation
from tools.make_dataset import make_dataset
from tools.runs import read_lines, read_metrics


@pytest.mark.end_to_end
def test_a_student_learns_for_two_steps(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    make_dataset(tmp_path / distillation.INPUT / "data", sft=8, train=64, heldout=16)
    models = {
        distillation.STUDENT: tiny_model(initializer_range=0.12),
        distillation.TEACHER: tiny_model(initializer_range=0.12, seed=3),
    }
    for name, model in models.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "hf").symlink_to(model)
    (tmp_path / distillation.TEACHER / "metrics.jsonl").write_text('{"step": 0, "val/heldout/accuracy": 0.75}\n')
    small = ("train.steps=2", "train.prompts_per_step=8", "rollout.sampling.max_new_tokens=12", "seed=1")
    arguments = ["distillation", "--work", str(tmp_path), "--loss", "sampled_token", "--json"]
    overrides = [part for override in small for part in ("--set", override)]
    # Random models answer nothing right.
    assert check.main([*arguments, str(tmp_path / "lines.jsonl"), *overrides]) == 1
    [line] = read_lines(tmp_path / "lines.jsonl")
    assert (line["before"], line["after"], line["teacher"], line["met"]) == (0.0, 0.0, 0.75, False)
    assert (line["low"], line["high"]) == distillation.wilson(0.75, 16)
    _, *steps = read_metrics(tmp_path / "runs" / line["run"])
    assert len(steps) == 2
    for step in steps:
        assert step["distillation/reverse_kl"] > 0.3 and step["logprob_gap/max"] < 1e-3
        # The first update starts from the weights that sampled: minus the advantage is the loss.
        assert step["train/loss"] == pytest.approx(step["distillation/reverse_kl"], rel=1e-4)


def test_finished_samples_of_training_problems_are_kept(tmp_path: Path) -> None:
    lines = [
        {"set": name, "completion": f"{name}, {reason}", "finish_reason": reason}
        for name in ("heldout", "train")
        for reason in ("length", "stop")
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    distillation.keep_training(tmp_path / "samples.jsonl", tmp_path / "kept.jsonl")
    assert read_lines(tmp_path / "kept.jsonl") == lines[-1:]


def test_the_interval_is_wilsons() -> None:
    # Of 7 of 10, and of all of 1024: 1 / (1 + z^2 / n) below.
    assert distillation.wilson(0.7, 10) == pytest.approx((0.396778, 0.892209), abs=1e-6)
    assert distillation.wilson(1.0, 1024) == pytest.approx((0.996263, 1.0), abs=1e-6)


@pytest.mark.parametrize(
    ("after", "before", "seconds", "met"),
    [
        pytest.param(0.94, 0.5, 200.0, True, id="within"),
        pytest.param(0.93, 0.5, 200.0, False, id="below the interval"),
        pytest.param(0.94, 0.7, 200.0, False, id="was too near"),
        pytest.param(0.94, 0.5, 301.0, False, id="took too long"),
        pytest.param(0.99, 0.5, 200.0, True, id="better than the teacher"),
    ],
)
def test_results_are_judged(after: float, before: float, seconds: float, met: bool) -> None:
    result = {"after": after, "before": before, "seconds": seconds}
    # 95 % of 1,024: from 0.9349 to 0.9617.
    assert distillation.judge(result, 0.95, 1024)["met"] is met
