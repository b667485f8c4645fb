"""Arguments of reward functions, selected by the names of their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.files.nearest import nearest
from megarl.rewards import metric_name
from megarl.types import Completion, ConfigError, Problem

PARAMETERS = {
    "completion_text": "str: the completion as text",
    "answer": "str: the gold answer; a dict or a list where the data have one",
    "messages": "list of dicts: prompt_messages, then the completion as the assistant's",
    "prompt_messages": "list of dicts: the messages that it answers, earlier turns among them",
    "record": "dict: the line of the data file",
    "finish_reason": 'str: why the turn ended, "stop", "length", "abort" or "error"',
    "num_tokens": "int: tokens of the completion",
    "truncated": "bool: whether the completion hit the length limit",
    "turn": "int: number of the turn, from 1",
    "correct_score": "float: reward.correct_score",
    "sandbox": "megarl.sandbox.sandbox_fusion.AnySandbox: runs programs of the policy, if it is named",
}
"""Values of a sample available to a reward function, by parameter name."""

_OF_THE_RECIPE = ("correct_score",)
"""Parameters with values of the recipe, not of the sample. A function's kwargs may replace the values."""
_WHEN_NAMED = "sandbox"
"""Parameter passed only to functions naming it, never through `**rest`: most functions work on a machine without a
sandbox."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Completion to score, with its problem and its place in the attempt; JSON values."""

    completion_text: str
    answer: Any
    prompt_messages: tuple[Mapping[str, Any], ...] = ()
    record: Mapping[str, Any] | None = None
    finish_reason: str = "stop"
    num_tokens: int = 0
    turn: int = 1

    @classmethod
    def of(
        cls,
        problem: Problem,
        completion: Completion,
        completion_text: str,
        *,
        prompt_messages: Sequence[Mapping[str, Any]],
        turn: int,
    ) -> Sample:
        """Return the sample of a completion. `turn` is its number among the attempt's completions, from 1."""
        return cls(
            completion_text,
            problem.answer,
            tuple(prompt_messages),
            problem.record,
            completion.finish_reason,
            len(completion.token_ids),
            turn,
        )

    def values(self, names: frozenset[str], correct_score: float) -> dict[str, Any]:
        """Return the values of the given `PARAMETERS`."""
        said = {"role": "assistant", "content": self.completion_text}
        known = {
            "completion_text": self.completion_text,
            "answer": self.answer,
            "messages": [*self.prompt_messages, said],
            "prompt_messages": list(self.prompt_messages),
            "record": self.record or {},
            "finish_reason": self.finish_reason,
            "num_tokens": self.num_tokens,
            "truncated": self.finish_reason == "length",
            "turn": self.turn,
            "correct_score": correct_score,
            "sandbox": None,  # The reward process has its own.
        }
        return {name: known[name] for name in names}


@dataclass(frozen=True, slots=True)
class BoundFunction:
    """A reward function with its arguments."""

    function: Callable[..., Any]
    needs: frozenset[str]
    """The `PARAMETERS` passed to it, by name."""
    positional: Mapping[str, Any]
    """Its positional-only parameters in order, with their defaults."""
    kwargs: Mapping[str, Any]
    """The recipe's keyword arguments for it."""

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Return the function's result for a sample's values. Values without a parameter are not passed."""
        given = {name: values[name] for name in self.needs} | dict(self.kwargs)
        arguments = [given.pop(name, default) for name, default in self.positional.items()]
        return self.function(*arguments, **given)


def bind(name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> BoundFunction:
    """Bind a function to the recipe's `kwargs`.

    Raises ConfigError for a required parameter without a value, and for unknown keyword arguments.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(
            f"reward.functions: {name!r}: its parameters cannot be read; call it from a function written in Python, "
            f"such as: {expected(name)}"
        ) from None
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    if reserved := [key for key in kwargs if key in PARAMETERS and key not in _OF_THE_RECIPE]:
        raise ConfigError(
            f"reward.functions: {name!r}: kwargs.{reserved[0]}: is a value of the sample, so the recipe cannot "
            "set it; leave it out"
        )
    if foreign := [key for key in kwargs if key not in named and not takes_any]:
        near = nearest(foreign[0], named)
        hint = f"did you mean {near}?" if near else f"it takes {', '.join(named) or 'none'}"
        raise ConfigError(f"reward.functions: {name!r}: kwargs.{foreign[0]}: is not a parameter; {hint}")
    for parameter in named.values():
        if parameter.default is parameter.empty and parameter.name not in (*PARAMETERS, *kwargs):
            raise ConfigError(_unknown(name, parameter.name))
    # A function with **rest gets every value of the sample except the sandbox.
    wanted = named.keys() | (PARAMETERS.keys() - {_WHEN_NAMED} if takes_any else set())
    needs = frozenset(key for key in PARAMETERS if key in wanted and key not in kwargs)
    positional = {p.name: p.default for p in named.values() if p.kind is p.POSITIONAL_ONLY}
    return BoundFunction(function, needs, positional, kwargs)


def expected(name: str) -> str:
    """Return an example of a reward function's definition."""
    return f"def {metric_name(name)}(completion_text: str, answer: str) -> float | megarl.types.Reward"


def _unknown(name: str, parameter: str) -> str:
    # Parameter names of other libraries' reward functions (verl, TRL), for a helpful hint.
    meant = {"solution_str": "completion_text", "completions": "completion_text", "ground_truth": "answer"}
    near = meant.get(parameter) or nearest(parameter, PARAMETERS)
    hint = f" Did you mean {near}?" if near else ""
    return (
        f"reward.functions: {name!r}: its parameter {parameter} is not known.{hint} Known are {', '.join(PARAMETERS)}; "
        f"give others a default, or a value in kwargs. For example: {expected(name)}"
    )
