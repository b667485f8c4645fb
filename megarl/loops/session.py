"""Session of a run: the objects shared by all loops (ranks, engines, tracker, validation sets)."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.cluster.rank_model import RankModel
from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.loops.checkpointing import Checkpoints
from megarl.loops.performance import Performance, Profiles
from megarl.loops.reshards import Reshards
from megarl.loops.resume import Origin
from megarl.loops.sample_writer import SampleWriter
from megarl.loops.stopping import StopRequest
from megarl.platform.spans import span
from megarl.preflight import Dropped
from megarl.rollout.evaluate import evaluate
from megarl.rollout.pool import AbandonedError, EnginePool
from megarl.rollout.source import Source
from megarl.rollout.state import RLState
from megarl.rollout.tool_use import ToolUse, uncalled_text
from megarl.tracking.health import Health
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker
from megarl.types import MegarlError, StoppedError, UnhealthyError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

METRICS = {
    "data/dropped": ("count", "records dropped because they are too long"),
    "rollout/routed_experts_bytes": ("bytes", "size of the routed experts held by the ranks for router replay"),
    "kl/reference_moved": ("count", "1 in steps moving the reference, with algorithm.reference_update_steps"),
}
"""Units and meanings by metric name, for `tracking.table`."""


@dataclass
class Step:
    """Step in progress, with its metrics.

    `is_trained`: its updates have begun. A stop signal then saves this step, else the previous one.
    """

    number: int
    metrics: dict[str, float] = field(default_factory=dict)
    is_trained: bool = False
    fault: MegarlError | None = None
    """Error ending the run after this step is saved. None: the run continues."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics. They are written at the step's end."""
        self.metrics |= metrics


