"""Engines that sample while the trainer trains: at least 1.5 times the samples a second of the same ranks in turns.

Two ranks train on one core, two sample on another. Before anything is compared, the number of prompts is chosen so that
sampling and training take about as long. Then runs at rollout.max_staleness 1 and 0 alternate. Rows give the seconds of
a step, of its two sides and samples a second: in turns, one step ahead, and colocated on two ranks and both cores,
which has no bound. One step ahead fails below 1.5 times the samples a second of turns, or if its step takes more than
1.2 times the longer side.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model
from tools.runs import read_metrics

DURATION = {
    "small": "25 s (two runs of a step, without bounds)",
    "full": "250 s: seven runs of 5 to 10 steps",
}
SMALL = dict(steps=1, pairs=1, calibrations=0, prompts=2, samples=2, tokens=8, layers=1, hidden_size=128, bounds=False)
LEAST_RATIO = 1.5
MOST_STEP = 1.2
"""Bound on a step's seconds over those of the longer of sampling and training."""
NUM_TRAINERS = 2
WARM_STEPS = 2
"""Steps that are not measured: a run's first, and the one in which sampling ahead begins."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians over a run's steps, in seconds."""

    step: float
    sampling: float
    """Time that the trainer waited for samples. In a run of turns this is all of sampling."""
    training: float
    """All other work, without the reshard and the end of the run."""


def pin(process: subprocess.Popen[bytes]) -> None:
    """Keep trainers' ranks on one core and the others on another, until the run ends. Log names tell the rank."""
    trainer_core, engine_core, *_ = sorted(os.sched_getaffinity(0))
    while process.poll() is None:
        for pid in _descendants(process.pid):
            with contextlib.suppress(OSError):
                log = re.search(r"rank_0*(\d+)\.log$", os.readlink(f"/proc/{pid}/fd/1"))
                if log is None:
                    continue
                core = trainer_core if int(log[1]) < NUM_TRAINERS else engine_core
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), {core})
        time.sleep(0.5)


def _descendants(pid: int) -> list[int]:
    """Return a process and all processes below it."""
    pids = [pid]
    for parent in pids:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{thread}/children").read_text(encoding="utf-8")
                pids += [int(child) for child in children.split()]
    return pids


def time_run(folder: Path, name: str, options: argparse.Namespace, prompts: int, steps: int, **rollout: Any) -> Timing:
    """Train one run. Returns the median seconds of its step, sampling and training."""
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
    rows = [row for row in read_metrics(folder / "runs" / name) if row["step"] > WARM_STEPS]

    def median_seconds(*names: str) -> float:
        return median(sum(row.get(f"time/{name}_seconds", 0.0) for name in names) for row in rows)

    training = median_seconds("logprobs", "advantages", "train")
    return Timing(median_seconds("step"), median_seconds("rollout"), training)


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model", num_layers=options.layers, hidden_size=options.hidden_size)
        make_dataset(folder / "data")
        yield from compare(folder, options)


def compare(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train both ways on the same ranks alternately, and colocated, in a folder with model and data."""
    separate = {"placement": "separate", "ranks": 2}
    prompts = options.prompts
    for attempt in range(options.calibrations):
        timing = time_run(folder, f"try{attempt}", options, prompts, WARM_STEPS + 3, max_staleness=0, **separate)
        # Training goes with the number of samples, sampling with their length first of all.
        prompts = max(2, 2 * round(prompts * timing.sampling / timing.training / 2))
    runs: dict[int, list[Timing]] = {0: [], 1: []}
    for pair in range(options.pairs):
        for staleness in (0, 1) if pair % 2 else (1, 0):
            name = f"pair{pair}_{staleness}"
            runs[staleness].append(
                time_run(
                    folder, name, options, prompts, WARM_STEPS + options.steps, max_staleness=staleness, **separate
                )
            )
    colocated = time_run(folder, "colocated", options, prompts, WARM_STEPS + options.steps)
    medians = {
        name: Timing(*(median(getattr(timing, side) for timing in timings) for side in Timing.__slots__))
        for name, timings in (("in turns", runs[0]), ("one step ahead", runs[1]), ("colocated", [colocated]))
    }
    in_turns, samples = medians["in turns"], prompts * options.samples
    longer_side = max(in_turns.sampling, in_turns.training)
    for name, timing in medians.items():
        row: dict[str, Any] = {
            "way": name,
            "prompts": prompts,
            "samples_per_second": samples / timing.step,
            "step_seconds": timing.step,
            "sampling_seconds": timing.sampling,
            "training_seconds": timing.training,
            "speedup": in_turns.step / timing.step,
            "step_over_longer_side": timing.step / longer_side,
        }
        if name == "one step ahead" and options.bounds:
            row["met"] = row["speedup"] >= LEAST_RATIO and row["step_over_longer_side"] <= MOST_STEP
        yield row


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--calibrations", type=int, default=2, help="runs that choose the number of prompts")
    parser.add_argument("--prompts", type=int, default=8, help="a step, to begin with")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128, help="the longest completion")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--no-bounds", dest="bounds", action="store_false", help="only measure")
