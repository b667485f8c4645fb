"""Weights that go to the engines beside the next step (weights.overlap), against a trainer that waits for them.

    python tools/check_sent_beside.py [--steps 8] [--pairs 2] [--layers 8] [--hidden-size 512]

Two ranks train, two sample one step ahead. Runs with and without alternate; in both each reshard is verified. Prints by
run how long a step's trainer waited for its reshard, how much of that was left over from the step before, how much was
hidden, how long the engines paused and how long a step took. Exits with 1 where a run fails or the trainer
waits no less with the overlap.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from check_same_weights import REWARD
from make_dataset import make_dataset
from make_tiny_model import make_tiny_model

WARM_STEPS = 2
"""Steps that no time is taken of: a run's first, and that in which sampling ahead begins."""
COLUMNS = {
    "waited": ("time/reshard_seconds",),
    "of it left over": ("time/reshard_waited_seconds",),
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
    (folder / "share_of_digits.py").write_text(REWARD)


def rows_of(folder: Path, name: str, options: argparse.Namespace, *, overlap: bool) -> list[dict[str, Any]]:
    """The metrics of a run's steps but the first ones and the last, whose reshard is never beside another."""
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
    command = [sys.executable, "-m", "megarl", "train", f"{name}.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if WARM_STEPS < row["step"] <= WARM_STEPS + options.steps]


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    waited: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="megarl-overlap-") as place:
        folder = Path(place)
        make_inputs(folder, options)
        print(f"{'weights.overlap':16}" + "".join(f"{column:>16}" for column in COLUMNS) + "   (median of a step, ms)")
        for pair in range(options.pairs):
            for overlap in (False, True) if pair % 2 else (True, False):
                rows = rows_of(folder, f"pair{pair}_{str(overlap).lower()}", options, overlap=overlap)
                found = {
                    column: median(sum(row.get(name, 0.0) for name in names) for row in rows)
                    for column, names in COLUMNS.items()
                }
                waited[overlap].append(found["waited"])
                print(
                    f"{str(overlap).lower():16}" + "".join(f"{1e3 * value:16.1f}" for value in found.values()),
                    flush=True,
                )
    return 0 if median(waited[True]) < median(waited[False]) else 1


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps that are measured")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4, help="a step")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="the longest completion")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=512)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
