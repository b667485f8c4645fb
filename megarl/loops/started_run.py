"""A started training run, as its loop sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

from megarl.cluster.rank_model import RankModel
from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.loops.measuring.performance import Performance
from megarl.loops.measuring.profiles import Profiles
from megarl.loops.observers.step_observer import StepObservers
from megarl.loops.ranks.rank_processes import RankProcesses
from megarl.loops.ranks.resizing import ResizeAskedError, take_request
from megarl.loops.reshard_schedule import ReshardSchedule
from megarl.loops.run_data import RunData
from megarl.loops.sample_writer import SampleWriter
from megarl.loops.saving.checkpointing import Checkpoints
from megarl.loops.saving.resume import Origin
from megarl.loops.step import Step
from megarl.loops.stopping import StopRequest
from megarl.platform.spans import span
from megarl.rollout.evaluate import EvaluatedSet, evaluate
from megarl.rollout.pool import AbandonedError, EnginePool
from megarl.rollout.state import RLState
from megarl.tracking.metric_rows import MetricRow
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker
from megarl.types import MegarlError, StoppedError

Evaluate = Callable[[int], Awaitable[dict[str, float]]]
"""Async function that evaluates the model after a step. Returns metrics, or raises AbandonedError."""

METRICS = (MetricRow("data/dropped", "count", "records dropped because they are too long"),)


@dataclass(frozen=True, kw_only=True)
class StepWatch:
    """The parts that measure and check a run's steps."""

    performance: Performance
    profiles: Profiles
    observers: StepObservers


