"""Environments given by a function `interact(messages)`, as in RL2.

The function returns new messages for the conversation, or an empty list to end the attempt:

    TOOL = {"name": "price", "description": "...", "parameters": {...}}     # or a list of them; may be missing

    def interact(messages):
        called = re.search(r"<tool_call>(.*?)</tool_call>", messages[-1]["content"], re.DOTALL)
        return [{"role": "tool", "content": answer(called[1])}] if called else []

In a recipe, name its file: `rollout.environment: path/to/file.py:interact`.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.environments import Message, Start, Step, Turn
from megarl.environments.tools import start_call
from megarl.types import Problem

KNOWN = ("messages", "answer", "record")
"""Parameters of `interact` with values of the attempt. The recipe sets all others."""


def is_interact(value: object) -> bool:
    """Return whether an object is a function with a parameter `messages`, like RL2's environments."""
    return inspect.isfunction(value) and "messages" in inspect.signature(value).parameters


class Interact:
    """Environment given by a function `interact(messages)`.

    The attempt starts with the problem's messages. After each turn the function gets the whole conversation, including
    tool calls and reasoning as sampled, and returns new messages. An empty list ends the attempt. After the last turn
    allowed by `rollout.max_turns` the function is not called. Reward functions score the last turn.

    The function may have further parameters: `answer` and `record` are values of the problem, the recipe sets others.
    It may be `async def`; otherwise it runs in a thread. The variable `TOOL` of its module lists tools for the policy.
    """

    def __init__(self, function: Callable[..., Any], **settings: Any) -> None:
        parameters = inspect.signature(function).parameters
        self._function, self._settings = function, settings
        self._problem_parameters = [name for name in KNOWN if name in parameters]
        # Raises TypeError for settings that the function does not take.
        inspect.signature(function).bind(**dict.fromkeys(self._problem_parameters), **settings)
        tools = getattr(sys.modules.get(function.__module__), "TOOL", None) or ()
        self.tools = tuple(map(_schema, [tools] if isinstance(tools, Mapping) else tools))

    async def reset(self, problem: Problem, seed: int) -> Start:
        self._problem = problem
        self._messages: list[Message] = [*problem.messages]
        return Start(problem.messages, self.tools)

    async def step(self, turn: Turn) -> Step:
        """Append the completion, and call the user's function for the next messages. An empty list ends the attempt."""
        self._messages.append({"role": "assistant", "content": turn.completion})
        if turn.is_last:
            return Step(done=True)
        problem = self._problem
        values = {"messages": self._messages, "answer": problem.answer, "record": dict(problem.record)}
        # Copied, because the function may change its arguments.
        arguments = copy.deepcopy({name: values[name] for name in self._problem_parameters})
        new_messages = await start_call(self._function, arguments | self._settings)
        if not isinstance(new_messages, Sequence) or isinstance(new_messages, str):
            raise TypeError(f"{self._function.__name__} gave {new_messages!r:.80}, not a list of messages")
        self._messages += new_messages
        return Step(tuple(new_messages), done=not new_messages)

    async def close(self) -> None:
        pass


def _schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool if "function" in tool else {"type": "function", "function": dict(tool)}
