"""Arguments of reward functions: each parameter's name selects a value of the sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from megarl.files.nearest import nearest
from megarl.rewards import metric_name
from megarl.rewards.scoring.foreign_functions import foreign_function, result_of
from megarl.thoughts import ends_in_thoughts
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
    "in_thoughts": "bool: whether the completion ended, or was cut, before its thoughts were closed",
    "correct_score": "float: reward.correct_score",
    "sandbox": "megarl.sandbox.sandbox_fusion.AnySandbox: runs programs of the policy, if it is named",
}
"""Values of a sample for a reward function, by the parameter's name: type and meaning."""

_RECIPE_PARAMETERS = ("correct_score",)
"""Parameters set by the recipe's section `reward`. A function's `kwargs` may override them."""
_SANDBOX = "sandbox"
"""Parameter for the sandbox. `**rest` does not get the sandbox, because a machine may lack one."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion to score, with its problem and its place in the attempt. All values are JSON values."""

    completion_text: str
    answer: Any
    prompt_messages: tuple[Mapping[str, Any], ...] = ()
    record: Mapping[str, Any] | None = None
    finish_reason: str = "stop"
    num_tokens: int = 0
    turn: int = 1
    is_in_thoughts: bool = False
    """Whether the tokens end inside thoughts. If the prompt opened the thoughts, the text alone does not show this."""

    @classmethod
    def from_completion(
        cls,
        problem: Problem,
        completion: Completion,
        completion_text: str,
        *,
        prompt_messages: Sequence[Mapping[str, Any]],
        turn: int,
        is_in_thoughts: bool,
    ) -> Sample:
        """Return the sample of a completion. `turn` counts the attempt's completions from 1."""
        return cls(
            completion_text,
            problem.answer,
            tuple(prompt_messages),
            problem.record,
            completion.finish_reason,
            len(completion.token_ids),
            turn,
            is_in_thoughts,
        )

    @property
    def in_thoughts(self) -> bool:
        return self.is_in_thoughts or ends_in_thoughts(self.completion_text)

    def values(self, names: frozenset[str], correct_score: float) -> dict[str, Any]:
        completion = {"role": "assistant", "content": self.completion_text}
        values = {
            "completion_text": self.completion_text,
            "answer": self.answer,
            "messages": [*self.prompt_messages, completion],
            "prompt_messages": list(self.prompt_messages),
            "record": self.record or {},
            "finish_reason": self.finish_reason,
            "num_tokens": self.num_tokens,
            "truncated": self.finish_reason == "length",
            "turn": self.turn,
            "in_thoughts": self.in_thoughts,
            "correct_score": correct_score,
            "sandbox": None,  # The reward process has its own.
        }
        return {name: values[name] for name in names}


