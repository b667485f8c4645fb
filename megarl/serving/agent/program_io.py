"""Input and output of an agent program: the task as JSON, and rewards in the last line of what it prints."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

from megarl.data.sources.harbor import FIELD
from megarl.files.strict_json import RepeatedKeyError, finite_number, make_object
from megarl.rollout.attempt import Task


class ProgramError(Exception):
    """Raised to end an agent's attempt with an error. Its text has the form `KIND: reason`."""


def make_task_input(task: Task) -> dict[str, Any]:
    """Return the JSON object that an agent program reads from standard input."""
    problem = task.problem
    values = {
        "messages": [dict(message) for message in problem.messages],
        "answer": problem.answer,
        # The task's folder is on the driver's machine. The program cannot read it.
        "record": {name: value for name, value in problem.record.items() if name != FIELD},
        "index": problem.index,
        "number": task.number,
        "seed": task.key,
    }
    # A copy: an agent may change its input, and other attempts share these objects.
    return deepcopy(values)


def check_reward(reward: object) -> float:
    finite_reward = finite_number(reward)
    if finite_reward is None:
        raise ProgramError(f"ValueError: the program's reward is {reward!r:.80}, not a finite number")
    return finite_reward


def read_output(output: str) -> tuple[float | None, Any]:
    """Return a program's reward and its rewards of single turns (as printed, unchecked) from the last line of its
    output.

    A missing reward is None. Raises ProgramError unless the reward is finite and given once.
    """
    last_line = output.strip().rpartition("\n")[2]
    try:
        last_value = json.loads(last_line, object_pairs_hook=make_object)
    except RepeatedKeyError as error:
        raise ProgramError(f"ValueError: the last line of the program's output: {error}") from None
    except (ValueError, RecursionError):  # the last line may be the model's own text
        return None, None
    turn_rewards = None
    if isinstance(last_value, dict):
        turn_rewards = last_value.get("turn_rewards")
        last_value = last_value.get("reward")
        if last_value is None:
            return None, turn_rewards
    # Any JSON may be in the last line, such as a list or a number in quotes. Then there is no reward.
    elif isinstance(last_value, bool) or not isinstance(last_value, int | float):
        return None, None
    return check_reward(last_value), turn_rewards
