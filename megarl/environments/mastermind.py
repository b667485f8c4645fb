"""Mastermind: a game of several turns, guess a word of few letters by how many of them stood right."""

from __future__ import annotations

import random
import re
from collections import Counter

from megarl.environments import Start, Step, Turn
from megarl.types import Problem

LETTERS = "ABCDEFGH"


class Mastermind:
    """A word of `length` letters, each of the first `num_letters`, drawn from the problem's index.

    The last word of a turn that has the length and the letters is its guess. The reward is 1 for the word within
    `max_guesses`, else the share of letters that the last guess had in their places, by `partial_reward` (0: none).
    """

    makes_problems = True

    def __init__(
        self, *, length: int = 4, num_letters: int = 6, max_guesses: int = 8, partial_reward: float = 0.0
    ) -> None:
        if not 1 <= length <= 12 or not 2 <= num_letters <= len(LETTERS) or max_guesses < 1:
            raise ValueError(
                f"length must be from 1 to 12, num_letters from 2 to {len(LETTERS)}, max_guesses 1 at least"
            )
        self.length = length
        self.letters = LETTERS[:num_letters]
        self.max_guesses = max_guesses
        self.partial_reward = partial_reward

    async def reset(self, problem: Problem, seed: int) -> Start:
        generator = random.Random(f"mastermind {problem.index}")
        self.secret = "".join(generator.choice(self.letters) for _ in range(self.length))
        question = (
            f"Find my word of {self.length} letters, each one of {' '.join(self.letters)}. Guess, one word a turn."
        )
        return Start((*problem.messages[:-1], {"role": "user", "content": question}))

    async def step(self, turn: Turn) -> Step:
        words = re.findall(rf"\b[{self.letters}]{{{self.length}}}\b", turn.text)
        guess = words[-1] if words else ""
        right, elsewhere = marks(guess, self.secret)
        if guess == self.secret:
            return Step(reward=1.0, done=True, answer_correct=True, metrics={"guesses": 1.0})
        if turn.number + 1 >= self.max_guesses:
            reward = self.partial_reward * right / self.length
            return Step(reward=reward, done=True, answer_correct=False, metrics={"guesses": 1.0})
        hint = f"{right} in place, {elsewhere} elsewhere." if guess else f"Give a word of {self.length} letters."
        return Step(({"role": "user", "content": hint},), metrics={"guesses": 1.0})

    async def close(self) -> None:
        pass


def marks(guess: str, secret: str) -> tuple[int, int]:
    """How many letters of a guess stand in their place, and how many more are in the word elsewhere."""
    right = sum(one == other for one, other in zip(guess, secret, strict=False))
    return right, (Counter(guess) & Counter(secret)).total() - right
