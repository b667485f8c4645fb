"""Rewards: functions and servers that score a completion. README.md describes them for users.

`functions` has the functions named in recipes, `maths` compares two answers, and `scoring` calls functions and servers
and adds their scores. The tables of this module list, for each reward, its function, its check of data records, its
reader of final answers and its system prompt. Importing this package imports no reward function: only reward processes
do that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from megarl.files.import_path import Choices, import_object
from megarl.rewards.moved import find_moved_modules

find_moved_modules()

REWARDS = {
    "boxed": "megarl.rewards.functions.marked_answers:boxed",
    "think_answer_tags": "megarl.rewards.functions.marked_answers:think_answer_tags",
    "code": "megarl.rewards.functions.code:code",
    "gsm8k": "megarl.rewards.functions.gsm8k:gsm8k",
    "math_competition": "megarl.rewards.functions.math_competition:math_competition",
    "math_verify": "megarl.rewards.functions.math_verify:math_verify",
    "multiple_choice": "megarl.rewards.functions.multiple_choice:multiple_choice",
    "format": "megarl.rewards.functions.answer_format:answer_format",
    "length": "megarl.rewards.functions.length:length",
    "reasoning_gym": "megarl.rewards.functions.reasoning_gym:reasoning_gym",
}

SERVED = {
    "judge": "megarl.rewards.scoring.judge:Judge",
    "remote": "megarl.rewards.scoring.remote_model:RemoteModel",
}
"""Clients of scoring servers: name in a recipe, and import path of the class."""

RECORD_CHECKS = {
    "boxed": "megarl.rewards.functions.final_answers:check_gold_answer",
    "think_answer_tags": "megarl.rewards.functions.final_answers:check_gold_answer",
    "code": "megarl.rewards.functions.code_cases:check_record",
    "math_competition": "megarl.rewards.functions.final_answers:check_gold_answers",
    "math_verify": "megarl.rewards.functions.final_answers:check_gold_texts",
    "gsm8k": "megarl.rewards.functions.gsm8k:check_record",
    "multiple_choice": "megarl.rewards.functions.multiple_choice:check_record",
    "length": "megarl.rewards.functions.length:check_record",
    "reasoning_gym": "megarl.rewards.functions.reasoning_gym:check_record",
    "reasoning_gym.TASK": "megarl.rewards.functions.reasoning_gym:check_metadata",
}
"""Checks of data records before a run, by reward function. The modules import quickly.

A check takes the gold answer, the record and the recipe's keyword arguments. It raises ValueError for a record that the
function cannot score.
"""

ANSWER_READERS = {
    "boxed": "megarl.rewards.functions.final_answers:read_boxed_answer",
    "think_answer_tags": "megarl.rewards.functions.final_answers:read_tagged_answer",
    "gsm8k": "megarl.rewards.functions.gsm8k:final_answer",
    "math_competition": "megarl.rewards.functions.final_answers:read_competition_answer",
    "multiple_choice": "megarl.rewards.functions.multiple_choice:final_answer",
    "reasoning_gym": "megarl.rewards.functions.reasoning_gym:final_answer",
    "reasoning_gym.TASK": "megarl.rewards.functions.reasoning_gym:final_answer",
}
"""Readers of final answers for majority voting (`majority_at_K`), by reward function. The modules import quickly.

A reader takes completion, record and the recipe's keyword arguments. It returns the final answer as text, or None.
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
    "math_verify": _BOXED,
    "multiple_choice": (
        "Think the question through step by step. Then write the letter of the right choice, and nothing else, in "
        "\\boxed{}."
    ),
    "reasoning_gym": _TAGS,
    "reasoning_gym.TASK": _TAGS,
}
"""System prompts with the answer format of each reward function, for `data.system_prompt: default`."""

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
"""System prompts by answer form, for functions whose keyword argument `forms`, `form` or `place` selects a form."""


_CHOICES = Choices("reward.functions", "reward", "function", REWARDS | SERVED)
_TASK = re.compile(r"reasoning_gym\.(\w+)", re.ASCII)
_SERVED_NAME = re.compile(rf"({'|'.join(SERVED)})(?:\.[\w-]+)?", re.ASCII)


def find_import_path(name: str) -> str:
    """Return the import path of a reward named in a recipe. Raises ConfigError for an unknown name."""
    if task := _TASK.fullmatch(name):
        return f"megarl.rewards.functions.reasoning_gym:{task[1]}"
    return _CHOICES.find_import_path(server_kind(name) or name)


def server_kind(name: str) -> str | None:
    """Return the kind of a reward's HTTP server, `judge` or `remote`. None: the reward is a function."""
    match = _SERVED_NAME.fullmatch(name)
    return match[1] if match else None


def system_prompt_of(name: str, kwargs: Mapping[str, Any]) -> str | None:
    """Return the system prompt with a reward function's answer format. None: it requires no format.

    Of several accepted forms, the prompt describes the first.
    """
    forms = next((kwargs[key] for key in ("forms", "form", "place") if kwargs.get(key)), None)
    if forms is None:
        return SYSTEM_PROMPTS.get(kind_of(name))
    return FORM_PROMPTS.get(forms if isinstance(forms, str) else forms[0])


def kind_of(name: str) -> str:
    """Return a reward's key in this module's tables: its name. All tasks of reasoning_gym share one key."""
    return "reasoning_gym.TASK" if _TASK.fullmatch(name) else name


def metric_name(name: str) -> str:
    """Return a reward function's short name for metrics (`reward/NAME/mean`), without module or file."""
    return name.rpartition(":")[2]


def resolve(name: str) -> Callable[..., Any]:
    """Import and return a recipe's reward function. Raises ConfigError if it or its module cannot be imported."""
    return import_object(find_import_path(name), "reward.functions")
