"""Environments in which the policy acts: an async protocol, and the table of built-in environments.

This package does not import torch. To add an environment, add a file here and a line in `ENVIRONMENTS`. Or write a
class in any other file and name it in the recipe (`rollout.environment: path/to/file.py:Class`).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, cast

from megarl.files.import_path import Choices
from megarl.types import ConfigError, Problem, ToolCall

Message = Mapping[str, Any]
"""Chat message: `role`, `content` and any other field read by the chat template."""

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
    "harbor": "megarl.environments.harbor:Harbor",
}
"""Environments by name in a recipe, with the import path of the class."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start of an attempt: messages for the policy to answer, and the tools it may call.

    `tools` are JSON schemas in OpenAI's form, {"type": "function", "function": {"name": ..., "description": ...,
    "parameters": {...}}}. The chat template writes them into the prompt. `state` names the state of the first turn, for
    `algorithm.state_weight`. `role` names the policy's role, for `algorithm.advantage: rae`.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    state: str | None = None
    role: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion of the policy: its text without special tokens, and its number within the attempt, from 0.

    `finish_reason` is `length` if a length limit cut the completion. `calls` are its tool calls in order, `reasoning`
    is its thinking. `text` excludes both, `completion` includes them. `is_last`: `rollout.max_turns` allows no further
    turn.
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
    """The environment's response to a turn: messages before the next turn, reward, and whether the attempt is done.

    The reward of an attempt is the sum of its steps' rewards. If no step has a reward, the recipe's reward functions
    score the text of the last turn.

    `answer_correct` is the verdict for accuracy metrics and `algorithm.dynamic_sampling`. If no step has a verdict, a
    total reward of 1 counts as right and 0 as wrong. For any other total no accuracy is logged.

    `metrics` are numbers of the step, logged as `environment/NAME`: summed over steps, then averaged over attempts.
    `state` names the state in which the next turn acts.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    answer_correct: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: str | None = None


class EnvironmentUnavailableError(Exception):
    """Raised by an environment for a fault outside the policy, such as an unreachable server. The attempt is retried.

    `rollout.budget.attempts` limits the tries. After the last try the attempt has no reward.
    """


class Environment(Protocol):
    """Protocol of an environment. One object serves one attempt at a problem.

    The constructor takes the recipe's `rollout.environment_kwargs`. Only `reset` may open resources that must be
    closed. Methods may be plain `def` and block. Attempts then run in processes (`rollout.environment_processes`).

    The class may have these members:

    - `tools`: tools of all problems, in the format of `Start.tools`. They are checked before a run starts.
    - `makes_problems = True`: it makes each problem from the number `Problem.index`. The recipe names
      `environment:COUNT` in place of a data file. A problem's record has only the field `split`, train or validation.
    - `names_states = True`: its `Start` and `Step` name states.
    - `names_roles = True`: its `Start` names roles.
    - `check()`: called once before a run starts; raises an error if something is wrong.
    """

    async def reset(self, problem: Problem, seed: int) -> Start:
        """Start the attempt and return its first messages. Equal problems and seeds must give equal starts."""
        ...

    async def step(self, turn: Turn) -> Step:
        """Return the environment's response to the policy's turn."""
        ...

    async def close(self) -> None:
        """Release the resources of the attempt. Called once, after its end or an error."""
        ...


class Agent(Protocol):
    """Protocol of an agent: a program that makes a whole attempt itself, and calls the policy over HTTP.

    The policy is served at `rollout.endpoint`, an OpenAI-compatible server that records the calls for training. Each
    attempt has a new agent object.
    """

    async def run(self, problem: Mapping[str, Any], base_url: str, api_key: str) -> float | None:
        """Make an attempt. Returns its reward; None: the recipe's reward functions score the last completion.

        `problem` has the fields messages, answer, record and others. `base_url` and `api_key` are for an OpenAI client.
        Any exception ends the attempt with an error. The attempt is cancelled after `rollout.agent.timeout_seconds`.
        """
        ...


def is_agent(name: str) -> bool:
    """Return whether an environment is an agent: a program, or a class with `run`.

    Raises ConfigError if it cannot be imported.
    """
    return name == "command" or inspect.iscoroutinefunction(getattr(_CHOICES.load(name), "run", None))


METHODS = ("reset", "step", "close")
TOOL_SCHEMA = "_megarl_tool_schema"
"""Attribute that marks a method as a tool."""
PROCESSES_PER_CPU, MAX_DEFAULT_PROCESSES = 4, 64
"""Default number of processes for an environment with blocking methods: per CPU, and at most."""
_CHOICES = Choices("rollout.environment", "environment", "class", ENVIRONMENTS)


def find_environment(name: str) -> Callable[..., Environment]:
    """Return the environment class named in a recipe: a key of `ENVIRONMENTS`, `package.module:Class` or
    `path/to/file.py:Class`.

    A function `interact(messages)` is wrapped in an environment. Raises ConfigError if the class does not exist or
    lacks a method of `Environment`.
    """
    from megarl.environments.interact import Interact, is_interact

    target = _CHOICES.load(name)
    if is_interact(target):
        return partial(Interact, target)
    if not inspect.isclass(target):
        raise ConfigError(
            f"rollout.environment: {name!r}: is not a class; name a class with the methods "
            f"`async def` {', '.join(METHODS)}, or "
            "a function interact(messages)"
        )
    if inspect.iscoroutinefunction(getattr(target, "run", None)):
        return cast(Callable[..., Environment], target)  # An `Agent` lacks the methods of an environment.
    if missing_methods := [method for method in METHODS if not inspect.isfunction(getattr(target, method, None))]:
        raise ConfigError(f"rollout.environment: {name!r}: the class lacks `async def` {', '.join(missing_methods)}")
    return cast(Callable[..., Environment], target)


def num_processes(name: str, configured: int | None) -> int:
    """Return the number of processes for an environment's attempts. 0: attempts run in the driver, as agents do.

    `configured` is the recipe's `rollout.environment_processes`. Raises ConfigError if it is 0 but a method is not a
    coroutine, because the method would block the driver.
    """
    if is_agent(name):
        return 0
    factory = find_environment(name)
    # A user's function `interact` is an argument of the class `Interact`.
    environment_class, functions = (factory.func, factory.args) if isinstance(factory, partial) else (factory, ())
    methods = [getattr(environment_class, method) for method in METHODS]
    members = [getattr(environment_class, member, None) for member in dir(environment_class)]
    tools = [member for member in members if hasattr(member, TOOL_SCHEMA)]
    if configured == 0 and not all(map(inspect.iscoroutinefunction, methods)):
        raise ConfigError(
            f"rollout.environment_processes = 0: a method of {name} is not `async def` and would block the driver; "
            "leave the field out, or write reset, step and close as coroutines that do not block"
        )
    if configured is not None:
        return configured
    # Blocking tools run in threads. In the driver they would compete with its event loop.
    may_block = not all(map(inspect.iscoroutinefunction, (*methods, *tools, *functions)))
    return min(PROCESSES_PER_CPU * (os.cpu_count() or 1), MAX_DEFAULT_PROCESSES) if may_block else 0


def with_sandbox(name: str, settings: Mapping[str, Any], sandbox: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an environment's settings, with the recipe's sandbox if the constructor takes one and none is set."""
    takes_sandbox = "sandbox" in inspect.signature(find_environment(name)).parameters
    return {"sandbox": dict(sandbox), **settings} if takes_sandbox else settings


def environment_maker(name: str, settings: Mapping[str, Any]) -> Callable[[], Environment]:
    """Return a function that makes the environment `name` with `settings` (`rollout.environment_kwargs`).

    Raises ConfigError if the environment cannot be imported, or for unknown or missing settings.
    """
    factory = find_environment(name)
    try:
        inspect.signature(factory).bind(**settings)
    except TypeError as error:
        parameters = ", ".join(str(parameter) for parameter in inspect.signature(factory).parameters.values())
        raise ConfigError(
            f"rollout.environment_kwargs = {dict(settings)}: the environment {name} does not take these settings: "
            f"{error}; it takes: {parameters or 'none'}"
        ) from error
    # A copy for each attempt: an object may change its settings, such as a list of remaining words.
    return lambda: factory(**deepcopy(dict(settings)))
