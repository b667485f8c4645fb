"""Engines that sample while the trainer trains, against the same ranks in turns: samples a second, and the step's time.

    python tools/check_overlap.py [--steps 8] [--pairs 2] [--prompts 8] [--samples 8] [--tokens 128]

Two ranks train on one core, two sample on another. Before anything is compared, the number of prompts is chosen so that
sampling and training take about as long. Then runs at rollout.max_staleness 1 and 0 alternate. Prints samples a second
of both, the steps' seconds beside those of the two sides, and what the same work takes colocated on two ranks and both
cores, without a bound. Exits with 1 where one step off makes less than 1.5 times the samples a second, or a step of it
takes more than 1.2 times the longer side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from make_dataset import make_dataset
from make_tiny_model import make_tiny_model

LEAST_RATIO = 1.5
MOST_STEP = 1.2
"""Times the longer of sampling and training."""
NUM_TRAINERS = 2
WARM_STEPS = 2
"""Steps that no time is taken of: a run's first, and that in which sampling ahead begins."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians over a run's steps, in seconds."""

    step: float
    sampling: float
    """How long the trainer waited for samples: in a run of turns all of sampling."""
    training: float
    """All else but the reshard and what is only done at the end."""


def pin(process: subprocess.Popen[bytes]) -> None:
    """Keep trainers' ranks on the first core and the others on the second, until the run ends: by their logs' names."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    while process.poll() is None:
        for pid in _descendants(process.pid):
            with contextlib.suppress(OSError):
                log = re.search(r"rank_0*(\d+)\.log$", os.readlink(f"/proc/{pid}/fd/1"))
                if log is None:
                    continue
                core = first if int(log[1]) < NUM_TRAINERS else second
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), {core})
        time.sleep(0.5)


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{thread}/children").read_text(encoding="utf-8")
                found += [int(child) for child in children.split()]
    return found


def timed(folder: Path, name: str, options: argparse.Namespace, prompts: int, steps: int, **rollout: Any) -> Timing:
    """One run of so many steps."""
    is_separate = rollout.get("placement") == "separate"
    recipe = {
        "name": name, "loop": "rl", "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "data/train.jsonl", "max_prompt_tokens": 48},
        "cluster": {"ranks_per_node": 4 if is_separate else 2},
        "trainer": {"tp": 1, "max_tokens_per_microbatch": 4096},
        "rollout": {
            "tp": 1, "kv_cache_gib": 0.25, "sampling": {"max_new_tokens": options.tokens}, **rollout,
        },
        "algorithm": {"importance_sampling": "tis"},
        "train": {"steps": steps, "prompts_per_step": prompts, "samples_per_prompt": options.samples},
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "megarl", "train", f"{name}.yaml"]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        if is_separate:
            pin(process)
        if process.wait():
            raise SystemExit((folder / f"{name}.log").read_text(encoding="utf-8")[-3000:])
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > WARM_STEPS]

    def of(*names: str) -> float:
        return median(sum(row.get(f"time/{name}_seconds", 0.0) for name in names) for row in rows)

    return Timing(of("step"), of("rollout"), of("logprobs", "advantages", "train"))


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_tiny_model(folder / "model", num_layers=options.layers, hidden_size=options.hidden_size)
        make_dataset(folder / "data")
        report = measured(folder, options)
    print(json.dumps(report, indent=2))
    if not options.bounds:
        return 0
    return 0 if report["ratio"] >= LEAST_RATIO and report["step_over_longer_side"] <= MOST_STEP else 1


def measured(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both ways of the same ranks in turn, and colocated."""
    separate = {"placement": "separate", "ranks": 2}
    prompts = options.prompts
    for attempt in range(options.calibrations):
        found = timed(folder, f"try{attempt}", options, prompts, WARM_STEPS + 3, max_staleness=0, **separate)
        # Training goes with the number of samples, sampling with their length first of all.
        prompts = max(2, 2 * round(prompts * found.sampling / found.training / 2))
    runs: dict[int, list[Timing]] = {0: [], 1: []}
    for pair in range(options.pairs):
        for staleness in (0, 1) if pair % 2 else (1, 0):
            name = f"pair{pair}_{staleness}"
            runs[staleness].append(
                timed(folder, name, options, prompts, WARM_STEPS + options.steps, max_staleness=staleness, **separate)
            )
    colocated = timed(folder, "colocated", options, prompts, WARM_STEPS + options.steps)
    in_turns, ahead = (median(timing.step for timing in runs[staleness]) for staleness in (0, 1))
    sampling, training = (median(getattr(timing, side) for timing in runs[0]) for side in ("sampling", "training"))
    samples = prompts * options.samples
    return {
        "prompts": prompts,
        "samples_per_second": {
            "in_turns": samples / in_turns, "one_step_off": samples / ahead, "colocated": samples / colocated.step,
        },
        "ratio": in_turns / ahead,
        "step_seconds": {"in_turns": in_turns, "one_step_off": ahead, "colocated": colocated.step},
        "sampling_seconds": sampling,
        "training_seconds": training,
        "step_over_longer_side": ahead / max(sampling, training),
        "steps_of_pairs": {name: [timing.step for timing in runs[n]] for n, name in enumerate(("in_turns", "ahead"))},
    }  # fmt: skip


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--calibrations", type=int, default=2, help="runs that choose the number of prompts")
    parser.add_argument("--prompts", type=int, default=8, help="a step, to begin with")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="the longest completion")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--no-bounds", dest="bounds", action="store_false", help="only measure")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
