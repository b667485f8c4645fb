"""Whatever the order of cancellations, answers, pauses and losses: each sampled token is returned or reported."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from megarl.rollout.pool import EnginePool
from megarl.types import Completion, Request, SamplingSettings
from tests.rollout.played_engines import PlayedPool

MAX_TOKENS = 6


class Asked:
    """A request with the reports of its tokens."""

    def __init__(self, pool: EnginePool, name: str) -> None:
        self.aborted: list[int] = []
        self.losses: list[tuple[int, bool]] = []
        request = Request(name, np.array((5,), np.int32), SamplingSettings(MAX_TOKENS, 1.0), 0)
        asking = pool.generate(
            request, on_abort=self.aborted.append, on_loss=lambda *loss: self.losses.append(loss), affinity=name[:2]
        )
        self.is_begun = False

        async def begin() -> Completion:
            self.is_begun = True
            return await asking

        self.task = asyncio.create_task(begin())

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool returned or reported."""
        is_answered = not self.task.cancelled() and self.task.exception() is None
        num_returned = len(self.task.result().token_ids) if is_answered else 0
        assert len(self.aborted) == (0 if is_answered else 1), "each request without an answer is reported once"
        return num_returned + sum(self.aborted) + sum(num_tokens for num_tokens, _ in self.losses)


class Schedule(PlayedPool):
    """A random order of the pool's events, with or without turns of the event loop between them."""

    def __init__(self, seed: int, *, all_may_be_lost: bool) -> None:
        super().__init__(seed, all_may_be_lost=all_may_be_lost)
        self.asked: list[Asked] = []

    async def run(self, num_events: int) -> None:
        for _ in range(num_events):
            event = self.draw.choices(
                [self.ask, self.cancel, self.answer, self.lose, self.pause, self.resume], [4, 2, 6, 0.4, 1, 2]
            )[0]
            event()
            for _ in range(self.draw.choice([0, 0, 1, 2, 5])):
                await asyncio.sleep(0)
        await self.finish()

    def ask(self) -> None:
        if self.pool.load().failure is None:
            self.asked.append(Asked(self.pool, f"{len(self.asked) % 7} {len(self.asked)}"))

    def cancel(self) -> None:
        running = [asked for asked in self.asked if asked.is_begun and not asked.task.done()]
        if running:
            self.draw.choice(running).task.cancel()

    async def finish(self) -> None:
        """Let all requests end, and the engines run empty."""
        for _ in range(10_000):
            self.answer()
            self.resume()
            await asyncio.sleep(0)
            is_empty = not any(engine.running for engine in self.engines.engines)
            if self.pausing is None and is_empty and all(asked.task.done() for asked in self.asked):
                break
        else:
            raise AssertionError("requests do not end")
        await asyncio.gather(*(asked.task for asked in self.asked), return_exceptions=True)
        for _ in range(10):
            self.answer()
            await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(100))
async def test_tokens_returned_and_reported_are_those_sampled(seed: int) -> None:
    schedule = Schedule(seed, all_may_be_lost=False)
    await schedule.run(150)
    engines, asked = schedule.engines, schedule.asked
    num_known = engines.num_sampled - engines.num_unknown
    assert sum(one.num_tokens for one in asked) == num_known
    assert schedule.pool.load().num_sampled_tokens == num_known
    has_unknown = any(not is_all for one in asked for _, is_all in one.losses)
    assert has_unknown or not engines.num_unknown


@pytest.mark.parametrize("seed", range(50))
async def test_the_loss_of_all_engines_is_named_in_each_report(seed: int) -> None:
    """Tokens of an engine that still sampled when the others were lost are not known: the run ends."""
    schedule = Schedule(seed, all_may_be_lost=True)
    await schedule.run(150)
    engines, asked = schedule.engines, schedule.asked
    num_reported = sum(one.num_tokens for one in asked)
    num_known = schedule.pool.load().num_sampled_tokens
    assert num_reported <= num_known <= engines.num_sampled
    has_unknown = any(not is_all for one in asked for _, is_all in one.losses)
    assert has_unknown or num_reported == engines.num_sampled
