"""Rewards: functions of a sample's text, its gold answer and more.

A reward function is called with keywords: its parameters are named after the values of a sample that it wants
(`calling.PARAMETERS`), in any order, so that `def f(completion_text, answer)`, RL2's `def reward_fn(messages, answer)`
and `def f(record, num_tokens, **rest)` all work. It returns a `megarl.types.Reward`, a number, or None where it does
not apply (`scores`). It may be slow: it runs in a process of its own that is killed at a deadline. A recipe names
functions of the table below, or its own as `package.module:function` or `path/to/file.py:function`, each with a weight
and keyword arguments of its own if it likes.

Reading order: `boxed`, `think_answer_tags` (formats), `final_answers` (what they state), `math_equivalence` (is the
answer right), `code` (does a program pass its tests), `code_cases` (formats of tests), `code_programs` (how they are
run), `calling` (what a function is called with), `scores` (what it may return), `server` (the process that calls
functions), `worker` (the driver's side of one process, a `platform.killable` one), `scoring` (the pool).
Importing this package imports no reward function; a function's module is imported in a reward process only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.files.import_path import Choices

REWARDS = {
    "boxed": "megarl.rewards.boxed:boxed",
    "think_answer_tags": "megarl.rewards.think_answer_tags:think_answer_tags",
    "code": "megarl.rewards.code:code",
}

SYSTEM_PROMPTS = {
    "boxed": "Work through the problem step by step. Then write the final answer, and nothing else, in \\boxed{}.",
    "think_answer_tags": (
        "Think the problem through first, then answer it. Put the thoughts between <think> and </think> and the final "
        "answer between <answer> and </answer>, each pair of tags once and in this order, like this: "
        "<think> your thoughts </think><answer> your answer </answer>"
    ),
    "code": (
        "Solve the problem with a Python program: think it through first, then write the whole program in one block "
        "that begins with ```python and ends with ```. Unless the problem names a function to write, the program reads "
        "standard input and prints the answer."
    ),
}
"""Instructions for the formats of functions, used with `data.system_prompt: default`."""


_CHOICES = Choices("reward.functions", "reward", "function", REWARDS)


def locate(name: str) -> str:
    """The import path that a recipe's reward name stands for; imports nothing. Raises ConfigError if it is for none."""
    return _CHOICES.locate(name)


def metric_name(name: str) -> str:
    """The name of a reward function in metrics, `reward/NAME/mean`: the function's own, without its module or file."""
    return name if name in REWARDS else name.rpartition(":")[2]


def resolve(name: str) -> Callable[..., Any]:
    """The reward function of that name; imports its module or runs its file.

    Raises ConfigError if there is no such function, or its module cannot be imported.
    """
    return _CHOICES.load(name)
