"""Checks of an environment's answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from megarl.environments import Start, Step


def checked_start(start: object) -> Start:
    """Return the start if it is valid. Raises TypeError."""
    if not isinstance(start, Start):
        raise TypeError(f"reset gave {start!r:.80}, not a Start")
    _check_messages(start.messages, "reset")
    if not _are_mappings(start.tools):
        raise TypeError(f"reset gave the tools {start.tools!r:.80}, not JSON schemas")
    return start


def checked_step(step: object) -> Step:
    """Return the step if it is valid. Raises TypeError, and ValueError for numbers that are not finite."""
    if not isinstance(step, Step):
        raise TypeError(f"step gave {step!r:.80}, not a Step")
    _check_messages(step.messages, "step")
    if step.reward is not None and not _is_number(step.reward):
        raise ValueError(f"step gave the reward {step.reward!r:.80}")
    if not isinstance(step.metrics, Mapping) or not all(map(_is_number, step.metrics.values())):
        raise ValueError(f"step gave the metrics {step.metrics!r:.80}, not finite numbers by name")
    return step


def _check_messages(messages: object, method: str) -> None:
    if not _are_mappings(messages) or not all("role" in message for message in messages):
        raise TypeError(f"{method} gave the messages {messages!r:.80}, not mappings with a role and a content")


def _are_mappings(values: object) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return isinstance(values, list | tuple) and all(isinstance(value, Mapping) for value in values)


def _is_number(value: object) -> bool:
    # Most scalars of numpy are not instances of int or float.
    return isinstance(value, int | float | np.number) and math.isfinite(value)
