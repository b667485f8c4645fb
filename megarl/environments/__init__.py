"""Environments that a policy acts in: a small async protocol and a table of members; no torch.

A new environment is a file here and a line in `ENVIRONMENTS`; or a class in a file of its own, which the recipe names
(`rollout.environment: path/to/file.py:Class`).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, cast

from megarl.files.import_path import Choices
from megarl.types import ConfigError, Problem, ToolCall

Message = Mapping[str, Any]
"""A message of a conversation: `role`, `content` and what else the chat template reads."""

ENVIRONMENTS = {
    "single_turn": "megarl.environments.single_turn:SingleTurn",
    "calculator": "megarl.environments.calculator:Calculator",
    "python": "megarl.environments.python:Python",
    "search": "megarl.environments.search:Search",
    "countdown": "megarl.environments.countdown:Countdown",
    "guess_number": "megarl.environments.guess_number:GuessNumber",
    "mastermind": "megarl.environments.mastermind:Mastermind",
    "reasoning_gym": "megarl.environments.reasoning_gym:ReasoningGym",
    "gem": "megarl.environments.gem:Gem",
    "openenv": "megarl.environments.openenv:OpenEnv",
    "verifiers": "megarl.environments.verifiers:Verifiers",
}
"""The environments that a recipe can name, and where their classes are."""


@dataclass(frozen=True, slots=True)
class Start:
    """How an attempt begins: the messages that the policy answers first, and the tools that it may call.

    `tools` are JSON schemas in OpenAI's form, {"type": "function", "function": {"name": ..., "description": ...,
    "parameters": {...}}}; the chat template writes them into the prompt.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """A completion of the policy: its text without special tokens, and its number within the attempt, from 0.

    `finish_reason` is `length` where the completion met a limit of its length before it ended. `calls` are the tools
    that it calls, in its order, and `reasoning` is what it thought before; `text` is without both, `completion` with
    them. `is_last` says that `rollout.max_turns` allows no further turn.
    """

    number: int
    text: str
    finish_reason: Literal["stop", "length"]
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    completion: str = ""
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """The answer to a turn: the observation (messages before the next turn), a reward, whether the attempt is done.

    The reward of an attempt is the sum of its steps' rewards. Where no step has one, the recipe's reward functions
    score the text of the last turn. `answer_correct` is the verdict for accuracy metrics and
    `algorithm.dynamic_sampling`. Where no step has one, a sum of 1 is right and 0 wrong; after any other sum the run
    logs no accuracy. `metrics` are numbers of this step, each logged as `environment/NAME`: the mean over attempts of
    the sum over steps.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    answer_correct: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class EnvironmentUnavailableError(Exception):
    """A fault that is not the policy's, such as a server that does not answer: the attempt is begun anew.

    `rollout.budget.attempts` says how often; then it has no reward.
    """


class Environment(Protocol):
    """One attempt at a problem: made fresh for it, with the recipe's `rollout.environment_kwargs`, and closed once.

    Its methods may be plain `def` and block: its attempts then run in processes (`rollout.environment_processes`).

    One whose attempts always have the same tools may say so in an attribute `tools`, as `Start` has them: they are
    checked before a run starts. One that makes its problems of their numbers (`Problem.index`) says so with
    `makes_problems = True`, and takes data `environment:COUNT`; the record's `split` is then train or validation. Its
    constructor takes settings, `reset` opens what must be closed. A method `check()`, if any, is called once before a
    run starts, and raises what is wrong.
    """

    async def reset(self, problem: Problem, seed: int) -> Start:
        """Begin. Equal problems and seeds begin alike."""
        ...

    async def step(self, turn: Turn) -> Step:
        """Take the policy's turn."""
        ...

    async def close(self) -> None:
        """Release resources; called once, after the attempt's end or error."""
        ...


