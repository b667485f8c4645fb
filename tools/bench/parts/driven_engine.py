"""An engine of random weights on a rank of its own, which the driver of a run drives, or a bare loop around vLLM.

`Bench` is the driver's side. Attempts are of one turn or several, in an environment that answers at once.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.config import RolloutConfig
from megarl.config.parallel import ParallelConfig
from megarl.data.dialogue import Dialogue
from megarl.environments import Start, Step, Turn
from megarl.groups import world
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_process import Scored
from megarl.rollout.groups import GroupSampler
from megarl.rollout.pool import EnginePool
from megarl.types import Completion, Problem, Request, Reward, SamplingSettings, Trajectory


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a benchmark's engine; `context_tokens` is its longest sequence, `rollout` has further fields."""

    model_path: str
    num_slots: int
    context_tokens: int
    kv_cache_gib: float = 0.5
    dtype: str = "float32"
    vllm: Mapping[str, Any] = field(default_factory=dict)
    rollout: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Used:
    """What an engine's rank used since it was asked last; `idle` is the share of its time between calls."""

    steps: int
    cpu_seconds: float
    idle: float
    seconds: float = 0.0
    """From the first call's start to the last one's end, of a bare loop its own."""


@dataclass(frozen=True)
class Pair:
    """A round of the driver and of the bare engine: what each used, and their sampled tokens by turn, sorted."""

    number: int
    driven: Used
    bare: Used
    first_tokens: list[list[int]]
    """Of the driver's round that warmed up."""
    driven_tokens: list[list[int]]
    bare_tokens: list[list[int]]


class MeasuredEngine:
    """The worker of a rank: an engine that counts its steps and can be driven bare.

    Its weights are those of the model folder's file; without one they stay vLLM's random ones.
    """

    def __init__(self, rank: int, world_size: int, settings: EngineSettings) -> None:
        from safetensors.torch import load_file

        from megarl.engine.engine import RolloutEngine

        world.initialize(600.0)
        fields = {
            "kv_cache_gib": settings.kv_cache_gib, "max_concurrent_requests": settings.num_slots,
            "vllm": dict(settings.vllm), **settings.rollout,
        }  # fmt: skip
        config = RolloutConfig.model_validate(fields)
        self._rollout_engine = RolloutEngine(
            settings.model_path, config, max_model_len=settings.context_tokens, dtype=settings.dtype, seed=3
        )
        if (weights := Path(settings.model_path) / "model.safetensors").is_file():
            self._rollout_engine.load_tensors(load_file(weights).items())
        assert self._rollout_engine._requests is not None
        self._requests = self._rollout_engine._requests
        self._engine: Any = self._requests.engine
        self._step = self._engine.step
        self._engine.step = self._count_step
        self._log: list[Request] = []
        self.reset()

    def reset(self) -> None:
        """Forget what was cached, sent and used."""
        self._rollout_engine.reset_prefix_cache()
        self._log, self._num_steps = [], 0
        self._busy_seconds, self._first, self._last = 0.0, None, 0.0
        self._cpu_start = time.process_time()

    def advance(
        self, work: tuple[tuple[Request, ...], tuple[str, ...]], budget_seconds: float, leave_after: int | None
    ) -> list[Completion]:
        """Advance the engine, and count its busy time. `work` is (requests, ids to abort)."""
        self._log += work[0]
        start = time.monotonic()
        completions = self._rollout_engine.advance(*work, budget_seconds, leave_after=leave_after)
        self._last = time.monotonic()
        self._first = start if self._first is None else self._first
        self._busy_seconds += self._last - start
        return completions

    def measure_use(self) -> Used:
        """Return what the engine used since `reset`."""
        span = self._last - (self._first or 0.0)
        idle = 1.0 - self._busy_seconds / span if self._first is not None and span > 0 else 0.0
        return Used(self._num_steps, time.process_time() - self._cpu_start, idle, span)

    def list_requests(self) -> list[Request]:
        """The requests since `reset`, in the order in which they came."""
        return self._log

    def bare(self, chains: Sequence[Sequence[Request]]) -> dict[str, list[int]]:
        """Sample with vLLM's engine alone. A request starts when the one before it in its chain ends.

        Returns token ids by request.
        """
        from megarl.engine.random_state import preserved_random_state
        from megarl.engine.vllm_arguments import sampling_params

        next_requests = {
            request.request_id: next_request for chain in chains for request, next_request in itertools.pairwise(chain)
        }
        tokens_of_requests: dict[str, list[int]] = {}
        scheduler = self._requests._scheduler
        internal_ids: dict[str, str] = {}

        def add(request: Request) -> None:
            prompt = {"type": "token", "prompt_token_ids": request.prompt_token_ids.tolist()}
            internal_ids[request.request_id] = self._engine.add_request(
                request.request_id, prompt, sampling_params(request)
            )

        self._first = time.monotonic()
        with preserved_random_state():
            for first, *_ in chains:
                add(first)
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    tokens_of_requests[output.request_id] = scheduler.sampled.pop(
                        internal_ids[output.request_id]
                    ).token_ids
                    if output.request_id in next_requests:
                        add(next_requests[output.request_id])
            # Read the steps that asynchronous scheduling began early, because the driven engine reads them too.
            self._requests.finish_started_steps()
        self._last = time.monotonic()
        return tokens_of_requests

    def _count_step(self) -> Any:
        self._num_steps += 1
        return self._step()

    def close(self) -> None:
        """End the engine."""
        import torch.distributed as dist

        self._rollout_engine.close()
        dist.destroy_process_group()


