"""The driver's side of the engines: requests out to the replicas, completions back as they finish, scored."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.cluster.worker_group import WorkerGroup
from megarl.config.parallel import ParallelConfig
from megarl.rewards.scoring import RewardPool
from megarl.rollout.stitch import single_call
from megarl.types import Completion, Problem, Request, SamplingSettings, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


class AbandonedError(Exception):
    """Sampling was given up half-way; the engines hold nothing of it any more."""


async def sample_requests(
    group: WorkerGroup,
    layout: ParallelConfig,
    requests: Iterable[Request],
    *,
    max_running: int,
    budget_seconds: float = 1.0,
    is_abandoned: Callable[[], bool] = lambda: False,
) -> AsyncIterator[Completion]:
    """Sample all requests over all replicas, yielding completions in the order in which they finish.

    Requests stay in order, so that those of one prompt meet in one replica's prefix cache; a replica that is done
    early is given more. `max_running` bounds the requests one replica holds, `budget_seconds` how long the engines
    run between two looks of the driver: its other tasks, such as scoring, go on meanwhile. Raises AbandonedError at
    such a look, all requests aborted, once `is_abandoned` says so.
    """
    waiting = deque(requests)
    running: dict[int, set[str]] = {leader: set() for leader in layout.leaders()}
    while waiting or any(running.values()):
        if is_abandoned():
            aborts = [((), tuple(running.get(rank, ()))) for rank in range(layout.world_size)]
            await group.scatter("advance", aborts, 0.0)
            raise AbandonedError
        per_rank: list[tuple[tuple[Request, ...], tuple[str, ...]]] = [((), ())] * layout.world_size
        share = -(-(len(waiting) + sum(map(len, running.values()))) // len(running))
        for leader, held in running.items():
            new = tuple(waiting.popleft() for _ in range(min(len(waiting), min(max_running, share) - len(held))))
            per_rank[leader] = (new, ())
            held.update(request.request_id for request in new)
        results: list[Any] = await group.scatter("advance", per_rank, budget_seconds, budget_seconds=budget_seconds)
        for leader, held in running.items():
            held.difference_update(completion.request_id for completion in results[leader])
            for completion in results[leader]:
                yield completion


@dataclass(frozen=True, slots=True)
class EnginePool:
    """Engines and reward processes together: problems in, trajectories out, scored while others are sampled."""

    group: WorkerGroup
    layout: ParallelConfig
    tokenizer: Tokenizer
    rewards: RewardPool
    max_running: int
    is_abandoned: Callable[[], bool] = lambda: False

    async def sample(
        self, problems: Sequence[Problem], sampling: SamplingSettings, *, samples_per_prompt: int = 1, seed: str = ""
    ) -> list[Trajectory]:
        """`samples_per_prompt` attempts at each problem, grouped by problem in the given order.

        A completion's seed is a function of `seed`, the problem's index and the sample's number: not of which
        engine draws it or when. Raises AbandonedError where the run is to stop.
        """
        requests = [
            Request(f"{group}.{number}", problem.prompt_token_ids, sampling, _seed(seed, problem.index, number))
            for group, problem in enumerate(problems)
            for number in range(samples_per_prompt)
        ]
        completions = sample_requests(
            self.group, self.layout, requests, max_running=self.max_running, is_abandoned=self.is_abandoned
        )
        scored = [asyncio.create_task(self._score(completion, problems)) async for completion in completions]
        return sorted(await asyncio.gather(*scored), key=lambda trajectory: (trajectory.group, trajectory.number))

    async def _score(self, completion: Completion, problems: Sequence[Problem]) -> Trajectory:
        group, number = map(int, completion.request_id.split("."))
        problem = problems[group]
        text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        scored = await self.rewards.score(text, problem.answer)  # type: ignore[arg-type]
        return Trajectory(
            environment="single_turn",
            problem=problem,
            group=group,
            number=number,
            segments=(single_call(problem.prompt_token_ids, completion),),
            reward=scored.reward,
            failure=scored.failure,
            text=text,  # type: ignore[arg-type]
            ended="length" if completion.finish_reason == "length" else "done",
        )


def _seed(*parts: object) -> int:
    """31 bits that look random and depend on nothing but the parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1