@dataclass(frozen=True)
class Session:
    """Run under way, with all its parts."""

    recipe: Recipe
    folder: RunFolder
    tracker: Tracker
    tokenizer: Tokenizer
    ranks: RunRanks
    """All ranks. `ranks.trainers` are the training ones."""
    reshards: Reshards
    models: Mapping[str, RankModel]
    """The recipe's models by name: `policy`, `reference`, `critic`, `reward_model`, `teacher0` and so on."""
    pool: EnginePool
    sources: Sequence[Source]
    """Sources of problems, in the order of the recipe."""
    samples: SampleWriter
    checkpoints: Checkpoints
    origin: Origin
    """Checkpoint the run was resumed from, if any."""
    stop: StopRequest
    performance: Performance
    profiles: Profiles
    health: Health
    """Rules warning of a run unable to learn, with their state."""
    dropped: Dropped = field(default_factory=Counter)
    """Number of records dropped because they are too long, by data source."""
    tool_use: ToolUse = field(default_factory=ToolUse)
    """Tools called by the policy since this start of the run."""

    async def stop_if_asked(
        self,
        step: int,
        save_driver: Callable[[Path], None] | None = None,
        unlogged: Mapping[str, float] | None = None,
    ) -> None:
        """Save the state after `step` and raise StoppedError, if a signal asked the run to stop.

        `unlogged` are the step's metrics if its evaluation was interrupted. The resumed run repeats the evaluation and
        logs them.
        """
        if not self.stop:
            return
        saved = "there is nothing to save yet"
        if step > 0:
            await self._save(step, save_driver, unlogged)
            saved = f"saved after step {step} of {self.recipe.train.steps}"
        raise StoppedError(f"{self.stop.by}: {saved}; go on with: megarl train {self.folder.path} --resume")

    @asynccontextmanager
    async def step(self, number: int, state: RLState | None = None) -> AsyncIterator[Step]:
        """Enter a context for one training step. At its end, log metrics; end the run on a fault or a stop signal.

        `state`: state of the RL loop, saved with the step.
        """
        step = Step(number)
        self.tracker.begin(number)
        # Before the step's first call to the ranks, so that start-up does not count.
        await self.performance.begin()
        is_profiled = number in self.recipe.train.profile_steps
        recorded = self.profiles.record_step(number) if is_profiled else nullcontext()
        if self.dropped:
            step.log({"data/dropped": float(self.dropped.total())})
        async with recorded:
            async with self.leaving_in_order(step, state):
                yield step
            with span("log"):
                step.log(await self.performance.measure_step(self.tracker.seconds, step.metrics))
                self.log(step)
                self.folder.set_status(step=number)
            # An asynchronous save is published at the end of the first step after it was written.
            await self.checkpoints.complete()
        if step.fault is not None:
            # Saved first, so that a resumed run continues after this step.
            await self._save(number, state and state.save)
            raise step.fault
        await self.stop_if_asked(number, state and state.save)

    def finish(self, step: Step) -> None:
        """Log a step made outside `step`, and end the run on its fault. A checkpoint of its state exists already."""
        self.log(step)
        if step.fault is not None:
            raise step.fault

    def log(self, step: Step) -> None:
        """Log a step's metrics, keep its model if it is the best so far, and warn of problems.

        Problems are tools never called so far, and broken health rules.
        """
        self.tracker.log(step.number, step.metrics)
        self.tool_use.add(step.metrics)
        for tool in self.tool_use.never_called:
            text = uncalled_text([tool], f"up to step {step.number}", f"megarl samples {self.folder.path}")
            self.tracker.notice_once(f"tool {tool} is not called", text)
        self.checkpoints.judge(step.number, step.metrics)
        self._check_health(step)

    def _check_health(self, step: Step) -> None:
        """Warn of broken health rules. If train.on_unhealthy = stop, the first of them is the step's fault."""
        findings = self.health.observe(step.number, step.metrics)
        for finding in findings:
            self.tracker.unhealthy(finding)
        if findings and self.recipe.train.on_unhealthy == "stop" and step.fault is None:
            step.fault = UnhealthyError(
                f"train.on_unhealthy = stop: {findings[0].text} The state after the step is saved; go on with: "
                f"megarl train {self.folder.path} --resume"
            )

    @asynccontextmanager
    async def leaving_in_order(self, step: Step, state: RLState | None = None) -> AsyncIterator[None]:
        """Save the progress and raise StoppedError if a stop signal aborts sampling within.

        Before the step's updates, the previous step is saved. After them, this step is saved without its evaluation.
        """
        try:
            yield
        except AbandonedError:
            save_driver = state and state.save
            if step.is_trained:
                self.folder.set_status(step=step.number)
                await self.stop_if_asked(step.number, save_driver, unlogged=step.metrics)
            else:
                if state is not None:
                    # This step will be sampled again, so its groups must not count as drawn.
                    state.forget_step()
                await self.stop_if_asked(step.number - 1, save_driver)
            raise

    async def _save(
        self,
        step: int,
        save_driver: Callable[[Path], None] | None,
        unlogged: Mapping[str, float] | None = None,
    ) -> None:
        """Save a checkpoint outside of the regular steps, with the engines asleep."""
        await self.sleep_engines()
        await self.checkpoints.save(step, save_driver, unlogged)
        # The run ends after this save, so pending traces are written now.
        await self.profiles.finish()

    async def sleep_engines(self) -> None:
        """Free the engines' memory for the trainer until the next reshard. Their requests pause until then.

        Separate engines never sleep. Engines asleep already are left alone.
        """
        # Colocated engines are paused by this method only. `Reshards.run` wakes the engines, then resumes the pool.
        if self.ranks.is_separate or self.pool.is_paused:
            return
        with span("sleep engines"):
            await self.pool.pause()
            await self.ranks.trainers.call("sleep_engine")

    async def retain_experts(self, state: RLState) -> dict[str, float]:
        """Drop the ranks' routed experts, except for groups waiting for a later step. Used with router replay only.

        Metric: `rollout/routed_experts_bytes`, their size before.
        """
        if not self.recipe.trainer.router_replay:
            return {}
        with span("retain experts"):
            held = await self.ranks.trainers.call("retain_experts", state.waiting_experts)
        return {"rollout/routed_experts_bytes": float(sum(held))}

    async def move_reference(self, step: int) -> dict[str, float]:
        """Move the reference towards the policy after a step's updates, if due. Metric: `kl/reference_moved`."""
        every = self.recipe.algorithm.reference_update_steps
        if every is None or not self.recipe.has_reference:
            return {}
        is_due = step % every == 0
        if is_due:
            await self.ranks.trainers.call("move_reference")
        return {"kl/reference_moved": float(is_due)}

    @property
    def steps(self) -> range:
        """Remaining steps."""
        return range(self.folder.resumed_step + 1, self.recipe.train.steps + 1)

    async def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of all validation sets (see `rollout.evaluate.EvaluatedSet`) and of the engines.

        The trajectories are written to samples/. Raises AbandonedError, and writes nothing, if a stop signal comes
        first.
        """
        with self.tracker.phase("evaluation"):
            found = [done async for done in evaluate(self.sources, self.recipe.reward.max_failed_fraction)]
        # Read after all sets, so that the tokens of the whole evaluation count.
        sampled = self.pool.evaluation_metrics()
        for done in found:
            await self.samples.write(step, done.records(), done.trajectories)
        return sampled | {name: value for done in found for name, value in done.metrics.items()}

    @property
    def evaluates_first(self) -> bool:
        """Whether the run evaluates before its first step."""
        return self.recipe.evaluation.at_start or not self.recipe.train.steps
