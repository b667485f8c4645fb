"""Engines played by a test, with exact counts of their sampled tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.config.parallel import ParallelConfig
from megarl.rollout.pool import EnginePool
from megarl.types import Completion, PeerLostError, Request


def completion(name: str, num_tokens: int, finish_reason: Any = "abort") -> Completion:
    values = np.zeros(num_tokens, np.float32)
    token_ids, versions = np.full(num_tokens, 40, np.int64), np.ones(num_tokens, np.int32)
    return Completion(name, token_ids, values, finish_reason, versions)


@dataclass
class PlayedEngine:
    """One engine: its requests, and the call that waits for a test's answer."""

    running: dict[str, list[int]] = field(default_factory=dict)
    """(tokens sampled, most tokens, tokens reported to the pool) of each unfinished request."""
    call: tuple[str, Any, asyncio.Future[Any]] | None = None
    is_lost: bool = False


class PlayedEngines:
    """The ranks of several engines. A test answers each call, at the moment of its choice.

    `num_sampled` counts all tokens, `num_unknown` those that a lost engine never reported. `losses` has the names of
    requests that were in an engine when it was lost, once per loss.
    """

    def __init__(self, num_engines: int, draw: random.Random) -> None:
        self.engines = [PlayedEngine() for _ in range(num_engines)]
        self.num_sampled = self.num_unknown = 0
        self.losses: list[str] = []
        self._draw = draw

    async def ask(self, ranks: Sequence[int], method: str, per_rank: Sequence[Any], *_: Any, **__: Any) -> Any:
        engine = self.engines[ranks[0]]
        if engine.is_lost:
            raise PeerLostError("the engine is lost")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        assert engine.call is None, "an engine gets one call at a time"
        engine.call = method, per_rank[0], answer
        return [await answer]

    @property
    def waiting(self) -> list[PlayedEngine]:
        """Engines whose call waits for an answer."""
        return [engine for engine in self.engines if engine.call is not None]

    def answer(self, engine: PlayedEngine) -> None:
        """Answer the call of an engine. It ends the aborted requests, and some of those that sample."""
        assert engine.call is not None
        (method, work, answer), engine.call = engine.call, None
        if method == "sampled_so_far":
            for counts in engine.running.values():
                counts[2] = counts[0]
            answer.set_result({name: counts[0] for name, counts in engine.running.items()})
            return
        answer.set_result(self._advance(engine, *work))

    def _advance(self, engine: PlayedEngine, new: Sequence[Request], aborts: Sequence[str]) -> list[Completion]:
        ended = [completion(name, engine.running.pop(name)[0]) for name in aborts if name in engine.running]
        self._sample(engine, new)
        for name, (num_tokens, most, _) in list(engine.running.items()):
            if num_tokens == most or (num_tokens and self._draw.random() < 0.3):
                del engine.running[name]
                ended.append(completion(name, num_tokens, "length" if num_tokens == most else "stop"))
        return ended

    def _sample(self, engine: PlayedEngine, new: Sequence[Request], aborts: Sequence[str] = ()) -> None:
        for request in new:
            assert request.request_id not in engine.running
            engine.running[request.request_id] = [0, request.sampling.max_new_tokens, 0]
        for counts in (counts for name, counts in engine.running.items() if name not in aborts):
            num_tokens = self._draw.randint(0, counts[1] - counts[0])
            counts[0] += num_tokens
            self.num_sampled += num_tokens

    def lose(self, engine: PlayedEngine) -> None:
        """Lose an engine. If a call waits, it may have sampled for that call."""
        engine.is_lost = True
        call, engine.call = engine.call, None
        if call is not None:
            method, work, answer = call
            if method == "advance" and self._draw.random() < 0.5:
                self._sample(engine, *work)
            answer.set_exception(PeerLostError("the engine is lost"))
        self.num_unknown += sum(num_tokens - num_known for num_tokens, _, num_known in engine.running.values())
        self.losses += engine.running
        engine.running = {}


class PlayedPool:
    """A pool of three played engines, and the events in their life."""

    def __init__(self, seed: int, *, all_may_be_lost: bool = False) -> None:
        self.draw = random.Random(seed)
        self.engines = PlayedEngines(3, self.draw)
        self.pool = EnginePool(self.engines, ParallelConfig(1, 1, 3, 1), max_running=3)
        self.pausing: asyncio.Task[None] | None = None
        self.num_replicas_to_keep = 0 if all_may_be_lost else 1

    def answer(self) -> None:
        if self.engines.waiting:
            self.engines.answer(self.draw.choice(self.engines.waiting))

    def lose(self) -> None:
        live = [engine for engine in self.engines.engines if not engine.is_lost]
        if len(live) > self.num_replicas_to_keep:
            self.engines.lose(self.draw.choice(live))

    def pause(self) -> None:
        if self.pausing is None:
            self.pausing = asyncio.create_task(self.pool.pause(aborts=self.draw.random() < 0.5))

    def resume(self) -> None:
        """End a pause that is complete. A lost engine may begin again then."""
        if self.pausing is None or not self.pausing.done():
            return
        # A pause raises the failure of the pool, and so do its requests.
        self.pausing.exception()
        if self.draw.random() < 0.2:
            # Pause once more, as a run does that saves in a pause.
            self.pausing = asyncio.create_task(self.pool.pause())
            return
        self.pausing = None
        if self.pool.load().failure is None:
            self.use_live_engines()
            for engine in self.engines.engines:
                engine.is_lost = engine.is_lost and self.draw.random() < 0.5
            # A run without engines does not resume its pool.
            self.engines.engines[0].is_lost &= any(not engine.is_lost for engine in self.engines.engines[1:])
            self.use_live_engines()
        self.pool.resume()

    def use_live_engines(self) -> None:
        self.pool.set_live_replicas([place for place, engine in enumerate(self.engines.engines) if not engine.is_lost])
