"""Each token that an engine sampled for an aborted request is reported, whenever the request is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megarl.config.parallel import ParallelConfig
from megarl.rollout.pool import EnginePool
from megarl.types import Completion, Request, SamplingSettings

ONE = ParallelConfig(1, 1, 1, 1)


class PlayedEngine:
    """The ranks of one engine. A test answers each call."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[tuple[Any, asyncio.Future[list[Completion]]]] = asyncio.Queue()

    async def next_call(self) -> tuple[Any, asyncio.Future[list[Completion]]]:
        """Return the next call's arguments, and the future of its answer. Raises TimeoutError if none comes."""
        return await asyncio.wait_for(self.calls.get(), 30)

    async def ask(self, ranks: Sequence[int], method: str, per_rank: Sequence[Any], *arguments: Any, **_: Any) -> Any:
        answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self.calls.put_nowait((per_rank[0], answer))
        return [await answer]


def completion(num_tokens: int) -> Completion:
    values = np.zeros(num_tokens, np.float32)
    return Completion(
        request_id="a",
        token_ids=np.zeros(num_tokens, np.int64),
        rollout_logprobs=values,
        weight_versions=values.astype(np.int32),
        finish_reason="abort",
    )


# A pool that waits in a loop without end would stop the event loop. Its error would reach no one but its task.
@pytest.mark.timeout(60)
@pytest.mark.parametrize("moment", ["before the answer", "in the cycle of the answer", "after the answer"])
@pytest.mark.parametrize("is_paused", [False, True], ids=["sampling", "pausing"])
async def test_tokens_of_a_cancelled_request_are_reported(is_paused: bool, moment: str) -> None:
    engine, reports = PlayedEngine(), list[int]()
    pool = EnginePool(engine, ONE, max_running=4)
    request = Request("a", np.array((5,), np.int32), SamplingSettings(100, 1.0), 0)
    asking = asyncio.create_task(pool.generate(request, on_abort=reports.append))
    _, answer = await engine.next_call()
    pausing = None
    if is_paused:
        pausing = asyncio.create_task(pool.pause())
        await asyncio.sleep(0)
        answer.set_result([])
        (_, aborts), answer = await engine.next_call()
        assert aborts == ("a",)
    if moment == "before the answer":
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        answer.set_result([completion(7)])
    else:
        answer.set_result([completion(7)])
        if moment == "after the answer":
            await asyncio.sleep(0)
        # Without the sleep, the pool reads the answer before the request's task notices this cancellation.
        asking.cancel()
    if pausing is not None:
        await pausing
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.sleep(0)
    assert asking.cancelled() and reports == [7]
    assert pool.load().num_sampled_tokens == 7
