"""Game of guessing a number."""

from __future__ import annotations

import random
import re

from megarl.environments import Start, Step, Turn
from megarl.types import Problem


class GuessNumber:
    """Game of guessing a number from 1 to `max_number`, drawn from the problem's index. The hints are higher and lower.

    The last number in a turn is the guess. The reward is 1 for a right guess within `max_guesses`, else 0. A state's
    name has the numbers still possible and the number of guesses made.
    """

    makes_problems = True
    names_states = True

    def __init__(self, *, max_number: int = 100, max_guesses: int = 8) -> None:
        if max_number < 2 or max_guesses < 1:
            raise ValueError("max_number must be at least 2, max_guesses at least 1")
        self.max_number = max_number
        self.max_guesses = max_guesses

    async def reset(self, problem: Problem, seed: int) -> Start:
        # A text as seed gives the same problem in every process.
        self.secret = random.Random(f"guess_number {problem.index}").randint(1, self.max_number)
        self.low, self.high = 1, self.max_number
        question = f"I think of a number from 1 to {self.max_number}. Guess it, one number a turn."
        return Start((*problem.messages[:-1], {"role": "user", "content": question}), state=self._state(0))

    async def step(self, turn: Turn) -> Step:
        """Judge the last number of a turn, and hint whether the secret is higher or lower."""
        # For any completion these limits keep the search fast, and `int` within Python's limit of digits.
        numbers = re.findall(r"\d+", turn.text[-2000:])
        guess = int(numbers[-1]) if numbers and len(numbers[-1]) < 20 else None
        if guess == self.secret:
            return Step(reward=1.0, done=True, answer_correct=True, metrics={"guesses": 1.0})
        if turn.number + 1 >= self.max_guesses:
            return Step(reward=0.0, done=True, answer_correct=False, metrics={"guesses": 1.0})
        hint = "Give a number." if guess is None else "Higher." if guess < self.secret else "Lower."
        if guess is not None and guess < self.secret:
            self.low = max(self.low, guess + 1)
        elif guess is not None:
            self.high = min(self.high, guess - 1)
        state = self._state(turn.number + 1)
        return Step(({"role": "user", "content": hint},), metrics={"guesses": 1.0}, state=state)

    def _state(self, num_guesses: int) -> str:
        return f"{self.low} to {self.high}, {num_guesses} guesses"

    async def close(self) -> None:
        pass
