"""Reward for a completion's length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megarl.rewards.results import FunctionScore


def length(
    num_tokens: int,
    record: Mapping[str, Any],
    *,
    target: int | None = None,
    field: str | None = None,
    mode: Literal["at_most", "exact"] = "at_most",
    width: int | None = None,
) -> FunctionScore:
    """Score the number of tokens: 1 at the `target`, falling linearly to 0 over `width` tokens beyond it.

    at_most: also 1 below the target; exact: it falls on both sides. The target is the same for all, or in a `field` of
    each record. `width` defaults to the target. A negative `weight` makes it a penalty. Format and answer are not
    judged. Metrics: `over`, the share of completions longer than the target, and `distance_tokens`, the mean distance
    to it. Source: L1 (https://arxiv.org/abs/2503.04697), its exact and maximal lengths, limited to 0 to 1.
    """
    if mode not in ("at_most", "exact"):
        raise ValueError(f"mode is {mode!r}; give at_most or exact")
    wanted = target_of(record, target, field)
    _check_width(width)
    over = num_tokens - wanted
    distance = max(over, 0) if mode == "at_most" else abs(over)
    score = max(0.0, 1.0 - distance / (wanted if width is None else width))
    return FunctionScore(score, metrics={"over": float(over > 0), "distance_tokens": float(abs(over))})


def target_of(record: Mapping[str, Any], target: int | None, field: str | None) -> int:
    """Return the target in tokens. Raises ValueError without a target, or if it is not a number from 1."""
    if (target is None) == (field is None):
        raise ValueError("give either a target or the field of the records that holds it")
    if field is not None and field not in record:
        raise ValueError(f"the record has no field {field!r}; the target length is read from it")
    value = target if field is None else record[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < 1e9:
        raise ValueError(f"the target is {value!r:.80}; give a number of tokens from 1 on")
    return int(value)


def check_record(
    answer: Any,
    record: Mapping[str, Any],
    *,
    target: int | None = None,
    field: str | None = None,
    width: int | None = None,
    **kwargs: Any,
) -> None:
    """Raise ValueError for a record that this reward cannot score."""
    target_of(record, target, field)
    _check_width(width)


def _check_width(width: int | None) -> None:
    if width is not None and (isinstance(width, bool) or not isinstance(width, int | float) or not width >= 1):
        raise ValueError(f"width is {width!r:.80}; give a number of tokens from 1 on")
