"""The session that every loop works with: ranks, engines, tracker, validation sets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.cluster.batching import RankModel
from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.loops.checkpointing import Checkpoints
from megarl.loops.performance import Performance
from megarl.loops.profile import Profiles
from megarl.loops.reshards import Reshards
from megarl.loops.resume import Origin
from megarl.loops.stopping import StopRequest
from megarl.platform.spans import span
from megarl.preflight import Dropped
from megarl.rollout.batch import RLBatch
from megarl.rollout.evaluate import evaluate
from megarl.rollout.pool import AbandonedError, EnginePool
from megarl.rollout.samples import with_rendered_prompts
from megarl.rollout.sources import Source
from megarl.rollout.state import Group, RLState
from megarl.rollout.token_records import token_records
from megarl.rollout.tool_use import ToolUse, uncalled_text
from megarl.tracking.health import Health
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker
from megarl.types import MegarlError, StoppedError, Trajectory, UnhealthyError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

METRICS = {
    "data/dropped": ("count", "records that are left out because they are too long"),
    "rollout/routed_experts_bytes": ("bytes", "size of the routed experts that the ranks held for router replay"),
    "kl/reference_moved": (
        "count",
        "1 in steps that move the reference, where algorithm.reference_update_steps is given",
    ),
}
"""Names, units and meanings, for `tracking.table`."""


@dataclass
class Step:
    """A step in progress and its metrics.

    `is_trained`: its updates have begun, so that a signal to stop saves this step and not the one before.
    """

    number: int
    metrics: dict[str, float] = field(default_factory=dict)
    is_trained: bool = False
    fault: MegarlError | None = None
    """The run ends with it after this step, once the step is saved."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics, which are written at the step's end."""
        self.metrics |= metrics


