"""Pool of processes for reward functions. A process is replaced if it fails or exceeds its time limit.

One thread a process talks to it over a socket; the event loop only awaits the threads. A process scores one completion
at a time, so killing it loses no other. Scoring servers (`served`) are asked by the event loop itself.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from megarl.rewards.calling import Sample
from megarl.rewards.http_rewards import COUNTED_FOR, ServedReward, ServerFailedError, served_reward
from megarl.rewards.results import FunctionScore, combined, with_served
from megarl.rewards.reward_process import RewardWorker, Scored, WorkerSettings
from megarl.terminal import FirstOfEachKind

METRICS = {
    "reward/lost_processes": (
        "count",
        "reward processes that ended while scoring a sample, retried once in a fresh process",
    ),
}
"""Names, units and meanings, for `tracking.table`."""


class Scorer(Protocol):
    """Reward process, on this node or another."""

    def ask(self, sample: Sample) -> Scored:
        """See `RewardWorker.ask`."""
        ...

    def interrupt(self) -> None:
        """See `RewardWorker.interrupt`."""
        ...

    def close(self) -> None:
        """Kill it."""


class _Scoring:
    """Scoring of a completion in a thread, until it is done or its score is no longer wanted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Scorer | None = None
        self._is_unwanted = False

    def run(self, worker: Scorer, sample: Sample) -> Scored:
        with self._lock:
            if self._is_unwanted:
                return Scored.failed("error", "nobody waits for this score")
            self._worker = worker
        try:
            return worker.ask(sample)
        finally:
            with self._lock:
                self._worker = None

    def give_up(self) -> None:
        """Interrupt the scoring: its process, if at work on it, is killed."""
        with self._lock:
            self._is_unwanted = True
            if self._worker is not None:
                self._worker.interrupt()


MakeScorer = Callable[[WorkerSettings, str | None], Scorer]
"""Function starting a process for reward functions. The text is the path of its output's log."""


class RewardPool:
    """Scores completions in `num_workers` processes living until `close`.

    A completion gets score zero and a `Scored.failure` if scoring exceeds a time limit, raises, ends its process, or
    returns anything not accepted by `scores`. The settings may drop such completions instead. Time counts from when a
    process with imported functions takes the completion. Construction starts the processes without waiting for them.
    Without functions there are no processes, and rewards come from servers, or are zero. Raises ConfigError for wrong
    settings of a server.

    `make_worker` creates the processes, here or elsewhere. Their output goes to `log_folder/reward_NNNN.log`, numbered
    from `first_log`. `notice` is called with the first failure of each kind.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        num_workers: int,
        log_folder: Path | None = None,
        first_log: int = 0,
        notice: Callable[[str], object] = lambda text: None,
        make_worker: MakeScorer = RewardWorker,
    ) -> None:
        self._notices = FirstOfEachKind(notice)
        self._settings = settings
        self._served: dict[str, ServedReward[Any]] = {one.name: served_reward(one) for one in settings.served}
        for one in self._served.values():
            one.tell_once = self._notices.tell
        self._weights = {one.name: one.weight for one in settings.served}
        self._num_lost: Counter[str] = Counter()
        num_workers = num_workers if settings.functions else 0
        numbers = range(first_log, first_log + num_workers)
        logs = [str(log_folder.absolute() / f"reward_{n:04d}.log") if log_folder else None for n in numbers]
        self._workers = [make_worker(settings, log) for log in logs]
        self._idle: queue.SimpleQueue[Scorer] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(max(1, num_workers), thread_name_prefix="reward")

    def __len__(self) -> int:
        """Return the number of processes."""
        return len(self._workers)

    async def score(self, sample: Sample) -> Scored:
        """Return the weighted sum of the functions' scores. Format and answer are good if all functions judging them
        agree.

        Any number of calls may be awaited concurrently; each waits for a free process. Raises ConfigError if a function
        cannot be imported, PeerLostError if the processes do not start or the pool is closed. If cancelled, the process
        is killed and replaced, so that it does not continue unwanted work.
        """
        if not self._served and not self._workers:
            scored = Scored(combined({}, {}, {}))
        elif not self._served:
            scored = await self._by_functions(sample)
        else:
            scored = await self._by_all(sample)
        if failure := scored.failure:
            scored = replace(scored, is_left_out=self._settings.on_failure == "leave_out")
            if self._settings.judging == "none":
                scored = replace(scored, reward=replace(scored.reward, answer_correct=None))
            fate = "is left out" if scored.is_left_out else "gets zero"
            self._notices.tell(
                failure,
                f"a completion could not be scored and {fate} (the first of reward/{failure}s, more are only "
                f"counted): {scored.detail}",
            )
        return scored

    async def _by_functions(self, sample: Sample) -> Scored:
        loop = asyncio.get_running_loop()
        scoring = _Scoring()
        try:
            scored = await loop.run_in_executor(self._threads, self._score, scoring, sample)
        except asyncio.CancelledError:
            scoring.give_up()
            raise
        if scored.num_lost:
            self._num_lost[COUNTED_FOR.get()] += scored.num_lost
            text = "a reward process ended while it had a sample; a fresh process scored it once more"
            self._notices.tell("lost process", f"{text} (the first of reward/lost_processes, more are only counted)")
        return scored

    async def _by_all(self, sample: Sample) -> Scored:
        """Return the scores of functions and servers, run concurrently. A server's failure is reported before a
        function's."""
        asked: list[Awaitable[Scored | FunctionScore | ServerFailedError]]
        asked = [_by_server(one, sample) for one in self._served.values()]
        if self._workers:
            asked.append(self._by_functions(sample))
        tasks = [asyncio.ensure_future(one) for one in asked]
        try:
            found = await asyncio.gather(*tasks)
        # One failure fails the sample, so the remaining calls would be wasted.
        finally:
            for task in tasks:
                task.cancel()
        own = None
        served: dict[str, FunctionScore] = {}
        for name, one in zip([*self._served, ""], found, strict=False):
            if isinstance(one, ServerFailedError):
                return Scored.failed(one.kind, f"{name}: {one}")
            if isinstance(one, FunctionScore):
                served[name] = one
            elif one.failure:
                return one
            else:
                own = one
        settled = (served, self._weights, self._settings.judges, self._settings.correct_score)
        try:
            if own is None:
                return Scored(with_served(None, *settled))
            flags = {"judges_format": own.judges_format, "judges_answer": own.judges_answer}
            return Scored(with_served(own.reward, *settled, **flags))
        except ValueError as error:
            return Scored.failed("error", f"{', '.join(served)}: {error}")

    def metrics(self) -> dict[str, float]:
        """Return counts since the last call: lost processes (METRICS) and each server's calls."""
        found = {key: value for one in self._served.values() for key, value in one.metrics().items()}
        if num_lost := self._num_lost.pop(COUNTED_FOR.get(), 0):
            found["reward/lost_processes"] = float(num_lost)
        return found

    async def aclose(self) -> None:
        """Close the pool and the connections to servers."""
        self.close()
        for one in self._served.values():
            await one.aclose()

    def close(self) -> None:
        """Kill the processes and drop unfinished scorings. Calling it again does nothing."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(cancel_futures=True)

    def _score(self, scoring: _Scoring, sample: Sample) -> Scored:
        worker = self._idle.get()  # Never waits, because there is one thread a worker.
        try:
            return scoring.run(worker, sample)
        finally:
            self._idle.put(worker)


async def _by_server(served: ServedReward[Any], sample: Sample) -> FunctionScore | ServerFailedError:
    try:
        return await served.score(sample)
    except ServerFailedError as error:
        return error