class Agent(Protocol):
    """An agent that makes an attempt by itself at `rollout.endpoint`, which records it; made fresh for each."""

    async def run(self, told: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
        """Make an attempt. Returns its reward, or None: the recipe's reward functions score the last completion.

        `told` is the problem, as the program of environment `command` gets it. Whatever this raises ends the attempt
        with an error, and it is cancelled after `rollout.agent.timeout_seconds`.
        """
        ...


def is_agent(name: str) -> bool:
    """Whether a recipe's environment is a program or an `Agent`, which talk to the endpoint. Raises ConfigError."""
    return name == "command" or inspect.iscoroutinefunction(getattr(_CHOICES.load(name), "run", None))


METHODS = ("reset", "step", "close")
"""Of an environment."""
TOOL_SCHEMA = "_megarl_tool_schema"
"""The attribute of a method that is a tool (`environments.tools`)."""
PROCESSES_PER_CPU, MAX_DEFAULT_PROCESSES = 4, 64
"""Of an environment that may block, where the recipe does not say."""
_CHOICES = Choices("rollout.environment", "environment", "class", ENVIRONMENTS)


def find_environment(name: str) -> Callable[..., Environment]:
    """The class that a recipe names: one of `ENVIRONMENTS`, `package.module:Class` or `path/to/file.py:Class`.

    Or the environment of a function `interact(messages)` (`megarl.environments.interact`). Raises ConfigError where
    there is none, or it has not the methods of `Environment`.
    """
    from megarl.environments.interact import Interact, is_interact

    found = _CHOICES.load(name)
    if is_interact(found):
        return partial(Interact, found)
    if not inspect.isclass(found):
        raise ConfigError(
            f"rollout.environment: {name!r}: is no class; give one with `async def` {', '.join(METHODS)}, or "
            "a function interact(messages)"
        )
    if inspect.iscoroutinefunction(getattr(found, "run", None)):
        return cast(Callable[..., Environment], found)  # an Agent
    if wrong := [method for method in METHODS if not inspect.isfunction(getattr(found, method, None))]:
        raise ConfigError(f"rollout.environment: {name!r}: the class lacks `async def` {', '.join(wrong)}")
    return cast(Callable[..., Environment], found)


def num_processes(name: str, given: int | None) -> int:
    """How many processes the attempts of an environment run in, 0: none but the driver, where agents are, too.

    `given` is the recipe's `rollout.environment_processes`. Raises ConfigError where the driver would have to run a
    method that is no coroutine.
    """
    if is_agent(name):
        return 0
    found = find_environment(name)
    made, functions = (found.func, found.args) if isinstance(found, partial) else (found, ())
    methods = [getattr(made, method) for method in METHODS]
    members = [getattr(made, member, None) for member in dir(made)]
    tools = [member for member in members if hasattr(member, TOOL_SCHEMA)]
    if given == 0 and not all(map(inspect.iscoroutinefunction, methods)):
        raise ConfigError(
            f"rollout.environment_processes = 0: a method of {name} is no `async def` and would hold up the driver; "
            "leave the field out, or write all three as coroutines that do not block"
        )
    if given is not None:
        return given
    may_block = not all(map(inspect.iscoroutinefunction, (*methods, *tools, *functions)))
    return min(PROCESSES_PER_CPU * (os.cpu_count() or 1), MAX_DEFAULT_PROCESSES) if may_block else 0


def with_sandbox(name: str, settings: Mapping[str, Any], sandbox: Mapping[str, Any]) -> Mapping[str, Any]:
    """An environment's settings with those of the recipe's `sandbox`, if its constructor takes them and has none."""
    takes = "sandbox" in inspect.signature(find_environment(name)).parameters
    return {"sandbox": dict(sandbox), **settings} if takes else settings


def environment_maker(name: str, settings: Mapping[str, Any]) -> Callable[[], Environment]:
    """A function that makes the environment of that name with its settings, `rollout.environment_kwargs`.

    Raises ConfigError as `find_environment`, and for settings that its constructor does not take, or lacks.
    """
    found = find_environment(name)
    try:
        inspect.signature(found).bind(**settings)
    except TypeError as error:
        known = ", ".join(str(parameter) for parameter in inspect.signature(found).parameters.values())
        raise ConfigError(
            f"rollout.environment_kwargs = {dict(settings)}: {name} does not take them: {error}. "
            f"Its settings: {known or 'none'}"
        ) from error
    return partial(found, **settings)
