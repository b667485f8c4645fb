"""Reward functions written for verl and for TRL, called with the arguments of these programs.

verl: `compute_score(data_source, solution_str, ground_truth, extra_info)` returns a number, or a dict with `score`.
TRL: `def f(prompts, completions, **columns)` returns a list with a number or None for each completion. The columns of
the data set are lists too. megarl scores one completion at a time, so each list has one item.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megarl.rewards.functions.function_score import FunctionScore
from megarl.rewards.scoring.results import is_number

if TYPE_CHECKING:
    from asyncio import Runner


def result_of(value: Any) -> Any:
    """Return a call's result. An asynchronous call is awaited in the process's event loop."""
    if not inspect.isawaitable(value):
        return value

    # The runner takes only coroutines, and `value` may be another awaitable.
    async def await_value() -> Any:
        return await value

    return _runner().run(await_value())


@cache
def _runner() -> Runner:
    """Return the event loop of all calls: a function's client has connections that belong to one loop."""
    # Imported here, because a reward process starts faster without it.
    from asyncio import Runner

    return Runner()


Parameters = Mapping[str, inspect.Parameter]
"""A function's parameters by name, without `*rest` and `**rest`."""
_IS_REQUIRED = inspect.Parameter.empty


class ForeignFunction(Protocol):
    """A reward function of another program, called with the sample's values in `needs` and the recipe's kwargs."""

    needs: ClassVar[frozenset[str]]
    """Names of the sample's values that a call needs; keys of `calling.PARAMETERS`."""
    reserved: ClassVar[frozenset[str]]
    """Parameters that get a value of the sample. The recipe's kwargs must not set them."""

    def unknown(self, kwargs: Collection[str]) -> list[str]:
        """Return the required parameters without a value from a sample or from `kwargs`."""
        ...

    def record_fields(self, kwargs: Collection[str]) -> list[str]:
        """Return the record fields that required parameters read."""
        ...

    def __call__(self, **values: Any) -> Any:
        """Score a sample. `values` have megarl's names (`completion_text`, `answer`, `record`, ...)."""
        ...


@dataclass(frozen=True, slots=True)
class VerlFunction:
    """A reward function with verl's parameters: at least `solution_str`.

    `data_source` is None for a record without this field.
    """

    function: Callable[..., Any]
    parameters: Parameters
    takes_any: bool
    """Whether the function has `**rest`. verl gives all its values by name, so `rest` may have some of them."""
    needs: ClassVar[frozenset[str]] = frozenset({"completion_text", "answer", "record"})
    reserved: ClassVar[frozenset[str]] = frozenset({"solution_str", "ground_truth"})

    def unknown(self, kwargs: Collection[str]) -> list[str]:
        names_with_values = {"solution_str", "ground_truth", "data_source", "extra_info", *kwargs}
        return [
            name
            for name, parameter in self.parameters.items()
            if parameter.default is _IS_REQUIRED and name not in names_with_values
        ]

    def record_fields(self, kwargs: Collection[str]) -> list[str]:
        return []

    def __call__(self, *, completion_text: str, answer: Any, record: Mapping[str, Any], **kwargs: Any) -> Any:
        values = {
            "solution_str": completion_text,
            "ground_truth": answer,
            "data_source": record.get("data_source"),
            # Like verl: an empty dict for records without this field.
            "extra_info": dict(record.get("extra_info") or {}),
        }
        arguments = {name: value for name, value in values.items() if self.takes_any or name in self.parameters}
        return _convert_verl_score(result_of(self.function(**{**arguments, **kwargs})))


@dataclass(frozen=True, slots=True)
class TrlFunction:
    """A reward function with TRL's parameters: at least `completions`."""

    function: Callable[..., Any]
    parameters: Parameters
    takes_any: bool
    """Whether the function has `**rest` for all columns."""
    needs: ClassVar[frozenset[str]] = frozenset({"completion_text", "answer", "record", "prompt_messages"})
    reserved: ClassVar[frozenset[str]] = frozenset({"completions", "prompts"})

    def unknown(self, kwargs: Collection[str]) -> list[str]:
        return [name for name in _TRL_ONLY if _is_required(self.parameters, name) and name not in kwargs]

    def record_fields(self, kwargs: Collection[str]) -> list[str]:
        names_with_values = {*self.reserved, "answer", *kwargs}
        return [
            name for name in self.parameters if _is_required(self.parameters, name) and name not in names_with_values
        ]

    def __call__(
        self,
        *,
        completion_text: str,
        answer: Any,
        record: Mapping[str, Any],
        prompt_messages: Sequence[Mapping[str, Any]],
        **kwargs: Any,
    ) -> Any:
        """Call the function with a batch of one completion, and return its score."""
        prompt = record.get("prompt")
        if isinstance(prompt, str) and any(message.get("content") == prompt for message in prompt_messages):
            batch_of_one = {"prompts": [prompt], "completions": [completion_text]}
        else:
            # TRL's conversational form: prompts and completions are lists of messages.
            completion_message = {"role": "assistant", "content": completion_text}
            batch_of_one = {"prompts": [list(prompt_messages)], "completions": [[completion_message]]}
        columns = {
            name: [value] for name, value in {"answer": answer, **record}.items() if name not in _TRL_SAMPLE_COLUMNS
        }
        for name in self.record_fields(kwargs):
            check_record_field(name, columns)
        available = {**columns, **batch_of_one}
        columns_and_sample = (
            available if self.takes_any else {name: available[name] for name in self.parameters if name in available}
        )
        return _convert_trl_score(result_of(self.function(**{**columns_and_sample, **kwargs})))


_TRL_SAMPLE_COLUMNS = frozenset({"prompt", "completion", "prompts", "completions"})
"""Columns with the sample itself. TRL does not pass them as columns."""
_TRL_ONLY = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Parameters that TRL can set and megarl cannot."""


def foreign_function(
    function: Callable[..., Any], parameters: Parameters, *, takes_any: bool
) -> ForeignFunction | None:
    """Return a callable of samples for a function with verl's or TRL's signature, else None."""
    if "solution_str" in parameters:
        return VerlFunction(function, parameters, takes_any)
    if "completions" in parameters:
        return TrlFunction(function, parameters, takes_any)
    return None


def check_record_field(name: str, record: Collection[str]) -> None:
    """Raise ValueError if a record lacks the field of the required parameter `name`."""
    if name not in record:
        raise ValueError(
            f"the record has no field {name!r}, which the function's parameter {name} takes; add it to the record, or "
            "give the parameter a default or a value in kwargs"
        )


def _is_required(parameters: Parameters, name: str) -> bool:
    return name in parameters and parameters[name].default is _IS_REQUIRED


def _convert_verl_score(result: Any) -> Any:
    """Convert the result of verl's reward function to megarl's form.

    In a dict, `score` is the reward and `acc` is the verdict. All further numbers are metrics.
    """
    if not isinstance(result, Mapping):
        return result
    if "score" not in result:
        raise TypeError(f"the function returned a dict without 'score': {result!r:.200}")
    accuracy, score = result.get("acc"), result["score"]
    return FunctionScore(
        float(score) if is_number(score) else score,
        answer_correct=bool(accuracy) if accuracy in (True, False) else None,
        # verl only prints all other values, such as the answer's text.
        metrics={name: float(value) for name, value in result.items() if name != "score" and is_number(value)},
    )


def _convert_trl_score(result: Any) -> Any:
    scores = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(scores, list | tuple) or len(scores) != 1:
        raise TypeError(
            f"the function returned {result!r:.200} for 1 completion; return a list with a score for each completion"
        )
    return scores[0]
