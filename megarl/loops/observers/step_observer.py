"""Interface of observers of a run's steps."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.loops.saving.resume import Origin
from megarl.loops.step import Step, StepSamples
from megarl.rollout.step.rl_batch import RLBatch
from megarl.types import MegarlError


class StepObserver:
    """An observer of a run's steps, such as weight checks or health rules.

    All methods except `find_fault` and `end_run` may raise MegarlError, which ends the run at once.
    """

    async def begin_run(self) -> None:
        """Prepare for the first step. The models are built, but no checkpoint is loaded yet."""

    async def resume_run(self, origin: Origin) -> None:
        """Prepare for the first step after a checkpoint has been loaded."""

    async def before_updates(self, step: Step) -> None:
        """Observe the trainer's weights before a step's first update."""

    async def after_updates(self, step: Step) -> None:
        """Observe the weights made by a step's updates, or replace them. The trainer is in memory."""

    async def observe_batch(self, step: Step, samples: StepSamples, batch: RLBatch) -> None:
        """Observe the samples and the trained batch of a step of loop rl, after its updates."""

    async def observe(self, step: Step) -> None:
        """Observe a step's outcome, and add metrics before it is logged."""

    async def observe_measured(self, step: Step) -> None:
        """Observe a step's times and peak memory, and add metrics before it is logged."""

    def find_fault(self, step: Step) -> MegarlError | None:
        """Warn of problems in a logged step. Return the error that ends the run after a save, or None."""

    def end_run(self) -> None:
        """Report on all steps of this start, after the last one."""


class StepObservers(StepObserver):
    """Several observers, called in their order."""

    def __init__(self, observers: Sequence[StepObserver]) -> None:
        self._observers = tuple(observers)

    async def begin_run(self) -> None:
        for observer in self._observers:
            await observer.begin_run()

    async def resume_run(self, origin: Origin) -> None:
        for observer in self._observers:
            await observer.resume_run(origin)

    async def before_updates(self, step: Step) -> None:
        for observer in self._observers:
            await observer.before_updates(step)

    async def after_updates(self, step: Step) -> None:
        for observer in self._observers:
            await observer.after_updates(step)

    async def observe_batch(self, step: Step, samples: StepSamples, batch: RLBatch) -> None:
        for observer in self._observers:
            await observer.observe_batch(step, samples, batch)

    async def observe(self, step: Step) -> None:
        for observer in self._observers:
            await observer.observe(step)

    async def observe_measured(self, step: Step) -> None:
        for observer in self._observers:
            await observer.observe_measured(step)

    def find_fault(self, step: Step) -> MegarlError | None:
        """Return the first observer's error. All observers are called, so each one warns."""
        faults = [observer.find_fault(step) for observer in self._observers]
        return next((fault for fault in faults if fault is not None), None)

    def end_run(self) -> None:
        for observer in self._observers:
            observer.end_run()
