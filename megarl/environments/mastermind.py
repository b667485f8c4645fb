"""Mastermind, a game of guessing a word."""

from __future__ import annotations

import random
import re
from collections import Counter

from megarl.environments import Start, Step, Turn
from megarl.types import Problem

LETTERS = "ABCDEFGH"


class Mastermind:
    """Game of guessing a word of `length` letters, out of the first `num_letters` of the alphabet.

    Each reply states the number of letters in place. The word is drawn from the problem's index. The guess is the last
    word of a turn with the right length and letters. The reward is 1 for the right word within `max_guesses`. Otherwise
    it is `partial_reward` (0: none) times the share of letters in place in the last guess.
    """

    makes_problems = True

    def __init__(
        self, *, length: int = 4, num_letters: int = 6, max_guesses: int = 8, partial_reward: float = 0.0
    ) -> None:
        if not 1 <= length <= 12 or not 2 <= num_letters <= len(LETTERS) or max_guesses < 1:
            raise ValueError(
                f"length must be from 1 to 12, num_letters from 2 to {len(LETTERS)}, max_guesses at least 1"
            )
        self.length = length
        self.letters = LETTERS[:num_letters]
        self.max_guesses = max_guesses
        self.partial_reward = partial_reward

    async def reset(self, problem: Problem, seed: int) -> Start:
        # A text as seed gives the same problem in every process.
        generator = random.Random(f"mastermind {problem.index}")
        self.secret = "".join(generator.choice(self.letters) for _ in range(self.length))
        question = (
            f"Find my word of {self.length} letters, each one of {' '.join(self.letters)}. Guess, one word a turn."
        )
        return Start((*problem.messages[:-1], {"role": "user", "content": question}))

    async def step(self, turn: Turn) -> Step:
        """Judge the last word of a turn: letters in place, and letters elsewhere."""
        words = re.findall(rf"\b[{self.letters}]{{{self.length}}}\b", turn.text)
        guess = words[-1] if words else ""
        num_in_place, num_elsewhere = count_marks(guess, self.secret)
        if guess == self.secret:
            return Step(reward=1.0, done=True, answer_correct=True, metrics={"guesses": 1.0})
        if turn.number + 1 >= self.max_guesses:
            reward = self.partial_reward * num_in_place / self.length
            return Step(reward=reward, done=True, answer_correct=False, metrics={"guesses": 1.0})
        hint = (
            f"{num_in_place} in place, {num_elsewhere} elsewhere."
            if guess
            else f"Give a word of {self.length} letters."
        )
        return Step(({"role": "user", "content": hint},), metrics={"guesses": 1.0})

    async def close(self) -> None:
        pass


def count_marks(guess: str, secret: str) -> tuple[int, int]:
    """Return (letters in place, further letters elsewhere in the secret word)."""
    num_in_place = sum(letter == secret_letter for letter, secret_letter in zip(guess, secret, strict=False))
    return num_in_place, (Counter(guess) & Counter(secret)).total() - num_in_place
