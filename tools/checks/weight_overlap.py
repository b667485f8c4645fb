"""With `weights.overlap` the trainer waits less for a reshard than without, and the run stays correct.

Two ranks train, two sample one step ahead. Runs with and without the overlap alternate; in both each reshard is
verified. A row per run, with medians of a step in milliseconds: how long the trainer waited for its reshard, how much
of that was left over from the step before, how much was hidden, how long the engines paused and how long a step took.
The last row compares the waits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model
from tools.runs import DIGITS_REWARD, read_metrics, train

DURATION = {"small": "40 s", "full": "minutes: four runs of eight steps (not timed)"}
SMALL = {"steps": 2, "pairs": 1, "prompts": 2, "samples": 8, "tokens": 16, "layers": 2, "hidden_size": 128}
WARM_STEPS = 2
"""Steps that are not measured: a run's first, and the one in which sampling ahead begins."""
COLUMNS = {
    "waited": ("time/reshard_seconds",),
    "left over": ("time/reshard_waited_seconds",),
    "hidden": ("time/reshard_hidden_seconds",),
    "engines paused": ("perf/engine_pause_seconds",),
    "rollout": ("time/rollout_seconds",),
    "step": ("time/step_seconds",),
}
"""Metrics that are summed, by the column of the table."""


def make_inputs(folder: Path, options: argparse.Namespace) -> None:
    """Model and data in `folder`."""
    make_tiny_model(folder / "model", num_layers=options.layers, hidden_size=options.hidden_size)
    make_dataset(folder / "data")
    (folder / "share_of_digits.py").write_text(DIGITS_REWARD)


def rows_of(folder: Path, name: str, options: argparse.Namespace, *, overlap: bool) -> list[dict[str, Any]]:
    """Return the metrics of a run's steps, without the first ones and the last, whose reshard overlaps no step."""
    recipe = {
        "name": name, "loop": "rl", "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "data/train.jsonl", "max_prompt_tokens": 48},
        "cluster": {"ranks_per_node": 4},
        "optimizer": {"learning_rate": 1e-3},
        "reward": {"functions": ["share_of_digits:digits"]},
        "trainer": {"tp": 1, "max_tokens_per_microbatch": 2048},
        "rollout": {
            "placement": "separate", "ranks": 2, "max_staleness": 1, "kv_cache_gib": 0.25,
            "sampling": {"max_new_tokens": options.tokens},
        },
        "algorithm": {"importance_sampling": "tis"},
        "weights": {"verify_every": 1, "overlap": overlap},
        "train": {
            "steps": WARM_STEPS + options.steps + 1, "prompts_per_step": options.prompts,
            "samples_per_prompt": options.samples,
        },
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(recipe))
    train(f"{name}.yaml", folder=folder)
    last = WARM_STEPS + options.steps
    return [row for row in read_metrics(folder / "runs" / name) if WARM_STEPS < row["step"] <= last]


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    waited: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="megarl-overlap-") as name:
        folder = Path(name)
        make_inputs(folder, options)
        for pair in range(options.pairs):
            for overlap in (False, True) if pair % 2 else (True, False):
                rows = rows_of(folder, f"pair{pair}_{str(overlap).lower()}", options, overlap=overlap)
                milliseconds = {
                    column: 1e3 * median(sum(row.get(name, 0.0) for name in names) for row in rows)
                    for column, names in COLUMNS.items()
                }
                waited[overlap].append(milliseconds["waited"])
                yield {"run": f"overlap: {str(overlap).lower()}", **milliseconds}
    ratio = median(waited[True]) / median(waited[False])
    yield {"run": "wait with / without", "waited": ratio, "met": ratio < 1}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=8, help="steps that are measured")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4, help="a step")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="the longest completion")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=512)
