"""Held-out accuracy: greedy answers to the validation sets, scored as in training."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from megarl.cluster.worker_group import WorkerGroup
from megarl.config.parallel import ParallelConfig
from megarl.rewards.scoring import RewardPool
from megarl.rewards.worker import Failure
from megarl.rollout.pool import sample
from megarl.types import Completion, MegarlError, Problem, Request, Reward, SamplingSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase as Tokenizer


@dataclass(frozen=True, slots=True)
class Answered:
    """A problem, one completion of it as tokens and as text, and its reward. `group` numbers the prompts asked.

    `old_logprobs`, float32 [new_tokens], are the trainer's log-probs of the completion under the weights that sampled
    it, where they were computed.
    """

    problem: Problem
    group: int
    completion: Completion
    text: str
    reward: Reward
    failure: Failure | None = None
    """Why the reward functions gave no reward; `reward` is zero then."""
    old_logprobs: NDArray[np.float32] | None = None

    def record(self) -> dict[str, object]:
        """The line of samples/."""
        return {
            "prompt": self.problem.messages,
            "completion": self.text,
            "answer": self.problem.answer,
            "reward": self.reward.score,
            "reward_failure": self.failure,
            "answer_correct": self.reward.answer_correct,
            "format_valid": self.reward.format_valid,
            "finish_reason": self.completion.finish_reason,
            "tokens": len(self.completion.token_ids),
        }


@dataclass(frozen=True, slots=True)
class Respondents:
    """Engines and reward processes together: problems in, answered problems out, scored while others are sampled."""

    group: WorkerGroup
    layout: ParallelConfig
    tokenizer: Tokenizer
    rewards: RewardPool
    max_running: int
    is_abandoned: Callable[[], bool] = lambda: False

    async def answer(
        self, problems: Sequence[Problem], sampling: SamplingSettings, *, samples_per_prompt: int = 1, seed: str = ""
    ) -> list[Answered]:
        """`samples_per_prompt` answers to each problem, grouped by problem in the given order.

        A completion's seed is a function of `seed`, the problem's index and the sample's number: not of which
        engine draws it or when. Raises AbandonedError where the run is to stop.
        """
        requests = [
            Request(f"{group}.{number}", problem.prompt_token_ids, sampling, _seed(seed, problem.index, number))
            for group, problem in enumerate(problems)
            for number in range(samples_per_prompt)
        ]
        place = {request.request_id: index for index, request in enumerate(requests)}
        completions = sample(
            self.group, self.layout, requests, max_running=self.max_running, is_abandoned=self.is_abandoned
        )
        scored = [asyncio.create_task(self._score(completion, problems)) async for completion in completions]
        return sorted(await asyncio.gather(*scored), key=lambda answered: place[answered.completion.request_id])

    async def _score(self, completion: Completion, problems: Sequence[Problem]) -> Answered:
        group = int(completion.request_id.partition(".")[0])
        text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        scored = await self.rewards.score(text, problems[group].answer)  # type: ignore[arg-type]
        return Answered(problems[group], group, completion, text, scored.reward, scored.failure)  # type: ignore[arg-type]


async def accuracy(
    respondents: Respondents, problems: Sequence[Problem], sampling: SamplingSettings
) -> tuple[dict[str, float], list[Answered]]:
    """Share of right answers, of valid formats, and the mean length, of one validation set; and the answers."""
    answered = await respondents.answer(problems, sampling, seed="evaluation")
    count = len(answered)
    return {
        "accuracy": sum(a.reward.answer_correct for a in answered) / count,
        "format_valid": sum(a.reward.format_valid for a in answered) / count,
        "completion_tokens/mean": sum(len(a.completion.token_ids) for a in answered) / count,
    }, answered


def failure_metrics(answered: Sequence[Answered], max_failed_fraction: float, prefix: str) -> dict[str, float]:
    """Completions whose scoring raised or gave no proper reward, PREFIX`errors`, or took too long, PREFIX`timeouts`.

    Raises MegarlError if they are more than `max_failed_fraction` of all.
    """
    failures = [a.failure for a in answered]
    metrics = {f"{prefix}{kind}s": float(failures.count(kind)) for kind in get_args(Failure)}
    failed = sum(metrics.values())
    if failed > max_failed_fraction * len(answered):
        counts = ", ".join(f"{name} {count:.0f}" for name, count in metrics.items())
        raise MegarlError(
            f"{failed:.0f} of {len(answered)} completions could not be scored ({counts}), which is more than "
            f"reward.max_failed_fraction = {max_failed_fraction:g}; a warning above shows the first of each kind. Mend "
            "the reward function, or raise reward.timeout_seconds, reward.wall_timeout_seconds or this fraction."
        )
    return metrics


def _seed(*parts: object) -> int:
    """31 bits that look random and depend on nothing but the parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1
