"""An endpoint before a pool that answers from a list, without an engine: for counts over many calls."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from megarl.config.sections.rollout import EndpointConfig
from megarl.serving.codec import Codec
from megarl.serving.endpoint import Endpoint
from megarl.serving.session import Session
from megarl.serving.session_sampler import Limits
from megarl.serving.sessions import Sessions
from megarl.types import Completion, Request, SamplingSettings
from tests.serving.tool_model import TEMPLATE
from tools.make_tiny_model import make_tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TEXTS = ("The answer is 5.", "The sum of both numbers.", CALL, f"I add them.\n{CALL}\n{CALL}")
CONTEXT_TOKENS = 20_000


class ScriptedPool:
    """Samples one of `texts` by the request's seed, after `seconds`. Log-probs are drawn from the seed too.

    A cancelled request has sampled 1 to 7 tokens.
    """

    seconds_paused = 0.0
    num_begun_tokens = 0

    def __init__(self, texts: Sequence[str] = TEXTS, seconds: float = 0.0) -> None:
        self.tokenizer: Any = make_tokenizer(tool_words=True)
        self.tokenizer.chat_template = TEMPLATE
        self.seconds = seconds
        self.version = 1
        self.completions: list[Completion] = []
        self.requests: Counter[str] = Counter()
        self.num_aborted = 0
        self._texts = [self.tokenizer.encode(text + "<|im_end|>") for text in texts]
        self._running: set[str] = set()

    async def generate(
        self, request: Request, *, on_abort: Callable[[int], None] | None = None, **_: Any
    ) -> Completion:
        if request.request_id in self._running:
            raise ValueError(f"request id {request.request_id} is in use")
        self.requests[request.request_id] += 1
        self._running.add(request.request_id)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            num_tokens = 1 + request.seed % 7
            self.record_abort(num_tokens)
            if on_abort is not None:
                on_abort(num_tokens)
            raise
        finally:
            self._running.remove(request.request_id)
        draw = random.Random(request.seed)
        text = draw.choice(self._texts)
        token_ids = np.array(text[: request.sampling.max_new_tokens], np.int64)
        completion = Completion(
            request.request_id,
            token_ids,
            np.array([-draw.random() for _ in token_ids], np.float32),
            "stop" if len(token_ids) == len(text) else "length",
            np.full(len(token_ids), self.version, np.int32),
        )
        self.completions.append(completion)
        return completion

    def record_abort(self, num_tokens: int) -> None:
        """Count the tokens of a request that was cancelled."""
        self.num_aborted += num_tokens

    def forget(self, affinity: str) -> None:
        pass

    async def wait_until_drained(self) -> None:
        pass


class Scripted:
    """An endpoint, its sessions and the scripted pool behind them."""

    def __init__(self, pool: ScriptedPool, endpoint: Endpoint, sessions: Sessions) -> None:
        self.pool, self.endpoint, self.sessions = pool, endpoint, sessions

    def open(self, name: str = "t", seed: str | None = "s", **limits: Any) -> Session:
        known = {"context_tokens": CONTEXT_TOKENS, "max_calls": 100, "idle_seconds": 60.0}
        sampling = SamplingSettings(200)
        return self.sessions.open(name, seed, sampling, Limits(**(known | limits)), self.pool)


@asynccontextmanager
async def scripted_endpoint(
    pool: ScriptedPool | None = None, *, is_held: bool = False, **config: Any
) -> AsyncIterator[Scripted]:
    pool = pool or ScriptedPool()
    codec = Codec(pool.tokenizer, CONTEXT_TOKENS)
    sessions = Sessions(codec)
    endpoint = Endpoint(sessions, EndpointConfig(**config), model="policy", is_held=is_held)
    await endpoint.start()
    try:
        yield Scripted(pool, endpoint, sessions)
    finally:
        await endpoint.close()
        codec.close()
