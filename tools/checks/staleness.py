"""One step of staleness costs no accuracy beyond the spread of seeds; the speed of each bound is measured.

The quickstart's student is made once, then GRPO trains it for as many steps at each bound of staleness, with the
decoupled correction (algorithm.importance_sampling tis, the trainer's log-probs as the proximal policy) and without
(none). One rank trains, another samples. A row per bound and correction: held-out accuracy over the seeds (mean, least,
most) and samples a second without evaluations. The corrected row of bound 1 fails if its mean is below every seed of
bound 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from tools.checks.learning import START, make_start
from tools.runs import heldout_accuracies, read_metrics, train

DURATION = {
    "small": "minutes: the student, and two runs of two steps (not timed)",
    "full": "hours: 24 runs of 40 steps (not timed)",
}
SMALL = {"staleness": [1], "seeds": [0], "steps": 2, "prompts": 2, "samples": 2}
RECIPE = "launch/recipes/quickstart.yaml"
SEPARATE = (
    "cluster.ranks_per_node=2", "trainer.tp=1", "rollout.tp=1", "rollout.placement=separate", "rollout.ranks=1",
)  # fmt: skip
CORRECTIONS = ("tis", "none")


def steps_per_second(run_folder: Path) -> float:
    """Return the steps a second of a run, without its first step and evaluations."""
    steps = [row for row in read_metrics(run_folder) if row["step"] > 1]
    seconds = sum(row["time/step_seconds"] - row.get("time/evaluation_seconds", 0.0) for row in steps)
    return len(steps) / seconds


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train what is missing. Yields the accuracies of the seeds and the speed, by bound and correction."""
    for staleness, correction in product(options.staleness, CORRECTIONS):
        accuracies: list[float] = []
        speeds: list[float] = []
        for seed in options.seeds:
            name = f"staleness_{staleness}_{correction}_{seed}"
            run_folder = options.work / "runs" / name
            if not (run_folder / "hf").is_dir():
                train(
                    RECIPE, f"name={name}", f"seed={seed}", *SEPARATE, f"train.steps={options.steps}",
                    f"rollout.max_staleness={staleness}", f"algorithm.importance_sampling={correction}",
                    f"train.prompts_per_step={options.prompts}", f"train.samples_per_prompt={options.samples}",
                    folder=options.work,
                )  # fmt: skip
            accuracies.append(heldout_accuracies(run_folder)[-1])
            speeds.append(options.prompts * options.samples * steps_per_second(run_folder))
        yield {
            "staleness": staleness, "correction": correction, "accuracies": accuracies, "mean": mean(accuracies),
            "least": min(accuracies), "most": max(accuracies), "samples_per_second": mean(speeds),
        }  # fmt: skip


def judge(rows: list[dict[str, Any]]) -> None:
    """Say in the corrected row of staleness 1 whether its mean accuracy is within the seeds of staleness 0."""
    corrected = {row["staleness"]: row for row in rows if row["correction"] == "tis"}
    if {0, 1} <= corrected.keys():
        corrected[1]["met"] = corrected[1]["mean"] >= corrected[0]["least"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--work", type=Path, default=Path("runs/check_staleness"), help="folder; done runs are kept")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    options.work.mkdir(parents=True, exist_ok=True)
    if not (options.work / "runs" / START / "hf").is_dir():
        make_start(options.work, START)
    rows: list[dict[str, Any]] = []
    # The bound 0 comes first: the others are compared with it.
    options.staleness.sort()
    for row in measure(options):
        rows.append(row)
        judge(rows)
        yield row
