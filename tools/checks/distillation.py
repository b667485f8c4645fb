"""A student far behind its teacher comes near to it by distillation, within five minutes.

Student and teacher are those of the quickstart, made first: a hasty imitator of arithmetic, and the same model after
GRPO. Each way of distilling starts from the student. A row fails unless the student was 30 points behind, ends within
the 95 % interval (Wilson) of the teacher's accuracy on the held-out problems, and took at most five minutes. Start,
evaluations and export are included.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model
from tools.runs import heldout_accuracies, read_lines, train

DURATION = {"full": "275 s of CPU time: the quickstart's two runs, and one loss"}
SMALL: dict[str, Any] = {}
RECIPES = "launch/recipes"
LOSSES = ("full_vocabulary", "top_k", "sampled_token")
LEAST_DISTANCE = 0.3
MOST_SECONDS = 300.0
NORMAL_QUANTILE = 1.959964
"""Of a two-sided 95 % interval."""
INPUT = "runs/quickstart_input"
STUDENT, TEACHER = "runs/quickstart_sft", "runs/quickstart"


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a probability, from the `share` of `count` draws that came true.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    """
    square = NORMAL_QUANTILE**2 / count
    middle = (share + square / 2) / (1 + square)
    half = NORMAL_QUANTILE / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return middle - half, middle + half


def make_models(folder: Path, num_heldout: int, sft: Sequence[str], grpo: Sequence[str]) -> None:
    """Make the data, the student and the teacher unless they are there."""
    if not (folder / INPUT / "data").is_dir():
        make_tiny_model(folder / INPUT / "model", num_layers=2, initializer_range=0.08)
        make_dataset(folder / INPUT / "data", heldout=num_heldout)
    if not (folder / STUDENT / "hf").is_dir():
        train(f"{RECIPES}/quickstart_sft.yaml", *sft, folder=folder)
    if not (folder / TEACHER / "hf").is_dir():
        train(f"{RECIPES}/quickstart.yaml", "evaluation.every_steps=0", *grpo, folder=folder)


def distil(folder: Path, loss: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Distil with a loss, or imitate the teacher's samples (`off_policy`). Returns accuracies and seconds."""
    name = f"{loss}-{time.strftime('%H%M%S')}"
    if loss == "off_policy":
        sample_seconds = train(
            f"{RECIPES}/tiny_rl.yaml", f"name={name}-samples", f"model.path={TEACHER}/hf", "train.steps=0",
            f"data.validation.train={INPUT}/data/train.jsonl", "evaluation.sampling.temperature=1",
            "evaluation.max_problems=2400", folder=folder,
        )  # fmt: skip
        keep_training(folder / f"runs/{name}-samples/samples/step_000000.jsonl", folder / f"runs/{name}.jsonl")
        seconds = sample_seconds + train(
            f"{RECIPES}/quickstart_sft.yaml", f"name={name}", f"model.path={STUDENT}/hf",
            f"data.train=runs/{name}.jsonl", "optimizer.learning_rate=1e-3", "train.steps=150", *overrides,
            folder=folder,
        )  # fmt: skip
    else:
        recipe = f"{RECIPES}/tiny_distillation.yaml"
        seconds = train(recipe, f"name={name}", f"distillation.loss={loss}", *overrides, folder=folder)
    before, *_, after = heldout_accuracies(folder / "runs" / name)
    return {"loss": loss, "before": before, "after": after, "seconds": round(seconds, 1), "run": name}


def keep_training(samples: Path, out: Path) -> None:
    """Write the samples of a run that solve training problems and ended by themselves."""
    samples_to_keep = [
        line for line in read_lines(samples) if line["set"] == "train" and line["finish_reason"] == "stop"
    ]
    out.write_text("".join(json.dumps(line) + "\n" for line in samples_to_keep), encoding="utf-8")


def judge(result: dict[str, Any], teacher: float, num_heldout: int) -> dict[str, Any]:
    """Return a result with the teacher's accuracy, its interval, and whether the student came near enough."""
    low, high = wilson(teacher, num_heldout)
    is_met = (
        result["after"] >= low and teacher - result["before"] >= LEAST_DISTANCE and result["seconds"] <= MOST_SECONDS
    )
    return result | {"teacher": teacher, "low": low, "high": high, "met": is_met}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loss", action="append", choices=LOSSES, help="distil with this loss; repeatable")
    parser.add_argument("--off-policy", action="store_true", help="imitate the teacher's own samples too")
    parser.add_argument("--work", type=Path, default=Path("runs/check_distillation"), help="folder of the runs")
    parser.add_argument("--heldout", type=int, default=1024, help="held-out problems of data that are made")
    parser.add_argument("--sft", action="append", default=[], help="override of the student's recipe; repeatable")
    parser.add_argument("--grpo", action="append", default=[], help="override of the teacher's recipe; repeatable")
    parser.add_argument("--set", action="append", default=[], help="override of the distillations; repeatable")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    folder = options.work.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    make_models(folder, options.heldout, options.sft, options.grpo)
    teacher = heldout_accuracies(folder / TEACHER)[-1]
    # The data may have been made before, of another size.
    num_heldout = len(read_lines(folder / INPUT / "data/heldout.jsonl"))
    for loss in [*(options.loss or LOSSES[:1]), *(["off_policy"] if options.off_policy else [])]:
        yield judge(distil(folder, loss, options.set), teacher, num_heldout)
