"""`megarl train` with measurements of each step: a product of matrices before it, and the GPU's busy share during it.

    python tools/bench/measured/measured_run.py GEMM_WIDTH train RECIPE [section.field=value ...]

The measurements are metrics of the step, named `bench/...`. Other programs use `run_measured`: it changes settings of
the trainer before steps, and measures more when all steps are made.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from megarl.loops.started_run import Evaluate, Run
from megarl.loops.step import Step
from megarl.rollout.state import RLState
from megarl.types import StoppedError
from tools.bench.measured.run_plan import Settings
from tools.bench.parts.device_parts import GpuSamples, means_of

GEMM_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class MeasuredRun(Run):
    """A run whose steps have the metrics `bench/...`.

    `plan` has the settings of each step; None: those of the recipe, for the recipe's steps. `on_step(number)` is called
    after each.
    """

    samples_of_gpu: GpuSamples
    gemm_width: int
    plan: Sequence[Settings] | None = None
    on_step: Callable[[int], None] = lambda number: None

    @property
    def remaining_steps(self) -> range:
        return super().remaining_steps if self.plan is None else range(1, len(self.plan) + 1)

    @asynccontextmanager
    async def step(self, step_number: int, evaluate: Evaluate, state: RLState | None = None) -> AsyncIterator[Step]:
        began = time.monotonic()
        if self.plan is not None:
            settings = self.plan[step_number - 1]
            await self.ranks.trainers.call("change_settings", settings.offload, settings.recompute)
        [products, *_] = await self.ranks.trainers.call("gemm_tflops", self.gemm_width, GEMM_ROUNDS)
        # They are a part of the time since the previous step, which the tracker counts for all steps but the first.
        own_seconds = time.monotonic() - began if step_number > self.remaining_steps.start else 0.0
        self.samples_of_gpu.take()
        async with super().step(step_number, evaluate, state) as step:
            yield step
            means = means_of(self.samples_of_gpu.take())
            step.log({f"bench/{name}": value for name, value in means.items()})
            step.log({"bench/gemm_tflops": statistics.median(products), "bench/own_seconds": own_seconds})
        self.on_step(step_number)


def with_measurements(run: Run, samples: GpuSamples, **fields: Any) -> MeasuredRun:
    """Return a run whose steps are measured."""
    parts = {field.name: getattr(run, field.name) for field in dataclasses.fields(Run)}
    return MeasuredRun(**parts, samples_of_gpu=samples, **fields)


Loop = Callable[[Run], Awaitable[None]]


def run_measured(arguments: Sequence[str], loop: Loop) -> int:
    """Run megarl's command line in this process with another loop for `loop: rl`. Returns the exit code."""
    from megarl.cli import main
    from megarl.loops import run
    from megarl.loops.ranks import rank_start

    run.LOOPS["rl"] = loop
    rank_start.COLOCATED_WORKER = "tools.bench.measured.measured_worker:MeasuredWorker"
    sys.argv = ["megarl", *arguments]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


async def train(run: Run, gemm_width: int) -> None:
    """Make the recipe's steps, with measurements."""
    from megarl.loops import rl

    with GpuSamples() as samples:
        await rl.train(with_measurements(run, samples, gemm_width=gemm_width))


async def train_by_plan(
    run: Run,
    gemm_width: int,
    plan: Sequence[Settings],
    on_step: Callable[[int], None],
    then: Callable[[Run], Awaitable[None]],
) -> None:
    """Make one step for each of the plan's settings, then call `then`. Ends the run without an export."""
    from megarl.loops import rl

    with GpuSamples() as samples:
        await rl.train(with_measurements(run, samples, gemm_width=gemm_width, plan=plan, on_step=on_step))
        await then(run)
    raise StoppedError("all that was to be measured is measured")


if __name__ == "__main__":
    sys.exit(run_measured(sys.argv[2:], partial(train, gemm_width=int(sys.argv[1]))))
