"""Pool of processes running reward functions. A process is replaced if it fails or exceeds its time limit.

A process scores one completion at a time, so killing it loses no other. Requests to scoring servers are sent by the
driver's event loop itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.processes.process_pool import Place, ProcessPool
from megarl.processes.server_process import MakeServer, ServerProcess
from megarl.rewards.functions.function_score import FunctionScore
from megarl.rewards.scoring.calling import PARAMETERS, Sample
from megarl.rewards.scoring.http_rewards import COUNTED_FOR, ServedReward, ServerFailedError, make_server_client
from megarl.rewards.scoring.results import combine_scores, with_served
from megarl.rewards.scoring.reward_process import Scored, WorkerSettings, read_answer, request_limits, server_settings
from megarl.terminal import FirstOfEachKind
from megarl.types import PeerLostError

METRICS = {
    "reward/lost_processes": (
        "count",
        "reward processes that ended while scoring a sample, retried once in a fresh process",
    ),
}
"""Metrics reported by this module: unit and meaning by metric name. `megarl metrics` lists them."""


_MAX_LOST = 2
"""Maximum number of processes that try to score one completion. A process can be killed from outside, for example for
lack of memory, without any fault of the completion.
"""


class RewardPool:
    """Scores completions in `num_workers` processes that live until `close`.

    If scoring exceeds a time limit, raises, ends its process or returns an invalid value, the completion gets score
    zero and a `Scored.failure`. The settings may instead leave the completion without a reward. Time counts from when a
    process with imported functions takes the completion. The constructor starts the processes without waiting for them.
    Without functions there are no processes; rewards come from scoring servers, or are zero. Raises ConfigError for
    wrong settings of a server.

    `make_server` creates a process, on this machine or another one. Output of the processes goes to
    `log_folder/reward_NNNN.log`, numbered from `first_log`. `notice` is called with the first failure of each kind.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        num_workers: int,
        log_folder: Path | None = None,
        first_log: int = 0,
        notice: Callable[[str], object] = lambda text: None,
        make_server: MakeServer = ServerProcess,
    ) -> None:
        self._notices = FirstOfEachKind(notice)
        self._settings = settings
        self._served: dict[str, ServedReward[Any]] = {one.name: make_server_client(one) for one in settings.served}
        for one in self._served.values():
            one.notify_once = self._notices.tell
        self._weights = {one.name: one.weight for one in settings.served}
        self._num_lost: Counter[str] = Counter()
        self._processes = ProcessPool(
            server_settings(settings),
            num_workers if settings.functions else 0,
            log_name="reward",
            log_folder=log_folder,
            first_log=first_log,
            make_server=make_server,
        )
        self._processes.start()

    def __len__(self) -> int:
        """Return the number of processes."""
        return len(self._processes)

    async def score(self, sample: Sample) -> Scored:
        """Return the reward of a sample: the weighted sum of all scores, with verdicts on format and answer.

        Any number of calls may be awaited concurrently; each waits for a free process. Raises ConfigError if a function
        cannot be imported, and PeerLostError if the processes do not start or the pool is closed. If the call is
        cancelled, its process is killed and replaced.
        """
        if not self._served and not len(self):
            scored = Scored(combine_scores({}, {}, {}))
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

    async def record_fields(self) -> list[str]:
        """Return the fields that each record must have, because parameters of the functions take their values.

        Raises the errors of `score`.
        """
        async with self._processes.place() as place:
            return [str(name) for name in (await place.ready()).get("record_fields", ())]

    async def _by_functions(self, sample: Sample) -> Scored:
        try:
            async with self._processes.place() as place:
                scored = await self._by_process(sample, place)
        finally:
            # Replace a killed process at once: another sample would wait for its imports.
            if not self._processes.is_closed:
                with suppress(PeerLostError):
                    self._processes.start()
        if scored.num_lost:
            self._num_lost[COUNTED_FOR.get()] += scored.num_lost
            text = "a reward process ended while it had a sample; a fresh process scored it once more"
            self._notices.tell("lost process", f"{text} (the first of reward/lost_processes, more are only counted)")
        return scored

    async def _by_process(self, sample: Sample, place: Place) -> Scored:
        """Score a sample in the reserved process (`place`). If the process ends meanwhile, try once more in a new
        one."""
        settings = self._settings
        detail = ""
        for num_lost in range(_MAX_LOST):
            needs = frozenset((await place.ready()).get("needs", ())) & PARAMETERS.keys()
            limits = request_limits(settings, has_sandbox="sandbox" in needs)
            answer = await place.request({"values": sample.values(needs, settings.correct_score)}, limits)
            how = answer.get("ended") or answer.get("lost")
            if how is None:
                try:
                    return replace(read_answer(answer, settings, limits), num_lost=num_lost)
                except ValueError as error:
                    # A process that breaks the protocol cannot be trusted with another sample.
                    place.kill()
                    return replace(Scored.failed("error", str(error)), num_lost=num_lost)
            detail = f"{settings.names}: while scoring, the reward process {how}"
        return replace(Scored.failed("error", detail), num_lost=_MAX_LOST)

    async def _by_all(self, sample: Sample) -> Scored:
        """Score a sample by functions and servers concurrently. If both fail, the server's failure is reported."""
        asked: list[Awaitable[Scored | FunctionScore | ServerFailedError]]
        asked = [_by_server(one, sample) for one in self._served.values()]
        if len(self):
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
        """Return counts since the last call of this method: lost processes, and calls to each scoring server."""
        counts = {key: value for server in self._served.values() for key, value in server.metrics().items()}
        if num_lost := self._num_lost.pop(COUNTED_FOR.get(), 0):
            counts["reward/lost_processes"] = float(num_lost)
        return counts

    async def aclose(self) -> None:
        """Close the pool and the connections to scoring servers."""
        self.close()
        for server in self._served.values():
            await server.aclose()

    def close(self) -> None:
        """Kill the processes and abandon unfinished scorings. A second call does nothing."""
        self._processes.close()


async def _by_server(served: ServedReward[Any], sample: Sample) -> FunctionScore | ServerFailedError:
    try:
        return await served.score(sample)
    except ServerFailedError as error:
        return error
