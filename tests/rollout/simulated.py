"""Sampling, training and reshards without engines or ranks: real buffers, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import Recipe
from megarl.data.token_batch import TokenBatch
from megarl.rollout.attempt import Task
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.buffer_policy import BufferPolicy
from megarl.rollout.requests.engine_requests import Generates
from megarl.rollout.source import Source
from megarl.rollout.state import Group, RLState, problem_lookup
from megarl.types import Completion, Problem, Request, Reward, SamplingSettings, Segment, Trajectory

PROMPT = np.array([1, 2], np.int32)
SECONDS_A_TOKEN = 1.0


class Engines:
    """Samples a token of each request every second; `pause` stops them, `resume` gives them new weights."""

    seconds_paused = 0.0

    def __init__(self) -> None:
        self.version = 1
        self._open, self._paused = asyncio.Event(), asyncio.Event()
        self._open.set()

    def pause(self) -> None:
        self._open.clear()
        self._paused.set()

    def resume(self, version: int) -> None:
        self.version = version
        self._paused = asyncio.Event()
        self._open.set()

    def forget(self, affinity: str) -> None:
        pass

    async def wait_until_drained(self) -> None:
        pass

    async def generate(
        self, request: Request, *, affinity: str | None = None, is_last: bool, parts: list[Completion], **_: Any
    ) -> Completion:
        """As `EnginePool.generate`: a pause adds a part, of the weights that sampled it."""
        loop = asyncio.get_running_loop()
        while True:
            await self._open.wait()
            rest = request.sampling.max_new_tokens - sum(len(part.token_ids) for part in parts)
            began, version = loop.time(), self.version
            try:
                async with asyncio.timeout(rest * SECONDS_A_TOKEN):
                    await self._paused.wait()
            except TimeoutError:
                whole = [*parts, _completion(request, rest, version, "stop")]
                return replace(
                    whole[-1],
                    **{
                        name: np.concatenate([getattr(part, name) for part in whole])
                        for name in ("token_ids", "rollout_logprobs", "weight_versions")
                    },
                )
            if kept := min(rest - 1, int((loop.time() - began) / SECONDS_A_TOKEN)):
                parts.append(_completion(request, kept, version, "abort"))


def _completion(request: Request, length: int, version: int, finish_reason: Any) -> Completion:
    tokens = np.full(length, 7, np.int64)
    logprobs = np.full(length, -1.0, np.float32)
    return Completion(request.request_id, tokens, logprobs, finish_reason, np.full(length, version, np.int32))


@dataclass
class Sampler:
    """Attempts of lengths that only a problem's number and an attempt's decide; a share of groups is all wrong."""

    pool: Engines
    lengths: Callable[[int, int], Sequence[int]]
    """The tokens of each turn of an attempt."""
    is_wrong: Callable[[int], bool]
    is_abandoned: Callable[[], bool] = lambda: False

    def task(
        self, problem: Problem, group: int, number: int, seed: str, sampling: SamplingSettings, *, prefix: str = ""
    ) -> Task:
        return Task("simulated", problem, group, number, seed, sampling, prefix)

    async def attempt(self, task: Task, pool: Generates, before_score: object) -> Trajectory:
        """One turn after the other, each prompt longer than the one before."""
        tokens, logprobs, versions = PROMPT.astype(np.int64), np.zeros(2, np.float32), np.full(2, -1, np.int32)
        for turn, length in enumerate(self.lengths(task.problem.index, task.number)):
            name = f"{task.group}.{task.number}.{turn}"
            request = Request(name, tokens.astype(np.int32), replace(task.sampling, max_new_tokens=length), 0)
            completion = await pool.generate(request)
            tokens = np.concatenate([tokens, completion.token_ids])
            logprobs = np.concatenate([logprobs, completion.rollout_logprobs])
            versions = np.concatenate([versions, completion.weight_versions])
            await asyncio.sleep(0.5)  # its environment, which no pause stops
        is_right = task.number == 0 and not self.is_wrong(task.problem.index)
        is_sampled = versions >= 0
        segment = Segment(tokens, is_sampled, logprobs, versions, np.where(is_sampled, 0, -1).astype(np.int16))
        return Trajectory(
            environment="simulated",
            problem=task.problem,
            group=task.group,
            number=task.number,
            segments=(segment,),
            reward=Reward(float(is_right), True, is_right),
        )


@dataclass
class Simulation:
    """A run of a paced buffer: steps that train for random times, reshards, kills and resumes; all that it gave."""

    recipe: Recipe
    folder: Path
    seed: int
    given: list[tuple[int, int, Group]] = field(default_factory=list)
    """Step, engines' version and group, in the order in which they were trained."""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        steps, prompts = self.recipe.train.steps, self.recipe.train.prompts_per_step
        self.problems = [
            Problem(n, (), tuple(PROMPT.tolist()), "7", source="simulated") for n in range(3 * steps * prompts)
        ]

    def lengths(self, problem: int, number: int) -> Sequence[int]:
        """One to three turns, log-normal: some take as long as several steps."""
        own = random.Random(f"{self.seed} {problem} {number}")
        return [1 + int(own.lognormvariate(2.5, 1.2)) for _ in range(own.randint(1, 3))]

    def buffer(self, state: RLState, engines: Engines) -> GroupBuffer:
        def is_wrong(problem: int) -> bool:
            return self.recipe.algorithm.dynamic_sampling is not None and problem % 5 == 0

        sampler: Any = Sampler(engines, self.lengths, is_wrong)
        sources = [Source("simulated", 1.0, self.recipe, sampler, self.problems)]
        return GroupBuffer(self.recipe, sources, state, BufferPolicy.from_recipe(self.recipe))

    async def run(self, first: int, last: int, check: Callable[[Simulation, RLState, GroupBuffer], None]) -> None:
        """Steps from `first` to `last`, from the state in the folder unless the run begins; then it is killed."""
        engines, state = Engines(), self._loaded(first)
        buffer = self.buffer(state, engines)
        engines.resume(engine_version := first)
        for number in range(first, last + 1):
            groups = await buffer.take(self.recipe.train.prompts_per_step, number, engine_version)
            check(self, state, buffer)
            if self.random.random() < 0.05:
                # A signal to stop before the update: the step is given the same groups again.
                state.forget_step()
                check(self, state, buffer)
                again = await buffer.take(self.recipe.train.prompts_per_step, number, engine_version)
                assert _problems(again) == _problems(groups)
            groups = await buffer.add_old_logprobs(groups, self.forward)
            self.given += [(number, engine_version, group) for group in groups]
            await asyncio.sleep(self.random.lognormvariate(3.0, 0.8))
            if number == last:
                break
            if number % self.recipe.rollout.sync_every == 0:
                engines.pause()
                await asyncio.sleep(0.1)
                engines.resume(engine_version := number + 1)
        state.save(self.folder)
        self.seconds += asyncio.get_running_loop().time()
        await buffer.aclose()

    async def forward(self, batch: TokenBatch) -> np.ndarray:
        """The trainer's log-probs, while engines go on."""
        await asyncio.sleep(5.0)
        return np.full(len(batch.token_ids), -2.0, np.float32)

    def _loaded(self, first: int) -> RLState:
        state = RLState(self.recipe.algorithm)
        if first > 1:
            state.load(self.folder, problem_lookup({"simulated": self.problems}))
        return state


def _problems(groups: Sequence[Group]) -> list[int]:
    return [group[0].problem.index for group in groups]
