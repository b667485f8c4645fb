"""Seeds of sessions: no two of an endpoint draw the same random numbers, unless they were given the same seed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from megarl.serving.session_sampler import Limits
from megarl.serving.sessions import Sessions
from tests.serving.served import SAMPLING


def test_sessions_without_a_seed_draw_apart() -> None:
    """Guests ask the same prompt in sessions of their own, to get several answers."""
    unused: Any = None
    prompt = np.arange(3, dtype=np.int32)

    async def drive(seed: str | None) -> set[int]:
        sessions = Sessions(unused)
        opened = [sessions.open("guest", seed, SAMPLING, Limits(9, 9, 9.0), unused) for _ in range(3)]
        return {session._sampler.next_seed(prompt) for session in opened}

    assert len(asyncio.run(drive(None))) == 3
    assert len(asyncio.run(drive("attempt"))) == 1
