"""Type checks of the values that an environment returns."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np

from megarl.environments import Start, Step

ROLLOUT_METRICS = frozenset(
    {
        "completion_tokens/max", "completion_tokens/mean", "epoch", "forks", "observed_tokens/max",
        "observed_tokens/mean", "process_killed", "prompt_tokens/max", "prompt_tokens/mean", "restarted",
        "segments/mean", "share", "temperature", "truncated", "turn_tokens/max", "turn_tokens/mean", "turns/max",
        "turns/mean", "candidates_left/max", "candidates_left/mean", "candidates_left_bytes",
    }
)  # fmt: skip
"""Names of rollout metrics. In a mixture they are logged as `environment/SOURCE/NAME`, like an environment's own."""
_ROLLOUT_GROUPS = ("ended/", "errors/", "reward/", "time/")


def copy_valid_start(start: object) -> Start:
    """Return a copy of the value of `reset`. Raises TypeError unless it is a valid `Start`."""
    if not isinstance(start, Start):
        raise TypeError(f"the environment's reset returned {start!r:.80}; return a megarl.environments.Start")
    _check_messages(start.messages, "reset")
    if not _are_mappings(start.tools) or not all(map(_has_function, start.tools)):
        raise TypeError(f"the environment's reset returned tools that are not JSON schemas: {start.tools!r:.80}")
    _check_state(start.state, "reset")
    if start.role is not None and not (isinstance(start.role, str) and re.fullmatch(r"[\w.-]+", start.role)):
        raise TypeError(
            f"the environment's reset returned a role that is not a name of letters, digits, dots and dashes: "
            f"{start.role!r:.80}"
        )
    return replace(start, messages=_copy_mappings(start.messages), tools=_copy_mappings(start.tools))


def copy_valid_step(step: object) -> Step:
    """Return a copy of the value of `step`; the environment may continue to use the value itself.

    Raises TypeError unless it is a valid `Step`, and ValueError for numbers that are not finite.
    """
    if not isinstance(step, Step):
        raise TypeError(f"the environment's step returned {step!r:.80}; return a megarl.environments.Step")
    _check_messages(step.messages, "step")
    if step.reward is not None and not _is_number(step.reward):
        raise ValueError(f"the environment's step returned a reward that is not a finite number: {step.reward!r:.80}")
    if step.done not in (True, False):
        raise TypeError(f"the environment's step returned done = {step.done!r:.80}; give True or False")
    if step.answer_correct not in (True, False, None):
        raise TypeError(
            f"the environment's step returned answer_correct = {step.answer_correct!r:.80}; give True, False or None"
        )
    if not isinstance(step.metrics, Mapping) or not all(map(_is_number, step.metrics.values())):
        raise ValueError(
            f"the environment's step returned metrics that are not finite numbers by name: {step.metrics!r:.80}"
        )
    if name := _find_reserved_name(step.metrics):
        raise ValueError(
            f"the environment's step returned the metric {name!r}: megarl logs a metric of this name; use another"
        )
    _check_state(step.state, "step")
    return replace(step, messages=_copy_mappings(step.messages), metrics=dict(step.metrics))


def _copy_mappings(mappings: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    return tuple(deepcopy(dict(mapping)) for mapping in mappings)


def _find_reserved_name(metrics: Mapping[Any, float]) -> str | None:
    names = map(str, metrics)
    return next((name for name in names if name in ROLLOUT_METRICS or name.startswith(_ROLLOUT_GROUPS)), None)


def _check_state(state: object, method: str) -> None:
    if not isinstance(state, str | None):
        raise TypeError(f"the environment's {method} returned a state that is not a text: {state!r:.80}")


def _check_messages(messages: object, method: str) -> None:
    """Raise TypeError unless each message has a role, and each tool call a function's name."""
    if not _are_mappings(messages) or not all("role" in message for message in messages):
        raise TypeError(f"the environment's {method} returned messages without role and content: {messages!r:.80}")
    for message in messages:
        calls = message.get("tool_calls") or []
        if not _are_mappings(calls) or not all(map(_has_function, calls)):
            raise TypeError(f"the environment's {method} returned tool_calls without function.name: {calls!r:.80}")


def _has_function(tool_or_call: Mapping[str, Any]) -> bool:
    function = tool_or_call.get("function")
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _are_mappings(values: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return isinstance(values, list | tuple) and all(isinstance(value, Mapping) for value in values)


def _is_number(value: object) -> bool:
    # Most scalars of numpy are not instances of int or float.
    return isinstance(value, int | float | np.number) and math.isfinite(value)
