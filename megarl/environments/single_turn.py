"""Environment of one question and one answer."""

from __future__ import annotations

from megarl.environments import Start, Step, Turn
from megarl.types import Problem


class SingleTurn:
    """Environment with the problem's messages and a single completion. Reward functions score the answer."""

    async def reset(self, problem: Problem, seed: int) -> Start:
        return Start(problem.messages)

    async def step(self, turn: Turn) -> Step:
        return Step(done=True)

    async def close(self) -> None:
        pass
