"""A run whose trainer ranks are killed or stopped continues in seconds, with the numbers of an undisturbed run.

A row per layout and fault: seconds from the fault to the next step beyond that step's own time, the same for a restart
of all processes from the newest checkpoint, and the largest difference to an undisturbed run. A last row kills random
ranks at random moments of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.child_processes import rank_processes
from tests.end_to_end.test_recovery import RECIPE, REWARD
from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model

DURATION = {"small": "1 case (not timed)", "full": "all cases and 100 kills: about an hour (not timed)"}
SMALL = {"only": ["dp 2, killed"], "kills": 0}
LIMIT_SECONDS = 5.0
"""Most seconds that a recovery may add to the step that was lost."""
LIMIT_DIFFERENCE = 1e-5
"""Largest difference of the metrics below, relative to the larger of 1 and the value."""
COMPARED = ("reward/mean", "train/loss", "train/grad_norm", "train/entropy", "rollout/sampled_tokens")
STEPS = 8
PATIENCE_SECONDS = 600.0


class Case(NamedTuple):
    """A layout, by overrides of the recipe, and the fault of a rank. `model` is a key of the models made."""

    overrides: str
    fault: signal.Signals = signal.SIGKILL
    recover: str = "restart"
    model: str = "dense"


TP = "cluster.ranks_per_node=4 trainer.tp=2 rollout.tp=2"
PP = "cluster.ranks_per_node=4 trainer.pp=2"
CASES = {
    "dp 2, killed": Case("cluster.ranks_per_node=2"),
    "dp 2, stopped": Case("cluster.ranks_per_node=2 cluster.verb_timeout_seconds=5", signal.SIGSTOP),
    "dp 2, shrinks": Case("cluster.ranks_per_node=2", recover="shrink"),
    "dp 2, tp 2, killed": Case(TP),
    "dp 2, tp 2, shrinks": Case(TP, recover="shrink"),
    "dp 2, pp 2, killed": Case(PP),
    "dp 2, pp 2, shrinks": Case(PP, recover="shrink"),
    "experts, ep 2, killed": Case("cluster.ranks_per_node=2 trainer.ep=2", model="experts"),
    "separate engine, killed": Case("cluster.ranks_per_node=3 rollout.placement=separate rollout.ranks=1"),
    "plain optimizer, killed": Case("cluster.ranks_per_node=2 trainer.distributed_optimizer=false"),
    "LoRA, killed": Case("cluster.ranks_per_node=2 lora.rank=4"),
    "PPO, killed": Case("cluster.ranks_per_node=2 algorithm.advantage=gae"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), help="the cases to run")
    parser.add_argument("--kills", type=int, default=100, help="random kills of the last row; 0 leaves it out")
    parser.add_argument("--seed", type=int, default=1, help="decides whom and when the last row kills")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="megarl_recovery_") as name:
        folder = Path(name)
        make_dataset(folder / "data", sft=8, train=64, heldout=8)
        (folder / "own.py").write_text(REWARD)
        models = {
            "dense": make_tiny_model(folder / "dense", num_layers=2),
            "experts": make_tiny_model(folder / "experts", family="qwen3_moe", num_layers=2),
        }
        for kind, model in models.items():
            (folder / f"{kind}.yaml").write_text(RECIPE.replace("MODEL", str(model)))
        for chosen in options.only:
            yield {"case": chosen, **check(folder, CASES[chosen])}
        if options.kills:
            yield {"case": f"{options.kills} random kills", **check_kills(folder, options.kills, options.seed)}


def check(folder: Path, case: Case) -> dict[str, Any]:
    """Run a case undisturbed, with recovery, and with a restart of all processes."""
    calm = Run(folder, case, "calm", "train.steps=8")
    calm.finish()
    seconds, step_seconds, run = disturb(folder, case, f"cluster.recover={case.recover} checkpoint.replicate=1")
    run.finish()
    # Before the next run, which has the same name.
    recovered, found = run.steps(), difference(calm.steps(), run.steps())
    restart_seconds, _, restarted = disturb(folder, case, "checkpoint.every_steps=1")
    restarted.finish()
    beyond = seconds - step_seconds
    return {
        "seconds beyond the step": beyond,
        "full restart": restart_seconds - step_seconds,
        "recovery itself": next(s["fault/recovery_seconds"] for s in recovered if "fault/recovery_seconds" in s),
        "difference": found,
        "met": beyond <= LIMIT_SECONDS + case_patience(case) and found <= LIMIT_DIFFERENCE,
    }


def case_patience(case: Case) -> float:
    """Return the seconds of the deadline that a stopped rank has to miss before anything happens."""
    return 5.0 if case.fault == signal.SIGSTOP else 0.0


def disturb(folder: Path, case: Case, overrides: str) -> tuple[float, float, Run]:
    """Start a run and harm its last trainer rank within a step. Restart the run if it ends.

    Returns the seconds until the next step was logged, the seconds of a usual step, and the run.
    """
    run = Run(folder, case, "disturbed", f"train.steps={STEPS} {overrides}")
    run.await_steps(3)
    usual = statistics.median(step["time/step_seconds"] for step in run.steps()[1:])
    hold = folder / "hold"
    # The reward waits while this file exists, so the run stays in the middle of a step.
    hold.touch()
    time.sleep(2 * usual)
    ranks, before = run.ranks(), len(run.steps())
    victim = max(rank for rank in ranks if not ("separate" in case.overrides and rank == 2))
    began = time.monotonic()
    os.kill(ranks[victim], case.fault)
    hold.unlink()
    run.await_steps(before + 1, restarts="recover" not in overrides)
    return time.monotonic() - began, usual, run


def check_kills(folder: Path, num_kills: int, seed: int) -> dict[str, Any]:
    """Kill a random rank at random moments of one run, until there were enough kills."""
    case, moments = Case("cluster.ranks_per_node=2"), random.Random(seed)
    # Each kill costs at most one step, so the run needs a few steps for each.
    steps = f"train.steps={2 * num_kills + 4}"
    calm = Run(folder, case, "calm", steps)
    calm.finish()
    run = Run(folder, case, "disturbed", f"{steps} cluster.recover=restart checkpoint.replicate=1")
    for number in range(num_kills):
        run.await_steps(2 * number + 1)
        time.sleep(moments.uniform(0.0, 1.0))
        if ranks := run.ranks():
            os.kill(moments.choice(sorted(ranks.values())), signal.SIGKILL)
    run.finish()
    found, recovered = difference(calm.steps(), run.steps()), run.steps()
    recoveries = max((step.get("fault/recoveries", 0.0) for step in recovered), default=0.0)
    return {"recoveries": recoveries, "difference": found, "met": found <= LIMIT_DIFFERENCE}


class Run:
    """A run in progress, started in `folder` with the recipe of a case."""

    def __init__(self, folder: Path, case: Case, name: str, overrides: str) -> None:
        self._folder, self._case, self._path = folder, case, folder / "runs" / name
        self._arguments = [f"{case.model}.yaml", f"name={name}", *case.overrides.split(), *overrides.split()]
        shutil.rmtree(self._path, ignore_errors=True)
        self._start("--restart")

    def _start(self, option: str) -> None:
        command = [sys.executable, "-m", "megarl", "train", *self._arguments, option]
        with (self._folder / "screen").open("w") as screen:
            self._driver = subprocess.Popen(command, cwd=self._folder, stdout=screen, stderr=subprocess.STDOUT)

    def steps(self) -> list[dict[str, float]]:
        file = self._path / "metrics.jsonl"
        if not file.exists():
            return []
        lines = file.read_text().rpartition("\n")[0].splitlines()
        return [line for line in map(json.loads, lines) if line["step"]]

    def ranks(self) -> dict[int, int]:
        return rank_processes(self._driver.pid)

    def await_steps(self, count: int, *, restarts: bool = False) -> None:
        """Wait for so many complete steps. If the run ends before and `restarts`, start it again with --resume."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.steps()) < count:
            if self._driver.poll() is not None:
                if not restarts:
                    raise SystemExit((self._folder / "screen").read_text())
                self._start("--resume")
            if time.monotonic() > deadline:
                raise SystemExit(f"no step {count} in {PATIENCE_SECONDS:g} s\n{(self._folder / 'screen').read_text()}")
            time.sleep(0.01)

    def finish(self) -> None:
        """Wait for the run's good end."""
        if self._driver.wait(PATIENCE_SECONDS):
            raise SystemExit((self._folder / "screen").read_text())


def difference(calm: list[dict[str, float]], found: list[dict[str, float]]) -> float:
    """Return the largest difference of the compared metrics over all steps. Missing steps: infinite."""
    if [step["step"] for step in calm] != [step["step"] for step in found]:
        return float("inf")
    return max(
        distance(a, b, name) for a, b in zip(calm, found, strict=True) for name in COMPARED if name in a or name in b
    )


def distance(a: Mapping[str, float], b: Mapping[str, float], name: str) -> float:
    """Return the difference of a metric, relative to the larger of 1 and its value."""
    return abs(a[name] - b[name]) / max(1.0, abs(a[name]))
