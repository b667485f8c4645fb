"""The tasks that sample groups in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from megarl.config import Recipe
from megarl.rollout.attempt_engine import AttemptEngine
from megarl.rollout.journal.journal import AttemptJournal
from megarl.rollout.recording import StartedGroup
from megarl.rollout.source import Source, sampling_settings


class GroupTasks:
    """One task per group in flight. It runs the group's attempts concurrently, and adds their trajectories to it.

    `journal` records the attempts of external agent programs; None: the run has no agents. `on_end` is called with each
    task that ended.

    With `is_synchronous`, the groups of a step are complete together. `on_sampled` is then called after their last
    completion, while the last rewards are computed. It puts colocated engines to sleep.
    """

    def __init__(
        self,
        recipe: Recipe,
        sources: Mapping[str, Source],
        journal: AttemptJournal | None,
        *,
        is_synchronous: bool,
        on_end: Callable[[asyncio.Future[None]], None],
        on_sampled: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._recipe, self._sources, self._journal = recipe, sources, journal
        self._is_synchronous, self._on_end, self._on_sampled = is_synchronous, on_end, on_sampled
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._engines: dict[int, list[AttemptEngine]] = {}
        self._cancelled: set[asyncio.Task[None]] = set()
        self._sampling: set[tuple[int, int]] = set()
        """(group, attempt) numbers of a synchronous step's attempts with more completions to request."""
        self._engines_sleep: asyncio.Future[None] | None = None
        self.sampled_at = 0.0
        """When a synchronous step got its last completion, on the clock of `time.monotonic`."""

    def is_started(self, draw: int) -> bool:
        return draw in self._tasks

    def start_group(self, group: StartedGroup, seed: str) -> None:
        """Start the unfinished attempts of a group."""
        if self._is_synchronous:
            self._sampling |= {
                (group.draw, attempt_number) for attempt_number in range(self._recipe.train.samples_per_prompt)
            }
        self._engines[group.draw] = []
        task = self._tasks[group.draw] = asyncio.create_task(self._sample(group, seed))
        task.add_done_callback(self._on_end)

    async def _sample(self, group: StartedGroup, seed: str) -> None:
        """Run all unfinished attempts of a group concurrently."""
        async with asyncio.TaskGroup() as tasks:
            for attempt_number in range(self._recipe.train.samples_per_prompt):
                if attempt_number not in group.finished:
                    tasks.create_task(self._run_attempt(group, attempt_number, seed))

    async def _run_attempt(self, group: StartedGroup, attempt_number: int, seed: str) -> None:
        """Run one attempt of a group, and add its trajectory to the group.

        An attempt of an agent program continues from the journal, or ends at once if the journal has its end.
        """
        source = self._sources[group.problem.source]
        sampler = source.sampler
        sampling = sampling_settings(source.recipe.rollout.sampling, group.temperature)
        task = sampler.task(group.problem, group.draw, attempt_number, seed, sampling, prefix="draw ")
        handle_last_completion = partial(self._handle_last_completion, group.draw, attempt_number)
        calls = group.calls.setdefault(attempt_number, [])
        # An agent's answers are in the journal. A deterministic environment is repeated from its recorded calls.
        log = None
        if self._journal is not None and sampler.agent is not None:
            log = self._journal.begin(task.key, repr(sampling))
            if log.ended is not None:
                handle_last_completion()
                group.finish(replace(log.ended, group=group.draw))
                return
            log.merge_into(calls)
        engine = AttemptEngine(sampler.pool, calls, log=log, is_followed=not self._is_synchronous)
        self._engines[group.draw].append(engine)

        # Agents and failed attempts never report their last completion. Their end counts as the end of their sampling.
        trajectory = await sampler.attempt(task, engine, handle_last_completion)
        handle_last_completion()
        trajectory = replace(trajectory, restarts=trajectory.restarts + engine.is_restarted)
        group.finish(trajectory if log is None else await log.end(trajectory))

    def _handle_last_completion(self, draw: int, attempt_number: int) -> None:
        """Record the last completion of an attempt. After the batch's last completion the engines go to sleep."""
        if (draw, attempt_number) not in self._sampling:
            return
        self._sampling.remove((draw, attempt_number))
        if self._sampling:
            return
        self.sampled_at = time.monotonic()
        # A filter may require another batch with the same weights, so keep the engines awake.
        if self._on_sampled is not None and self._recipe.algorithm.dynamic_sampling is None:
            # In a task of its own: a cancelled attempt must not cancel this call to all ranks.
            self._engines_sleep = asyncio.ensure_future(self._on_sampled())
            self._engines_sleep.add_done_callback(self._on_end)

    def find_ended(self) -> list[int]:
        """Return the draws of the complete groups. In a synchronous step, all groups complete together, and only when
        the engines are asleep.

        Raises the error of a failed attempt.
        """
        if self._engines_sleep is not None and self._engines_sleep.done():
            self._engines_sleep.result()
        ended_draws = [draw for draw, task in self._tasks.items() if task.done()]
        for draw in ended_draws:
            try:
                self._tasks[draw].result()
            except ExceptionGroup as errors:
                # TaskGroup collects all errors. The first one is the cause; the others are its consequences.
                raise errors.exceptions[0] from None
        engines_sleep = self._engines_sleep is None or self._engines_sleep.done()
        # Collect a batch as a whole, in its order. The curriculum must not depend on the order in which groups end.
        if self._is_synchronous and (len(ended_draws) < len(self._tasks) or not engines_sleep):
            return []
        return ended_draws

    def remove_group(self, draw: int) -> None:
        """Remove a complete group."""
        del self._tasks[draw], self._engines[draw]

    async def wait_until_engines_sleep(self) -> None:
        """Wait until the engines of a synchronous step are asleep, if they go to sleep. Raises the error of that."""
        if self._engines_sleep is not None:
            sleep, self._engines_sleep = self._engines_sleep, None
            await sleep

    async def wait_until_drained(self) -> None:
        for source in self._sources.values():
            await source.sampler.pool.wait_until_drained()

    def cancel_groups(self, draws: Iterable[int], *, is_dropped: bool = False) -> None:
        """Cancel the groups numbered `draws`, and abort their requests in the engines.

        A resumed run continues these groups, unless `is_dropped`.
        """
        for draw in draws:
            if (task := self._tasks.pop(draw, None)) is not None:
                for engine in self._engines.pop(draw):
                    # Close the engine first: an environment may swallow its cancellation and request more samples.
                    engine.close()
                    if is_dropped and engine.log is not None:
                        engine.log.drop()
                task.cancel()
                self._cancelled.add(task)
                task.add_done_callback(self._handle_cancelled)

    def cancel_all(self, *, is_dropped: bool = False) -> None:
        self.cancel_groups(list(self._tasks), is_dropped=is_dropped)

    async def wait_until_cancelled(self, timeout: float | None = None) -> None:
        """Wait until all cancelled tasks have ended, at most `timeout` seconds."""
        if self._cancelled:
            await asyncio.wait(self._cancelled, timeout=timeout)

    def _handle_cancelled(self, task: asyncio.Task[None]) -> None:
        self._cancelled.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it: asyncio would log an error that nobody awaits
