"""Rewards: what is good, decided by functions of a completion's text and the gold answer.

A reward function is `(completion_text, answer, *, correct_score) -> megarl.types.Reward`, pure and free to be slow: it
runs in a process of its own that is killed at a deadline. A recipe names functions of the table below, or its own as
`package.module:function` or `path/to/file.py:function`.

Reading order: `boxed`, `think_answer_tags` (formats), `math_equivalence` (is the answer right), `scores` (what a
function may return), `server` (the process that calls functions), `keeper` (its parent, which bounds it), `worker` (the
driver's side of one process, over `frames`), `scoring` (the pool).
Importing this package imports no reward function; a function's module is imported in a reward process only.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable

from megarl.files.python_function import import_function, is_import_path
from megarl.types import ConfigError, Reward

REWARDS = {
    "boxed": "megarl.rewards.boxed:boxed",
    "think_answer_tags": "megarl.rewards.think_answer_tags:think_answer_tags",
}

EXPECTED = "def {function}(completion_text: str, answer: str, *, correct_score: float) -> megarl.types.Reward"
"""How a reward function is defined."""


def locate(name: str) -> str:
    """The import path that a recipe's reward name stands for; imports nothing.

    Raises ConfigError if `name` is neither a key of the table nor an import path (`files.python_function`).
    """
    path = REWARDS.get(name, name)
    if is_import_path(path):
        return path
    nearest = difflib.get_close_matches(name, REWARDS, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    known = ", ".join(REWARDS)
    raise ConfigError(
        f"reward.functions: unknown reward {name!r}.{hint} Known: {known}; your own: package.module:function or "
        "path/to/file.py:function."
    )


def resolve(name: str) -> Callable[..., Reward]:
    """The reward function of that name; imports its module.

    Raises ConfigError if there is no such function, or its module cannot be imported.
    """
    locate(name)
    return import_function(REWARDS.get(name, name), "reward.functions")


def check_signature(name: str, function: Callable[..., object]) -> None:
    """Raise ConfigError if the function cannot be called as a reward function is."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # Some functions of compiled modules do not tell; they show it when they are called.
    try:
        signature.bind("completion", "answer", correct_score=1.0)
    except TypeError as error:
        raise ConfigError(
            f"reward.functions: {name!r}: its signature is {signature}, which does not take completion, answer and "
            f"correct_score ({error}). Define it as: {expected(name)}"
        ) from None


def expected(name: str) -> str:
    """The line that defines a reward function of that name."""
    return EXPECTED.format(function=locate(name).rpartition(":")[2])
