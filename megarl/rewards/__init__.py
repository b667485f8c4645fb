"""Rewards: functions of a sample's text, its gold answer and more.

A reward function is called with keyword arguments. Its parameters, in any order, are named after values of a sample
(`calling.PARAMETERS`): `def f(completion_text, answer)`, RL2's `def reward_fn(messages, answer)` and `def f(record,
num_tokens, **rest)` all work. It returns a `megarl.types.Reward`, a number, or None if it does not apply (`scores`). It
may be slow: it runs in a separate process, killed at a deadline. A recipe names functions of the table below, or its
own as `package.module:function` or `path/to/file.py:function`. Each may have a weight and keyword arguments.

`reasoning_gym.TASK` is the scorer of a reasoning-gym task. `judge` and `remote` (or `judge.NAME` and `remote.NAME` for
several) are not functions: the driver asks a server of the user over HTTP, many completions at once.

Reading order: `boxed`, `think_answer_tags`, `gsm8k`, `math_competition`, `multiple_choice` (answers), `final_answers`
(their places), `math_equivalence` (is the answer right), `quantities` and `units` (numbers with units), `formulas`
(parser and comparison of formulas), `choice_answers` (letters of choices), `answer_format`, `length`, `harmless` (safe
evaluation), `reasoning_gym`, `code` (does a program pass its tests), `code_cases` (formats of tests), `code_programs`
(programs running them), `calling` (arguments of a function), `scores` (its results), `server` (process calling
functions), `worker` (driver's side of one process, a `platform.killable` one), `served` (a scoring server), `judge` and
`remote` (its two kinds), `scoring` (the pool). Importing this package imports no reward function; a function's module
is imported in a reward process only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from megarl.files.import_path import Choices, import_object

REWARDS = {
    "boxed": "megarl.rewards.boxed:boxed",
    "think_answer_tags": "megarl.rewards.think_answer_tags:think_answer_tags",
    "code": "megarl.rewards.code:code",
    "gsm8k": "megarl.rewards.gsm8k:gsm8k",
    "math_competition": "megarl.rewards.math_competition:math_competition",
    "multiple_choice": "megarl.rewards.multiple_choice:multiple_choice",
    "format": "megarl.rewards.answer_format:answer_format",
    "length": "megarl.rewards.length:length",
    "reasoning_gym": "megarl.rewards.reasoning_gym:reasoning_gym",
}

SERVED = {
    "judge": "megarl.rewards.judge:Judge",
    "remote": "megarl.rewards.remote_model:RemoteModel",
}
"""Rewards from servers, asked by the driver."""

RECORD_CHECKS = {
    "code": "megarl.rewards.code_cases:check_record",
    "math_competition": "megarl.rewards.final_answers:check_gold_answers",
    "gsm8k": "megarl.rewards.gsm8k:check_record",
    "multiple_choice": "megarl.rewards.multiple_choice:check_record",
    "length": "megarl.rewards.length:check_record",
    "reasoning_gym": "megarl.rewards.reasoning_gym:check_record",
    "reasoning_gym.TASK": "megarl.rewards.reasoning_gym:check_metadata",
}
"""Functions of answer, record and the recipe's keyword arguments, called for every record before a start.

They raise ValueError for a record that the reward cannot score. Their modules are light to import.
"""

ANSWER_READERS = {
    "boxed": "megarl.rewards.final_answers:boxed_answer",
    "think_answer_tags": "megarl.rewards.final_answers:tagged_answer",
    "gsm8k": "megarl.rewards.gsm8k:final_answer",
    "math_competition": "megarl.rewards.final_answers:competition_answer",
    "multiple_choice": "megarl.rewards.multiple_choice:final_answer",
    "reasoning_gym": "megarl.rewards.reasoning_gym:final_answer",
    "reasoning_gym.TASK": "megarl.rewards.reasoning_gym:final_answer",
}
"""Functions of completion, record and the recipe's keyword arguments.

They return the scored final answer as text, or None (for `majority_at_K`). Their modules are light to import.
"""

_BOXED = "Work through the problem step by step. Then write the final answer, and nothing else, in \\boxed{}."
_TAGS = (
    "Think the problem through first, then answer it. Put the thoughts between <think> and </think> and the final "
    "answer between <answer> and </answer>, each pair of tags once and in this order, like this: "
    "<think> your thoughts </think><answer> your answer </answer>"
)
_CODE = (
    "Solve the problem with a Python program: think it through first, then write the whole program in one block "
    "that begins with ```python and ends with ```. Unless the problem names a function to write, the program reads "
    "standard input and prints the answer."
)
_HASHES = (
    "Work through the problem step by step. Then write the final answer, a number and nothing else, on a last line "
    "that begins with ####."
)
SYSTEM_PROMPTS = {
    "boxed": _BOXED,
    "think_answer_tags": _TAGS,
    "code": _CODE,
    "gsm8k": _HASHES,
    "math_competition": _BOXED,
    "multiple_choice": (
        "Think the question through step by step. Then write the letter of the right choice, and nothing else, in "
        "\\boxed{}."
    ),
    "reasoning_gym": _TAGS,
    "reasoning_gym.TASK": _TAGS,
}
"""Instructions for the formats of functions, used under `data.system_prompt: default`."""

FORM_PROMPTS = {
    "boxed": _BOXED,
    "tags": _TAGS,
    "think_answer_tags": _TAGS,
    "code": _CODE,
    "hashes": _HASHES,
    "answer_line": (
        "Work through the problem step by step. Then write the final answer on a last line that begins with Answer: "
        "and has nothing else."
    ),
}
"""Instructions for the forms chosen by a function's keyword arguments `forms`, `form` or `place`."""


_CHOICES = Choices("reward.functions", "reward", "function", REWARDS | SERVED)
_TASK = re.compile(r"reasoning_gym\.(\w+)", re.ASCII)
_SERVED_NAME = re.compile(rf"({'|'.join(SERVED)})(?:\.[\w-]+)?", re.ASCII)


def locate(name: str) -> str:
    """Return the import path of a recipe's reward name, without importing it. Raises ConfigError for an unknown
    name."""
    if task := _TASK.fullmatch(name):
        return f"megarl.rewards.reasoning_gym:{task[1]}"
    return _CHOICES.locate(served_kind(name) or name)


def served_kind(name: str) -> str | None:
    """Return the kind of server (`judge` or `remote`) of a recipe's reward name. None: it is a function."""
    found = _SERVED_NAME.fullmatch(name)
    return found[1] if found else None


def system_prompt_of(name: str, kwargs: Mapping[str, Any]) -> str | None:
    """Return the instruction for a reward function's format (the first of several forms). None: it has no format."""
    chosen = next((kwargs[key] for key in ("forms", "form", "place") if kwargs.get(key)), None)
    if chosen is None:
        return SYSTEM_PROMPTS.get(kind_of(name))
    return FORM_PROMPTS.get(chosen if isinstance(chosen, str) else chosen[0])


def kind_of(name: str) -> str:
    """Return the key of this package's tables for a recipe's reward name: `reasoning_gym.TASK` for all its tasks."""
    return "reasoning_gym.TASK" if _TASK.fullmatch(name) else name


def metric_name(name: str) -> str:
    """Return the name of a reward function in metrics (`reward/NAME/mean`), without its module or file."""
    return name.rpartition(":")[2]


def resolve(name: str) -> Callable[..., Any]:
    """Return the reward function `name`, importing its module or running its file.

    Raises ConfigError if the function does not exist or its module cannot be imported.
    """
    return import_object(locate(name), "reward.functions")
