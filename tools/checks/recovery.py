"""A run whose trainer ranks are killed or stopped continues in seconds, with the numbers of an undisturbed run.

A row per layout and fault: seconds from the fault to the next step beyond that step's own time, the same for a restart
of all processes from the newest checkpoint, and the largest difference to an undisturbed run. A further row resizes
one run several times, and compares the received bytes with `megarl plan --to`. Another measures how much step time
copies and checksums of the state cost. A last row kills random processes at random moments of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file

from megarl.processes.process_tree import descendants
from megarl.tracking.draws import account
from megarl.types import PeerLostError
from tests.child_processes import process_name
from tests.end_to_end.recovery.test_recovery import RECIPE
from tests.held_run import PATIENCE_SECONDS, REWARD, HeldRun, difference
from tools import runs
from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model

DURATION = {"small": "80 s (one case)", "full": "an hour (12 cases, six resizes, 250 timed steps, 100 kills)"}
SMALL = {"only": ["dp 2, killed"], "resizes": False, "timed": 0, "kills": 0}
LIMIT_SECONDS = 5.0
"""Most seconds that a recovery may add to the step that was lost."""
NAMING_SECONDS = 10.0
"""Most seconds from the deadline that a stopped rank misses to the message that names it."""
SILENT_SECONDS = 30.0
"""Most seconds from that deadline to the next step. The stacks of all ranks are read meanwhile."""
LIMIT_DIFFERENCE = 1e-5
"""Largest difference of the metrics below, relative to the larger of 1 and the value."""
LIMIT_COST = 0.03
"""Largest share of a step's time that copies and checksums of the state may add."""
EVERY = 4
"""Steps from one copy of the state to the next, where its cost is measured."""
LARGE_BATCH = "train.prompts_per_step=16 train.samples_per_prompt=8"
"""Samples of a step with which the cost is compared: 128. Real runs have more, the other cases 16."""
LARGE_STEPS = 12
STEPS = 8


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


