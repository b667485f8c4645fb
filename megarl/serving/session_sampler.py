"""Sampling of a session: completions within its limits, with seeds that do not depend on the order of calls."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megarl.rollout.requests.engine_requests import Generates
from megarl.rollout.stitch import ModelCall
from megarl.serving.codec import too_long_error
from megarl.serving.refusal import RequestError
from megarl.types import Request, SamplingSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray


REPORT_SECONDS = 30.0
"""Maximum seconds for an engine to report the tokens of an aborted call. It needs about 1 s. A hung engine must not
delay an attempt's end for longer.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a session: tokens of prompt plus completion, model calls, seconds without a call, and sampled tokens of
    all calls (None: no limit).
    """

    context_tokens: int
    max_calls: int
    idle_seconds: float
    sampled_tokens: int | None = None


class SessionSampler:
    """Samples the completions of one session, and counts their tokens. `counts["refused_calls"]` counts refused
    calls.
    """

    def __init__(
        self, seed: str, limits: Limits, pool: Generates, counts: Counter[str], *, num_aborted: int = 0
    ) -> None:
        """Create a sampler. An earlier driver sampled `num_aborted` tokens that are in no completion yet."""
        self.num_sampled = num_aborted
        """Tokens of all completions, and of aborted calls once the engine has reported them."""
        self._num_unreported = self._num_in_lost_engines = 0
        self._all_reported = asyncio.Event()
        self._all_reported.set()
        self._seed, self._limits, self._pool, self._counts = seed, limits, pool, counts
        self._num_calls_by_prompt: Counter[bytes] = Counter()

    async def sample(
        self, session: str, call_number: int, prompt_ids: NDArray[np.int32], sampling: SamplingSettings
    ) -> ModelCall:
        """Sample a completion of `prompt_ids` [prompt] for call `call_number` of the named session.

        Raises RequestError if the prompt leaves no room, or if the engine refuses it.
        """
        max_new_tokens = self._limits.context_tokens - len(prompt_ids)
        if max_new_tokens <= 0:
            self._counts["refused_calls"] += 1
            raise too_long_error(self._limits.context_tokens)
        if (session_tokens_left := self.num_tokens_left) is not None:
            # At least one: a parallel call may have reached the limit after this one began.
            max_new_tokens = min(max_new_tokens, max(session_tokens_left, 1))
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, max_new_tokens))
        # `affinity` sends all calls of a session to the engine that caches its prefix.
        request = Request(f"{session}.{call_number}", prompt_ids, sampling, self.next_seed(prompt_ids))
        self._num_unreported += 1
        self._all_reported.clear()
        completion = await self._pool.generate(
            request,
            affinity=session,
            on_begun=self._count_begun,
            on_abort=self._count_aborted,
            on_loss=self._count_lost,
        )
        self._count_reported()
        # An engine may refuse to continue a completion after a pause.
        self.num_sampled += len(completion.token_ids)
        if completion.finish_reason == "error":
            self._counts["refused_calls"] += 1
            raise RequestError(completion.error or "the engine refuses this request")
        return ModelCall(prompt_ids, completion)

    async def wait_for_reports(self) -> int:
        """Wait up to `REPORT_SECONDS` for the engines' reports of aborted calls.

        Returns the number of calls without a report, and of those in a lost engine.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(REPORT_SECONDS):
                await self._all_reported.wait()
        return self._num_unreported + self._num_in_lost_engines

    def restore(self, call: ModelCall) -> None:
        self.num_sampled += len(call.completion.token_ids)
        self._num_calls_by_prompt[_prompt_hash(call.prompt_token_ids)] += 1

    @property
    def num_tokens_left(self) -> int | None:
        """Number of tokens left to sample; None: no limit."""
        limit = self._limits.sampled_tokens
        if limit is None:
            return None
        # The maximum of a continued call includes its earlier tokens, and `num_sampled` counts them too.
        return max(0, limit - self.num_sampled + self._pool.num_begun_tokens)

    def next_seed(self, token_ids: NDArray[np.int32]) -> int:
        """Return a prompt's 31-bit seed, from the session, the prompt and the number of its earlier calls."""
        prompt_hash = _prompt_hash(token_ids)
        # Parallel calls start in any order, and a repeated run must sample the same.
        seed_text = f"{self._seed} {prompt_hash.hex()} {self._num_calls_by_prompt[prompt_hash]}"
        self._num_calls_by_prompt[prompt_hash] += 1
        return int.from_bytes(hashlib.sha256(seed_text.encode()).digest()[:4], "big") >> 1

    def _count_begun(self, num_tokens: int) -> None:
        # `num_aborted` counted these tokens. The completion, or its abort, counts them again.
        self.num_sampled -= num_tokens

    def _count_aborted(self, num_tokens: int) -> None:
        # Otherwise a program could sample endlessly by disconnecting before each answer.
        self.num_sampled += num_tokens
        self._count_reported()

    def _count_lost(self, num_tokens: int, is_all: bool) -> None:
        self.num_sampled += num_tokens
        self._num_in_lost_engines += not is_all

    def _count_reported(self) -> None:
        self._num_unreported -= 1
        if not self._num_unreported:
            self._all_reported.set()


def _prompt_hash(token_ids: NDArray[np.int32]) -> bytes:
    return hashlib.sha256(token_ids.tobytes()).digest()