@dataclass(frozen=True, kw_only=True)
class Run:
    """A started run: its recipe, its folder, and the parts that compute, save and watch its steps."""

    recipe: Recipe
    folder: RunFolder
    origin: Origin
    """Checkpoint that the run continues from, if any."""
    tracker: Tracker
    stop: StopRequest
    """Request to stop. If it is set, a step saves to `checkpoints` and raises StoppedError."""
    data: RunData
    processes: RankProcesses
    ranks: RunRanks
    models: Mapping[str, RankModel]
    """The recipe's models by name: `policy`, `reference`, `critic`, `reward_model`, `teacher0` and so on."""
    pool: EnginePool
    reshard_schedule: ReshardSchedule
    checkpoints: Checkpoints
    samples: SampleWriter
    watch: StepWatch

    @property
    def remaining_steps(self) -> range:
        return range(self.folder.resumed_step + 1, self.recipe.train.steps + 1)

    async def evaluate_at_start(self, evaluate: Evaluate, state: RLState | None = None) -> None:
        """Evaluate before the first step. After a resume, make up for the last step's interrupted evaluation.

        `state` is the RL loop's state, saved if a stop signal ends the run.
        """
        step_number = self.folder.resumed_step
        if not (self.folder.lacks_evaluation if step_number else self.recipe.evaluates_first):
            return
        try:
            metrics = await evaluate(step_number)
        except AbandonedError:
            await self._stop_if_asked(step_number, state)
            raise
        fault = self._log_evaluation(step_number, metrics)
        if fault is not None:
            raise fault

    @asynccontextmanager
    async def step(self, step_number: int, evaluate: Evaluate, state: RLState | None = None) -> AsyncIterator[Step]:
        """Context of one training step. At its end it logs metrics, and runs `evaluate` if an evaluation is due.

        Then a fault or a stop signal ends the run. `state` is the RL loop's state, saved with the step.
        """
        step = Step(step_number)
        self.tracker.begin(step_number)
        # Before the step's first call to the ranks, so that start-up does not count.
        await self.watch.performance.begin_measuring()
        step.log(self.processes.take_metrics())
        await self.ranks.begin_step(step_number)
        if self.data.dropped:
            step.log({"data/dropped": float(self.data.dropped.total())})
        is_profiled = step_number in self.recipe.train.profile_steps
        async with self.watch.profiles.record_step(step_number) if is_profiled else nullcontext():
            async with self._saving_when_abandoned(step_number, state):
                yield step
            fault = await self._log_step(step)
            if self.recipe.evaluates_at(step_number):
                evaluation_fault = await self._evaluate_unless_abandoned(step_number, evaluate)
                fault = fault or evaluation_fault
            else:
                self.checkpoints.keep_if_best(step_number, {})
            # An asynchronous save is published at the end of the first step after it was written.
            await self.checkpoints.complete_save()
        if fault is not None:
            # Saved first, so that a resumed run continues after this step.
            await self._save_checkpoint(step_number, state)
            raise fault
        await self._stop_if_asked(step_number, state)
        await self._resize_if_asked(step_number, state)

    @asynccontextmanager
    async def updating(self, step: Step) -> AsyncIterator[None]:
        with self.tracker.phase("train"):
            await self.watch.observers.before_updates(step)
            yield
            await self.watch.observers.after_updates(step)

    async def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of all validation sets (`rollout.evaluate.EvaluatedSet`) and of the engines.

        Trajectories are written to samples/. A stop signal raises AbandonedError, and nothing is written then.
        """
        with self.tracker.phase("evaluation"):
            sets = await self.ranks.watching(self._evaluated_sets())
        # Read after all sets, so that the tokens of the whole evaluation count.
        metrics = self.pool.evaluation_metrics()
        for evaluated_set in sets:
            await self.samples.write(step, evaluated_set.records(), evaluated_set.trajectories)
            metrics |= evaluated_set.metrics
        return metrics

    async def _evaluated_sets(self) -> list[EvaluatedSet]:
        return [
            evaluated_set async for evaluated_set in evaluate(self.data.sources, self.recipe.reward.max_failed_fraction)
        ]

    def abandon_if_asked(self) -> None:
        """Raise AbandonedError if a signal asked the run to stop. Call it before the step's updates.

        Then only this step's samples are lost, because the previous step's state is saved.
        """
        if self.stop:
            raise AbandonedError

    @asynccontextmanager
    async def _saving_when_abandoned(self, step_number: int, state: RLState | None) -> AsyncIterator[None]:
        """Context that saves the previous step and raises StoppedError if a stop signal aborts this step's sampling."""
        try:
            yield
        except AbandonedError:
            if state is not None:
                # A resumed run samples this step again, so its groups must not count as drawn.
                state.forget_step()
            await self._stop_if_asked(step_number - 1, state)
            raise

    async def complete_background_work(self) -> None:
        await self.reshard_schedule.finish_reshard()
        await self.watch.profiles.finish()
        await self.checkpoints.complete_save(wait=True)

    async def _log_step(self, step: Step) -> MegarlError | None:
        """Measure and log a step, before its evaluation. Return the error that ends the run, or None."""
        with span("log"):
            await self.watch.observers.observe(step)
            step.log(self.checkpoints.copies.take_metrics())
            step.log(await self.watch.performance.measure_step(self.tracker.seconds, step.metrics))
            await self.watch.observers.observe_measured(step)
            self.tracker.log(step.number, step.metrics, evaluation_follows=self.recipe.evaluates_at(step.number))
            self.folder.set_status(step=step.number)
            return self.watch.observers.find_fault(step)

    async def _evaluate_unless_abandoned(self, step_number: int, evaluate: Evaluate) -> MegarlError | None:
        """Evaluate a step's model and log the result. Return the error that ends the run, or None.

        A stop signal aborts the evaluation, and nothing is logged. The resumed run makes up for it.
        """
        try:
            metrics = await evaluate(step_number)
        except AbandonedError:
            return None
        performance = await self.watch.performance.measure_evaluation(self.tracker.seconds)
        return self._log_evaluation(step_number, metrics | performance.evaluation, performance.whole_step_metrics)

    def _log_evaluation(
        self, step_number: int, metrics: dict[str, float], whole_step_metrics: Mapping[str, float] | None = None
    ) -> MegarlError | None:
        """Log a step's evaluation, and keep its model if it is the best. Return the error that ends the run, or None.

        `whole_step_metrics` are over the time of step and evaluation together.
        """
        self.tracker.log_evaluation(step_number, metrics, whole_step_metrics or {})
        self.checkpoints.keep_if_best(step_number, metrics)
        return self.watch.observers.find_fault(Step(step_number, metrics))

    async def _stop_if_asked(self, step: int, state: RLState | None) -> None:
        """Save the state after `step` and raise StoppedError, if a signal asked the run to stop."""
        if not self.stop:
            return
        saved_text = "there is nothing to save yet"
        if step > 0:
            await self._save_checkpoint(step, state)
            saved_text = f"saved after step {step} of {self.recipe.train.steps}"
        raise StoppedError(
            f"{self.stop.signal_name}: {saved_text}; go on with: megarl train {self.folder.path} --resume"
        )

    async def _resize_if_asked(self, step: int, state: RLState | None) -> None:
        """Copy the state after `step` and raise ResizeAskedError, if the run shall have other parallel sizes.

        The reason is a `megarl resize`, or lost nodes that have come back.
        """
        try:
            resized_recipe = take_request(self.folder.path, self.recipe)
            if step == self.recipe.train.steps:
                if resized_recipe is not None:
                    self.tracker.notice("the run is not resized, because this was its last step")
                return
            if resized_recipe is not None:
                await self.ranks.reserve(resized_recipe.parallel.world_size, resized_recipe.parallel.replica_sizes)
        except MegarlError as error:
            self.tracker.notice(f"the run cannot be resized: {error}")
            return
        # Without a request: back to the run's full size, if lost nodes have come back.
        resized_recipe = resized_recipe or self.processes.find_growth()
        if resized_recipe is None:
            return
        await self.complete_background_work()
        await self.reshard_schedule.sleep_engines()
        await self.checkpoints.copy_to_memory(step, state and state.save)
        # A signal may have arrived meanwhile.
        await self._stop_if_asked(step, state)
        raise ResizeAskedError(resized_recipe)

    async def _save_checkpoint(self, step: int, state: RLState | None) -> None:
        """Save a checkpoint in addition to the regular ones, with the engines asleep."""
        await self.reshard_schedule.sleep_engines()
        await self.checkpoints.save(step, state and state.save)
        # The run ends after this save, so pending traces are written now.
        await self.watch.profiles.finish()