DP_1, DP_2 = "cluster.ranks_per_node=1", "cluster.ranks_per_node=2"
SIZES = {
    "dp 2": DP_2,
    "dp 1": DP_1,
    "dp 2 again": DP_2,
    "tp 2": f"{DP_2} trainer.tp=2",
    "tp 1": f"{DP_1} trainer.tp=1",
    "pp 2": f"{DP_2} trainer.pp=2",
    "pp 1": f"{DP_1} trainer.pp=1",
}
"""Sizes of one run, one after another, as overrides of the recipe."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), help="the cases to run")
    parser.add_argument(
        "--resizes", action=argparse.BooleanOptionalAction, default=True, help="whether to resize a run several times"
    )
    parser.add_argument("--timed", type=int, default=240, help="steps of the run that times copies; 0 leaves it out")
    parser.add_argument("--kills", type=int, default=100, help="random kills of the last row; 0 leaves it out")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random victims and moments")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="megarl_recovery_") as name:
        folder = Path(name)
        make_dataset(folder / "data", sft=8, train=64, heldout=8)
        (folder / "own.py").write_text(REWARD)
        models = {
            "dense": make_tiny_model(folder / "dense", num_layers=2),
            "experts": make_tiny_model(folder / "experts", family="qwen3_moe", num_layers=2),
            "wide": make_tiny_model(folder / "wide", hidden_size=512, intermediate_size=1024),
        }
        for kind, model in models.items():
            (folder / f"{kind}.yaml").write_text(RECIPE.replace("MODEL", str(model)))
        for case_name in options.only:
            yield {"case": case_name, **check(folder, CASES[case_name])}
        if options.resizes:
            yield {"case": "resizes", **check_resizes(folder)}
        if options.timed:
            yield {"case": "cost of copies", **check_cost(folder, options.timed)}
        if options.kills:
            yield {"case": f"{options.kills} random kills", **check_kills(folder, options.kills, options.seed)}


def check(folder: Path, case: Case) -> dict[str, Any]:
    """Run a case undisturbed, with recovery, and with a restart of all processes."""
    calm = start(folder, case, "calm", f"train.steps={STEPS}")
    calm.finish()
    seconds, named, step_seconds, run = disturb(folder, case, f"cluster.recover={case.recover} checkpoint.replicate=1")
    run.finish()
    # Before the next run, which has the same name.
    recovered, largest_difference, printed = run.steps(), difference(calm.steps(), run.steps()), run.screen()
    restart_seconds, _, _, restarted = disturb(folder, case, "checkpoint.every_steps=1")
    restarted.finish()
    # A stopped rank is noticed when it misses its deadline.
    deadline = missed_deadline(printed)
    beyond = seconds - step_seconds - deadline
    limit = SILENT_SECONDS if deadline else LIMIT_SECONDS
    return {
        "deadline": deadline,
        "named after it": named - deadline,
        "seconds beyond the step": beyond,
        "full restart": restart_seconds - step_seconds,
        "recovery itself": next(s["fault/recovery_seconds"] for s in recovered if "fault/recovery_seconds" in s),
        "difference": largest_difference,
        "met": beyond <= limit and named - deadline <= NAMING_SECONDS and largest_difference <= LIMIT_DIFFERENCE,
    }


def missed_deadline(printed: str) -> float:
    """Return the seconds of the deadline that a rank missed, from what the run printed; 0 if it missed none."""
    match = re.search(r"did not answer `[\w.]+` within ([\d.]+) s", " ".join(printed.split()))
    return float(match.group(1)) if match else 0.0


def start(folder: Path, case: Case, name: str, overrides: str) -> HeldRun:
    """Start a run with the recipe of a case. An earlier one of the same name is removed."""
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    arguments = (f"{case.model}.yaml", *case.overrides.split(), *overrides.split())
    return HeldRun(folder, name, *arguments, program=runs.program)


def disturb(folder: Path, case: Case, overrides: str) -> tuple[float, float, float, HeldRun]:
    """Start a run and harm its last trainer rank within a step. Restart the run if it ends.

    Returns the seconds until the next step was logged, the seconds until the victim was named, the seconds of a usual
    step, and the run.
    """
    run = start(folder, case, "disturbed", f"train.steps={STEPS} {overrides}")
    run.await_steps(3)
    usual = statistics.median(step["time/step_seconds"] for step in run.steps()[1:])
    with run.held(after=3):
        time.sleep(2 * usual)
        ranks, before = run.ranks(), len(run.steps())
        victim = max(rank for rank in ranks if not ("separate" in case.overrides and rank == 2))
        printed, began = len(run.screen()), time.monotonic()
        os.kill(ranks[victim], case.fault)
    if "recover" not in overrides:
        run.driver.wait(PATIENCE_SECONDS)
        named = time.monotonic() - began
        run.start("--resume")
    else:
        run.wait_for(lambda: f"rank {victim} of " in " ".join(run.screen()[printed:].split()))
        named = time.monotonic() - began
    run.await_steps(before + 1)
    return time.monotonic() - began, named, usual, run


def check_resizes(folder: Path) -> dict[str, Any]:
    """Change a run to each of SIZES. Compare it with an undisturbed run, and its received bytes with the plan."""
    case, options = Case(DP_2), "cluster.recover=restart checkpoint.replicate=1"
    # A change follows the step in progress, and two more steps tell it from the next one.
    steps = f"train.steps={3 * len(SIZES)}"
    calm = start(folder, case, "calm", steps)
    calm.finish()
    planned, minimum = [], 0
    for before, after in pairwise(SIZES.values()):
        sizes = ("--from", before, "--to", after, "--json")
        plan = json.loads(output_of("plan", f"{case.model}.yaml", *options.split(), *sizes, folder=folder))
        planned.append(plan["received_bytes"])
        minimum += plan["minimum_bytes"]
    # After the plans: the run does not wait between two changes.
    run = start(folder, case, "resized", f"{steps} {options}")
    for number, after in enumerate([*SIZES.values()][1:]):
        with run.held(after=3 * number + 1):
            output_of("resize", run.path, *after.split(), folder=folder)
        run.wait_for(lambda number=number: len(list_received_bytes(run)) > number)
    run.finish()
    received, changed = list_received_bytes(run), difference(calm.steps(), run.steps())
    is_as_planned = all(abs(a - b) <= 0.01 * b for a, b in zip(received, planned, strict=True))
    ratio = sum(received) / minimum
    return {
        "sizes": " -> ".join(SIZES),
        "received": received,
        "planned": planned,
        "bytes / minimum": ratio,
        "difference": changed,
        "met": is_as_planned and abs(ratio - 1) <= 0.01 and changed <= LIMIT_DIFFERENCE,
    }


def output_of(*arguments: str | Path, folder: Path) -> str:
    """Run a command of megarl in a folder and return its output. Raises SystemExit if it fails."""
    done = runs.run_megarl(*arguments, folder=folder)
    if done.returncode:
        raise SystemExit(f"megarl {arguments[0]} ended with {done.returncode}:\n{runs.output_end(done)}")
    return done.stdout


def list_received_bytes(run: HeldRun) -> list[float]:
    """Return the bytes that ranks received in each change of the sizes so far."""
    return [step["fault/restored_bytes"] for step in run.steps() if "fault/restored_bytes" in step]


def check_cost(folder: Path, num_steps: int) -> dict[str, Any]:
    """Measure how much step time the copies and checksums of a state cost, on two ranks.

    After every `EVERY` steps, each rank computes checksums of its weights and copies its state, within the step's time.
    During the next step it computes checksums of the copy. It sends nothing: both ranks are on one node. So two of
    `EVERY` steps are slower than the two that follow, by the time of a copy. All steps belong to one run, because two
    equal runs differ by up to 25 % here. The wide model has a large state.

    The time of a copy does not depend on the number of samples. It is measured with few samples, where steps are short
    and vary little. The cost per step is this time divided by `EVERY`, relative to the fastest step of `LARGE_BATCH`.
    The check fails if the cost plus two standard errors exceeds the limit.
    """
    options = f"weights.check_every={EVERY} checkpoint.replicate={EVERY} cluster.recover=restart"
    seconds = step_seconds(folder, num_steps, options)
    # The first steps compile and allocate.
    copied = range(EVERY, num_steps - EVERY + 1, EVERY)
    extra = [seconds[step] + seconds[step + 1] - seconds[step + 2] - seconds[step + 3] for step in copied]
    copy, error = statistics.mean(extra), statistics.stdev(extra) / len(extra) ** 0.5
    # The fastest step: another run on this machine may be slower for reasons of its own.
    calm = min([*step_seconds(folder, LARGE_STEPS, LARGE_BATCH).values()][2:])
    return {
        "seconds of a copy": copy,
        "standard error": error,
        "step": calm,
        "cost": copy / EVERY / calm,
        "cost with a copy each step": copy / calm,
        "step that meets the limit then": copy / LIMIT_COST,
        "met": copy + 2 * error <= LIMIT_COST * EVERY * calm,
    }


def step_seconds(folder: Path, num_steps: int, options: str) -> dict[int, float]:
    """Run the wide model on two ranks with these overrides, and return the seconds of each step."""
    run = start(folder, Case(DP_2, model="wide"), "timed", f"train.steps={num_steps} {options}")
    run.finish()
    return {int(step["step"]): step["time/step_seconds"] for step in run.steps()}


def check_kills(folder: Path, num_kills: int, seed: int) -> dict[str, Any]:
    """Kill random processes of one run: the driver, the agent, ranks, fork servers, reward processes, supervisors.

    A run that ends is started again with --resume.
    """
    case, moments = Case("cluster.ranks_per_node=2"), random.Random(seed)
    # A kill costs a step at most, and the wait before it lets the run gain one or two.
    steps = f"train.steps={4 * num_kills + 4}"
    calm = start(folder, case, "calm", steps)
    calm.finish()
    run = start(
        folder,
        case,
        "disturbed",
        f"{steps} cluster.recover=restart cluster.max_restarts={num_kills} checkpoint.replicate=1 "
        "checkpoint.every_steps=5",
    )
    ends: Counter[int] = Counter()
    killed: Counter[str] = Counter()
    while killed.total() < num_kills and not is_over(run, ends):
        reached = last_step(run) + 1
        while last_step(run) < reached and not is_over(run, ends):
            time.sleep(0.01)
        time.sleep(moments.uniform(0.0, 1.0))
        victim = moments.choice(sorted([run.driver.pid, *descendants(run.driver.pid)]))
        name = re.sub(r"\d+", "N", process_name(victim))
        # A process may end by itself meanwhile.
        with suppress(OSError):
            os.kill(victim, signal.SIGKILL)
            killed[name] += 1
    while not is_over(run, ends):
        time.sleep(0.1)
    largest_difference, ledger = difference(calm.steps(), run.steps()), account(run.path)
    weights = [load_file(compared_run.path / "hf/model.safetensors") for compared_run in (calm, run)]
    largest = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    return {
        "killed": ", ".join(f"{name} {count}" for name, count in sorted(killed.items())),
        "restarts": ", ".join(f"{code}: {count}" for code, count in sorted(ends.items())) or "none",
        "difference": largest_difference,
        "weights": largest,
        "ledger": "; ".join(ledger.faults) or "every prompt accounted for",
        "met": killed.total() == num_kills
        and set(ends) <= {-signal.SIGKILL, PeerLostError.exit_code}
        and max(largest_difference, largest) <= LIMIT_DIFFERENCE
        and not ledger.faults,
    }


def is_over(run: HeldRun, ends: Counter[int]) -> bool:
    """Return whether the run is complete. If it ended before, start it again, and count its exit code."""
    if (code := run.driver.poll()) is None:
        return False
    if code == 0:
        return True
    ends[code] += 1
    print(f"ended with {code}: {run.screen().strip().splitlines()[-1:]}", file=sys.stderr)
    run.start("--resume")
    return False


def last_step(run: HeldRun) -> int:
    """Return the number of the run's last complete step; 0: none."""
    return int(max((step["step"] for step in run.steps()), default=0))
