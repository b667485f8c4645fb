"""Pool of processes that run reward functions. A process that fails or exceeds its time limit is replaced.

A process scores one completion at a time, so killing it affects no other completion. The driver's event loop sends the
requests to scoring servers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.processes.process_pool import Place, ProcessPool
from megarl.processes.server_process import MakeServer, ServerProcess
from megarl.rewards.scoring.calling import PARAMETERS, Sample
from megarl.rewards.scoring.http_rewards import COUNTED_FOR, ServedReward, ServerFailedError, make_server_client
from megarl.rewards.scoring.results import combine_scores
from megarl.rewards.scoring.reward_process import (
    FunctionScores,
    Scored,
    WorkerSettings,
    read_answer,
    request_limits,
    server_settings,
)
from megarl.terminal import FirstOfEachKind
from megarl.tracking.metric_rows import MetricRow
from megarl.types import PeerLostError, Reward

METRICS = (
    MetricRow(
        "reward/lost_processes",
        "count",
        "reward processes that ended while scoring a sample, retried once in a fresh process",
    ),
)


_MAX_LOST = 2
"""Number of processes that may end while scoring one completion. A process may be killed from outside, for example for
lack of memory, without any fault of the completion.
"""


class RewardPool:
    """Scores completions in `num_workers` processes that live until `close`.

    If scoring exceeds a time limit, raises, ends its process or returns an invalid value, the completion gets score
    zero and a `Scored.failure`. A setting may leave the completion without a reward instead. Time counts from when a
    process with imported functions takes the completion. The constructor starts the processes without waiting for them.
    Without functions there are no processes: rewards come from scoring servers, or are zero. Raises ConfigError for
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
        self._servers: dict[str, ServedReward[Any]] = {
            server.name: make_server_client(server) for server in settings.served
        }
        for server in self._servers.values():
            server.notify_once = self._notices.tell
        self._weights = {function.name: function.weight for function in (*settings.functions, *settings.served)}
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
        return len(self._processes)

    async def score(self, sample: Sample) -> Scored:
        """Return the reward of a sample: the weighted sum of all scores, with verdicts on format and answer.

        Calls may run concurrently; each waits for a free process. Raises ConfigError if a function cannot be imported,
        and PeerLostError if the processes do not start or the pool is closed. A cancelled call's process is killed and
        replaced.
        """
        outcome = self._combine_scores(await self._collect_scores(sample))
        if failure := outcome.failure:
            fate = "is left out" if outcome.is_left_out else "gets zero"
            self._notices.tell(
                failure,
                f"a completion could not be scored and {fate} (the first of reward/{failure}s, more are only "
                f"counted): {outcome.detail}",
            )
        return outcome

    async def record_fields(self) -> list[str]:
        """Return the record fields that the functions' parameters read. Raises the errors of `score`."""
        async with self._processes.place() as place:
            return [str(name) for name in (await place.ready()).get("record_fields", ())]

    def _combine_scores(self, scores: FunctionScores) -> Scored:
        """Return the weighted reward. Without it, the score 0 with the reason of the failure."""
        settings = self._settings
        failure, detail = scores.failure, scores.detail
        if failure is None:
            try:
                return Scored(combine_scores(scores.scores, self._weights, settings.judges, settings.correct_score))
            except ValueError as error:
                failure, detail = "error", f"{', '.join(scores.scores)}: {error}"
        verdict = None if settings.judging == "none" else False
        return Scored(Reward(0.0, False, verdict), failure, detail, is_left_out=settings.on_failure == "leave_out")

    async def _collect_scores(self, sample: Sample) -> FunctionScores:
        """Return the scores of functions and servers, called concurrently. Of two failures, the server's is
        returned.
        """
        if not self._servers:
            return await self._ask_functions(sample) if len(self) else FunctionScores()
        calls = [self._ask_functions(sample)] if len(self) else []
        calls += [_ask_server(server, sample) for server in self._servers.values()]
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            answers = await asyncio.gather(*tasks)
        # One failure fails the sample, so the remaining calls would be wasted.
        finally:
            for task in tasks:
                task.cancel()
        failures = [answer for answer in answers if answer.failure]
        if failures:
            return failures[-1]
        return FunctionScores({name: score for answer in answers for name, score in answer.scores.items()})

    async def _ask_functions(self, sample: Sample) -> FunctionScores:
        """Score a sample in a free process. Processes that end meanwhile are replaced and counted."""
        try:
            async with self._processes.place() as place:
                scores = await self._ask_process(sample, place)
        finally:
            # Replace a killed process at once: another sample would wait for its imports.
            if not self._processes.is_closed:
                with suppress(PeerLostError):
                    self._processes.start()
        if scores.num_lost:
            self._num_lost[COUNTED_FOR.get()] += scores.num_lost
            text = "a reward process ended while it had a sample; a fresh process scored it once more"
            self._notices.tell("lost process", f"{text} (the first of reward/lost_processes, more are only counted)")
        return scores

    async def _ask_process(self, sample: Sample, place: Place) -> FunctionScores:
        """Score a sample in the reserved process `place`. If the process ends, retry once in a new one."""
        settings = self._settings
        detail = ""
        for num_lost in range(_MAX_LOST):
            needs = frozenset((await place.ready()).get("needs", ())) & PARAMETERS.keys()
            limits = request_limits(settings, has_sandbox="sandbox" in needs)
            answer = await place.request({"values": sample.values(needs, settings.correct_score)}, limits)
            end_text = answer.get("ended") or answer.get("lost")
            if end_text is None:
                try:
                    return replace(read_answer(answer, settings, limits), num_lost=num_lost)
                except ValueError as error:
                    # A process that breaks the protocol cannot be trusted with another sample.
                    place.kill()
                    return FunctionScores(failure="error", detail=str(error), num_lost=num_lost)
            detail = f"{settings.names}: while scoring, the reward process {end_text}"
        return FunctionScores(failure="error", detail=detail, num_lost=_MAX_LOST)

    def metrics(self) -> dict[str, float]:
        """Return counts since the last call of this method: lost processes, and calls to each scoring server."""
        counts = {key: value for server in self._servers.values() for key, value in server.metrics().items()}
        if num_lost := self._num_lost.pop(COUNTED_FOR.get(), 0):
            counts["reward/lost_processes"] = float(num_lost)
        return counts

    async def aclose(self) -> None:
        self.close()
        for server in self._servers.values():
            await server.aclose()

    def close(self) -> None:
        """Kill the processes and abort unfinished scorings. A second call does nothing."""
        self._processes.close()


async def _ask_server(server: ServedReward[Any], sample: Sample) -> FunctionScores:
    try:
        return FunctionScores({server.name: await server.score(sample)})
    except ServerFailedError as error:
        return FunctionScores(failure=error.kind, detail=f"{server.name}: {error}")
