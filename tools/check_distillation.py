"""Distil a trained model into a student far behind it, and show how near the student comes on held-out problems.

    python tools/check_distillation.py [--loss sampled_token --loss top_k --off-policy] [--json results.jsonl]

Student and teacher are those of the quickstart, made first: a hasty imitator of arithmetic, and the same model after
GRPO. Each way of distilling starts from the student. It is met where the student was 30 points behind, ends within the
95 % interval (Wilson) of the teacher's accuracy on the held-out problems, and the run took at most five minutes, start,
evaluations and export included. Exits with 1 if one is not met.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "launch/recipes"
LOSSES = ("full_vocabulary", "top_k", "sampled_token")
LEAST_DISTANCE = 0.3
MOST_SECONDS = 300.0
NORMAL_QUANTILE = 1.959964
"""Of a two-sided 95 % interval."""
INPUT = "runs/quickstart_input"
STUDENT, TEACHER = "runs/quickstart_sft", "runs/quickstart"


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a probability of which so large a share of `count` draws came true.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    """
    square = NORMAL_QUANTILE**2 / count
    middle = (share + square / 2) / (1 + square)
    half = NORMAL_QUANTILE / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return middle - half, middle + half


def run(folder: Path, command: Sequence[str]) -> None:
    """Run a command in a folder. Raises SystemExit with what it said where it fails."""
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")


def train(folder: Path, recipe: str, *overrides: str) -> float:
    """A run of a recipe; its seconds, start and export included."""
    started = time.perf_counter()
    run(folder, ["-m", "megarl", "train", str(RECIPES / recipe), *overrides])
    return time.perf_counter() - started


def metrics(run_folder: Path) -> list[Mapping[str, Any]]:
    """A run's metrics, step by step."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def accuracies(run_folder: Path) -> list[float]:
    """Held-out accuracy at each evaluation of a run."""
    return [step["val/heldout/accuracy"] for step in metrics(run_folder) if "val/heldout/accuracy" in step]


def make_models(folder: Path, num_heldout: int, sft: Sequence[str], grpo: Sequence[str]) -> None:
    """The data, the student and the teacher, where they are not there."""
    if not (folder / INPUT / "data").is_dir():
        model, data = str(folder / INPUT / "model"), str(folder / INPUT / "data")
        run(
            folder,
            [
                str(ROOT / "tools/make_tiny_model.py"), "--out", model, "--num-layers", "2",
                "--initializer-range", "0.08",
            ],
        )  # fmt: skip
        run(folder, [str(ROOT / "tools/make_dataset.py"), "--out", data, "--heldout", str(num_heldout)])
    if not (folder / STUDENT / "hf").is_dir():
        train(folder, "quickstart_sft.yaml", *sft)
    if not (folder / TEACHER / "hf").is_dir():
        train(folder, "quickstart.yaml", "evaluation.every_steps=0", *grpo)


def distil(folder: Path, loss: str, overrides: Sequence[str]) -> dict[str, Any]:
    """A distillation with this loss, or `off_policy` by imitation of the teacher's samples: accuracies and seconds."""
    name = f"{loss}-{time.strftime('%H%M%S')}"
    if loss == "off_policy":
        problems = f"data.validation.train={INPUT}/data/train.jsonl"
        sampled = train(
            folder, "tiny_rl.yaml", f"name={name}-samples", f"model.path={TEACHER}/hf", "train.steps=0", problems,
            "evaluation.sampling.temperature=1", "evaluation.max_problems=2400",
        )  # fmt: skip
        keep_training(folder / f"runs/{name}-samples/samples/step_000000.jsonl", folder / f"runs/{name}.jsonl")
        seconds = sampled + train(
            folder, "quickstart_sft.yaml", f"name={name}", f"model.path={STUDENT}/hf",
            f"data.train=runs/{name}.jsonl", "optimizer.learning_rate=1e-3", "train.steps=150", *overrides,
        )  # fmt: skip
    else:
        seconds = train(folder, "tiny_distillation.yaml", f"name={name}", f"distillation.loss={loss}", *overrides)
    before, *_, after = accuracies(folder / "runs" / name)
    return {"loss": loss, "before": before, "after": after, "seconds": round(seconds, 1), "run": name}


def keep_training(samples: Path, out: Path) -> None:
    """Of a run's samples those of the training problems that came to their end."""
    lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    kept = [line for line in lines if line["set"] == "train" and line["finish_reason"] == "stop"]
    out.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")


def judged(result: dict[str, Any], teacher: float, num_heldout: int) -> dict[str, Any]:
    """A result with the teacher's accuracy, its interval, and whether what was to be shown is."""
    low, high = wilson(teacher, num_heldout)
    met = result["after"] >= low and teacher - result["before"] >= LEAST_DISTANCE and result["seconds"] <= MOST_SECONDS
    return result | {"teacher": teacher, "low": low, "high": high, "met": met}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", action="append", choices=LOSSES, help="distil with this loss; repeatable")
    parser.add_argument("--off-policy", action="store_true", help="imitate the teacher's own samples too")
    parser.add_argument("--work", type=Path, default=Path("runs/check_distillation"), help="folder of the runs")
    parser.add_argument("--heldout", type=int, default=1024, help="held-out problems of data that are made")
    parser.add_argument("--sft", action="append", default=[], help="override of the student's recipe; repeatable")
    parser.add_argument("--grpo", action="append", default=[], help="override of the teacher's recipe; repeatable")
    parser.add_argument("--set", action="append", default=[], help="override of the distillations; repeatable")
    parser.add_argument("--json", type=Path, help="write one JSON object a line here")
    options = parser.parse_args(arguments)
    folder = options.work.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    make_models(folder, options.heldout, options.sft, options.grpo)
    teacher = accuracies(folder / TEACHER)[-1]
    # The data may have been made before, of another size.
    num_heldout = len((folder / INPUT / "data/heldout.jsonl").read_text(encoding="utf-8").splitlines())
    low, high = wilson(teacher, num_heldout)
    print(f"teacher {teacher:.3f} on {num_heldout} held-out problems, 95 % interval {low:.3f} to {high:.3f}")
    print(f"{'loss':18}{'before':>8}{'after':>8}{'seconds':>9}")
    lines = []
    for loss in [*(options.loss or LOSSES[:1]), *(["off_policy"] if options.off_policy else [])]:
        line = judged(distil(folder, loss, options.set), teacher, num_heldout)
        lines.append(line)
        mark = "" if line["met"] else "!"
        print(f"{loss:18}{line['before']:8.3f}{line['after']:8.3f}{line['seconds']:9.0f} {mark}", flush=True)
    if options.json:
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0 if all(line["met"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