class Talk:
    """An environment that answers at once, `num_turns` times."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns

    async def reset(self, problem: Problem, seed: int) -> Start:
        return Start(problem.messages)

    async def step(self, turn: Turn) -> Step:
        if turn.number + 1 == self._num_turns:
            return Step(reward=1.0, done=True)
        return Step(({"role": "user", "content": f"That was answer {turn.number}; add {len(turn.text)} to it."},))

    async def close(self) -> None:
        pass


async def score_nothing(sample: Sample) -> Scored:
    """A reward at no cost."""
    return Scored(Reward(0.0, format_valid=True, answer_correct=False))


def problems_of(tokenizer: Any, number: int) -> list[Problem]:
    """Return `number` problems of a few words each."""
    problems = []
    for index in range(number):
        messages = ({"role": "user", "content": f"What is {index} times {index + 7}?"},)
        token_ids = tuple(Dialogue(tokenizer).opening(messages, ()).tolist())
        problems.append(Problem(index=index, messages=messages, prompt_token_ids=token_ids, answer="0", record={}))
    return problems


def sampler_of(pool: EnginePool, tokenizer: Any, num_turns: int, *, max_prompt_tokens: int) -> GroupSampler:
    """Return the sampler of a run whose environment is `Talk`, for the engines of a pool."""
    return GroupSampler(
        pool=pool,
        dialogue=Dialogue(tokenizer),
        score=score_nothing,
        environment="talk",
        make_environment=lambda: Talk(num_turns),
        max_prompt_tokens=max_prompt_tokens,
        max_turns=num_turns,
        truncated_turn="close",
    )


class Bench:
    """The driver of some engines; `num_attempts` are made at a time."""

    def __init__(
        self,
        group: WorkerGroup,
        tokenizer: Any,
        settings: EngineSettings,
        *,
        num_attempts: int,
        sampling: SamplingSettings,
    ) -> None:
        self.group, self._tokenizer, self._settings = group, tokenizer, settings
        self._num_attempts, self.sampling = num_attempts, sampling

    def sampler(self, num_turns: int) -> GroupSampler:
        """Return the sampler of a run whose environment is `Talk`."""
        world = self.group.world_size
        pool = EnginePool(self.group, ParallelConfig(1, 1, world, 1), max_running=2 * self._settings.num_slots)
        max_prompt_tokens = self._settings.context_tokens - self.sampling.max_new_tokens
        return sampler_of(pool, self._tokenizer, num_turns, max_prompt_tokens=max_prompt_tokens)

    async def sample_driven(self, num_turns: int) -> tuple[Used, list[Trajectory]]:
        """Sample with the driver. Returns what was used, with the driver's CPU seconds and clock, and trajectories."""
        problems = problems_of(self._tokenizer, self._num_attempts)
        sampler = self.sampler(num_turns)
        await self.group.call("reset")
        start, started = time.process_time(), time.monotonic()
        trajectories = await sampler.sample(problems, self.sampling, seed="bench")
        driver_seconds, seconds = time.process_time() - start, time.monotonic() - started
        [used] = await self.group.call("measure_use")
        return replace(used, cpu_seconds=used.cpu_seconds + driver_seconds, seconds=seconds), trajectories

    async def bare(self, chains: Sequence[Sequence[Request]]) -> tuple[Used, dict[str, list[int]]]:
        """Sample the same requests with vLLM's engine alone."""
        await self.group.call("reset")
        [tokens_of_requests] = await self.group.call("bare", chains)
        [used] = await self.group.call("measure_use")
        return used, tokens_of_requests

    async def pairs(self, num_turns: int, rounds: Iterable[int]) -> AsyncIterator[Pair]:
        """Yield a pair of both ways for each round, after a warm-up. They take turns in going first."""
        _, trajectories = await self.sample_driven(num_turns)
        first, chains = sorted_tokens(trajectories), await self.chains()
        await self.bare(chains)
        for number in rounds:
            if number % 2:
                ours, trajectories = await self.sample_driven(num_turns)
                bare, tokens_of_requests = await self.bare(chains)
            else:
                bare, tokens_of_requests = await self.bare(chains)
                ours, trajectories = await self.sample_driven(num_turns)
            yield Pair(number, ours, bare, first, sorted_tokens(trajectories), sorted(tokens_of_requests.values()))

    async def chains(self) -> list[list[Request]]:
        """Return the requests of the last `sample_driven`, by attempt."""
        [sent] = await self.group.call("list_requests")
        chains: dict[str, list[Request]] = {}
        for request in sent:
            chains.setdefault(request.request_id.rpartition(".")[0], []).append(request)
        return list(chains.values())


def sorted_tokens(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """Return the sampled token ids of each turn of these trajectories, sorted."""
    return sorted(
        segment.token_ids[segment.turns == turn].tolist()
        for trajectory in trajectories
        for segment in trajectory.segments
        for turn in np.unique(segment.turns[segment.loss_mask])
    )