@dataclass(frozen=True, slots=True)
class BoundFunction:
    """A reward function together with the recipe's keyword arguments for it."""

    function: Callable[..., Any]
    needs: frozenset[str]
    """Names of the sample's values that a call needs; keys of `PARAMETERS`."""
    positional: Mapping[str, Any]
    """The function's positional-only parameters in order, with their defaults."""
    kwargs: Mapping[str, Any]
    """The recipe's keyword arguments for the function."""
    record_fields: Sequence[str] = ()
    """Fields that each record needs for the function."""

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Call the function with a sample's values and return its result. Values without a parameter are ignored.

        The function gets copies, so changes reach no other function and no later call.
        """
        keywords = {name: value if name == _SANDBOX else deepcopy(value) for name, value in self._keywords(values)}
        arguments = [keywords.pop(name, default) for name, default in self.positional.items()]
        return result_of(self.function(*arguments, **keywords))

    def _keywords(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        yield from ((name, values[name]) for name in self.needs)
        yield from self.kwargs.items()


def bind(name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> BoundFunction:
    """Combine a reward function with the recipe's keyword arguments `kwargs`.

    Raises ConfigError if a required parameter has no value, or a keyword argument is unknown.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(
            f"reward.functions: {name!r}: the names of its parameters cannot be read; wrap it in a Python function "
            f"such as: {example_definition(name)}"
        ) from None
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named_parameters = {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    # A function with verl's or TRL's parameters gets their values, any other one the values in PARAMETERS.
    foreign = foreign_function(function, named_parameters, takes_any=takes_any)
    sample_parameters = PARAMETERS.keys() - set(_RECIPE_PARAMETERS) if foreign is None else foreign.reserved
    if reserved_keys := [key for key in kwargs if key in sample_parameters]:
        raise ConfigError(
            f"reward.functions: {name!r}: kwargs.{reserved_keys[0]}: every sample has its own value of this, so the "
            "recipe cannot set it; remove it"
        )
    if unknown_keys := [key for key in kwargs if key not in named_parameters and not takes_any]:
        similar_name = nearest(unknown_keys[0], named_parameters)
        hint = f"did you mean {similar_name}?" if similar_name else f"it takes {', '.join(named_parameters) or 'none'}"
        raise ConfigError(
            f"reward.functions: {name!r}: kwargs.{unknown_keys[0]}: is not a parameter of the function; {hint}"
        )
    # Each required parameter needs a value, from the sample or from the recipe's kwargs.
    if foreign is not None:
        unknown = foreign.unknown(kwargs)
    else:
        required_names = (
            parameter.name for parameter in named_parameters.values() if parameter.default is parameter.empty
        )
        unknown = [required for required in required_names if required not in (*PARAMETERS, *kwargs)]
        # `ground_truth=None` or `extra_info={}` waits for the sample's value, and would be empty for each sample.
        unknown += [
            parameter.name
            for parameter in named_parameters.values()
            if parameter.name in _SAMPLE_NAMES and parameter.name not in kwargs and _waits_for_value(parameter)
        ]
    if unknown:
        raise ConfigError(_unknown_parameters_text(name, unknown))
    if foreign is not None:
        return BoundFunction(foreign, foreign.needs, {}, kwargs, foreign.record_fields(kwargs))
    # A function with **rest gets every value of the sample except the sandbox.
    wanted_names = named_parameters.keys() | (PARAMETERS.keys() - {_SANDBOX} if takes_any else set())
    needs = frozenset(key for key in PARAMETERS if key in wanted_names and key not in kwargs)
    if not needs and any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        raise ConfigError(
            f"reward.functions: {name!r}: takes its values as *args, but gets them by name, so it would get none; "
            f"wrap it in a function such as: {example_definition(name)}"
        )
    positional = {
        parameter.name: parameter.default
        for parameter in named_parameters.values()
        if parameter.kind is parameter.POSITIONAL_ONLY
    }
    return BoundFunction(function, needs, positional, kwargs)


def _waits_for_value(parameter: inspect.Parameter) -> bool:
    default = parameter.default
    return default is None or (isinstance(default, str | Sequence | Mapping) and not default)


def example_definition(name: str) -> str:
    return f"def {metric_name(name)}(completion_text: str, answer: str) -> float | megarl.types.Reward"


def _unknown_parameters_text(name: str, parameters: Sequence[str]) -> str:
    counterparts = "; ".join(f"{parameter}: {_counterpart(parameter)}" for parameter in parameters)
    return (
        f"reward.functions: {name!r}: parameters that are not known, each with its counterpart here: {counterparts}. "
        f"Known are {', '.join(PARAMETERS)}; give others a default, or a value in kwargs. For example: "
        f"{example_definition(name)}"
    )


def _counterpart(parameter: str) -> str:
    return _COUNTERPARTS.get(parameter) or nearest(parameter, PARAMETERS) or "none"


_COUNTERPARTS = {
    foreign_name: parameter
    for parameter, foreign_names in {
        "completion_text": "solution_str completion completions response responses output outputs prediction text",
        "answer": "ground_truth gold gold_answer label labels target targets solution reference gt gt_answer expected",
        "prompt_messages": "prompt prompts question problem input",
        "messages": "query queries conversation conversations",
        "record": "data_source extra_info sample metadata example row doc",
        "finish_reason": "status stop_reason",
        "num_tokens": "completion_ids response_length",
    }.items()
    for foreign_name in foreign_names.split()
}
"""Parameter names of verl, TRL, OpenRLHF, slime and NeMo RL, each with megarl's name for the same value."""
_SAMPLE_NAMES = frozenset(
    {"ground_truth", "gold_answer", "gt_answer", "label", "labels", "solution_str", "completions",
     "responses", "extra_info", "data_source"}
)  # fmt: skip
"""Names in `_COUNTERPARTS` that mean a sample's value even if the parameter's default is None or empty."""