@dataclass(frozen=True)
class Session:
    """A run under way."""

    recipe: Recipe
    layout: ParallelConfig
    folder: RunFolder
    tracker: Tracker
    tokenizer: Tokenizer
    ranks: RunRanks
    """All ranks; those that train are `ranks.trainers`."""
    reshards: Reshards
    models: Mapping[str, RankModel]
    """The recipe's models by name: `policy`, `reference`, `critic`, `reward_model`, `teacher0` and so on."""
    pool: EnginePool
    sources: Sequence[Source]
    """Where problems come from; the order is the recipe's."""
    checkpoints: Checkpoints
    origin: Origin
    """The checkpoint that the run was resumed from, if any."""
    stop: StopRequest
    performance: Performance
    profiles: Profiles
    health: Health
    """The rules that warn of a run which cannot learn, with what they have seen."""
    dropped: Dropped = field(default_factory=Counter)
    """How many records were left out because they are too long, by data source."""
    tool_use: ToolUse = field(default_factory=ToolUse)
    """The tools that the policy has called since this start of the run."""

    async def stop_if_asked(
        self,
        step: int,
        save_driver: Callable[[Path], None] | None = None,
        unlogged: Mapping[str, float] | None = None,
    ) -> None:
        """Save the state after `step` and raise StoppedError, if a signal asked the run to stop.

        `unlogged` are the step's metrics if its evaluation was interrupted: the resumed run repeats it and logs them.
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
        """A step, of RL with its `state`; then its metrics are written, and its fault or a signal ends the run."""
        step = Step(number)
        self.tracker.begin(number)
        await self.performance.begin()
        is_profiled = number in self.recipe.train.profile_steps
        recorded = self.profiles.of_step(number) if is_profiled else nullcontext()
        if self.dropped:
            step.log({"data/dropped": float(self.dropped.total())})
        async with recorded:
            async with self.leaving_in_order(step, state):
                yield step
            with span("log"):
                step.log(await self.performance.of_step(self.tracker.seconds, step.metrics))
                self.log(step)
                self.folder.set_status(step=number)
            await self.checkpoints.complete()
        if step.fault is not None:
            await self._save(number, state and state.save)
            raise step.fault
        await self.stop_if_asked(number, state and state.save)

    def log(self, step: Step) -> None:
        """Log a step's metrics, keep its model if it is the best so far, and warn of what looks wrong.

        That is tools without any call yet, and rules of health that are broken.
        """
        self.tracker.log(step.number, step.metrics)
        self.tool_use.add(step.metrics)
        for tool in self.tool_use.never_called:
            text = uncalled_text([tool], f"up to step {step.number}", f"megarl samples {self.folder.path}")
            self.tracker.notice_once(f"tool {tool} is not called", text)
        self.checkpoints.judge(step.number, step.metrics)
        self._check_health(step)

    def _check_health(self, step: Step) -> None:
        """Warn of rules that are broken; under train.on_unhealthy stop the first of them is the step's fault."""
        findings = self.health.observe(step.number, step.metrics)
        for finding in findings:
            self.tracker.unhealthy(finding)
        if findings and self.recipe.train.on_unhealthy == "stop" and step.fault is None:
            step.fault = UnhealthyError(
                f"train.on_unhealthy = stop: {findings[0].text} The state after the step is saved; go on with: megarl "
                f"train {self.folder.path} --resume"
            )

    @asynccontextmanager
    async def leaving_in_order(self, step: Step, state: RLState | None = None) -> AsyncIterator[None]:
        """Where sampling is abandoned within because the run is to stop: save what stands, raise StoppedError.

        Before the step's updates that is the step before, from its update on this one, without its evaluation.
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
                    state.forget_step()
                await self.stop_if_asked(step.number - 1, save_driver)
            raise

    async def _save(
        self,
        step: int,
        save_driver: Callable[[Path], None] | None,
        unlogged: Mapping[str, float] | None = None,
    ) -> None:
        """Save a checkpoint out of turn, with the engines asleep."""
        await self.sleep_engines()
        await self.checkpoints.save(step, save_driver, unlogged)
        # The run ends with it.
        await self.profiles.finish()

    async def sleep_engines(self) -> None:
        """Free the engines' memory for the trainer until the next reshard; what they sample is parked until then.

        Engines with ranks of their own never sleep: they go on. Those that sleep already do so undisturbed.
        """
        # Here alone engines that share their ranks are held, and a reshard wakes them before it releases them.
        if self.ranks.is_separate or self.pool.is_held:
            return
        with span("sleep engines"):
            await self.pool.hold()
            await self.ranks.trainers.call("sleep_engine")

    async def retain_experts(self, state: RLState) -> dict[str, float]:
        """With router replay, drop the routed experts on the ranks but those of groups that wait for a later step.

        Metric: `rollout/routed_experts_bytes`, their size before.
        """
        if not self.recipe.trainer.router_replay:
            return {}
        with span("retain experts"):
            held = await self.ranks.trainers.call("retain_experts", state.waiting_experts)
        return {"rollout/routed_experts_bytes": float(sum(held))}

    async def move_reference(self, step: int) -> dict[str, float]:
        """Move the reference towards the policy after a step's updates, if it is due. Metric: `kl/reference_moved`."""
        every = self.recipe.algorithm.reference_update_steps
        if every is None or not self.recipe.has_reference:
            return {}
        is_due = step % every == 0
        if is_due:
            await self.ranks.trainers.call("move_reference")
        return {"kl/reference_moved": float(is_due)}

    @property
    def steps(self) -> range:
        """The remaining steps."""
        return range(self.folder.resumed_step + 1, self.recipe.train.steps + 1)

    async def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of all validation sets, as `rollout.evaluate.EvaluatedSet`, and of the engines meanwhile.

        The trajectories go to samples/.

        Raises AbandonedError, and writes nothing, where the run is to stop before all sets are through.
        """
        with self.tracker.phase("evaluation"):
            found = [done async for done in evaluate(self.sources, self.recipe.reward.max_failed_fraction)]
        sampled = self.pool.evaluation_metrics()
        for done in found:
            await self._write(step, done.records(), done.trajectories)
        return sampled | {name: value for done in found for name, value in done.metrics.items()}

    async def write_samples(
        self, step: int, trajectories: Sequence[Trajectory], of_tokens: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Write a step's trajectories to samples/, if samples of this step are due, and the records `of_tokens`."""
        if step % self.recipe.samples_every_steps == 0:
            await self._write(step, [trajectory.record() for trajectory in trajectories], trajectories)
        if of_tokens:
            self.tracker.token_samples(step, of_tokens)

    async def _write(self, step: int, records: Sequence[Mapping[str, Any]], trajectories: Sequence[Trajectory]) -> None:
        """Write the trajectories' records to samples/ in a thread.

        Thousands of records take seconds, in which the driver must answer others.
        """

        def write() -> None:
            self.tracker.samples(step, [*with_rendered_prompts(records, trajectories, self.tokenizer)])

        writing = asyncio.ensure_future(asyncio.to_thread(write))
        with span("samples"):
            try:
                await asyncio.shield(writing)
            finally:
                # Where the run ends meanwhile, its files are closed after this.
                await asyncio.wait([writing])

    async def token_records(self, step: int, groups: Sequence[Group], batch: RLBatch) -> list[dict[str, Any]]:
        """Records of a few of a step's samples token by token, before its update, if samples of this step are due."""
        count = self.recipe.samples_with_tokens
        if not count or step % self.recipe.samples_every_steps:
            return []
        with self.tracker.phase("logprobs"):
            return await token_records(
                groups,
                batch,
                self.tokenizer,
                self.models["policy"].forward,
                count=count,
                weight_version=step,
                starts_from_rollout=self.recipe.algorithm.old_logprobs == "rollout",
            )

    @property
    def evaluates_first(self) -> bool:
        """Whether the run evaluates before its first step."""
        return self.recipe.evaluation.at_start or not self.recipe.train.steps

    def evaluates_at(self, step: int) -> bool:
        """As `Recipe.evaluates_at`."""
        return self.recipe.evaluates_at(step)
