"""Reward for the length of a completion in tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megarl.rewards.functions.function_score import FunctionScore


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

    Mode at_most: the score is also 1 below the target. Mode exact: it falls on both sides. The target is one number for
    all records, or a `field` of each record. `width` defaults to the target. A negative `weight` in the recipe makes
    the score a penalty. Format and answer are not judged. Metrics: `over`, the share of completions longer than the
    target, and `distance_tokens`, the mean distance to the target. Source: L1 (https://arxiv.org/abs/2503.04697), its
    exact and maximal lengths, limited to 0 to 1.
    """
    if mode not in ("at_most", "exact"):
        raise ValueError(f"kwargs.mode = {mode!r}: is not a valid value; set it to at_most or exact")
    target_tokens = target_of(record, target, field)
    _check_width(width)
    over = num_tokens - target_tokens
    distance = max(over, 0) if mode == "at_most" else abs(over)
    score = max(0.0, 1.0 - distance / (target_tokens if width is None else width))
    return FunctionScore(score, metrics={"over": float(over > 0), "distance_tokens": float(abs(over))})


def target_of(record: Mapping[str, Any], target: int | None, field: str | None) -> int:
    """Return the target length in tokens: either `target`, or the number in the record's `field`.

    Raises ValueError if the target is missing or below 1.
    """
    if (target is None) == (field is None):
        raise ValueError(
            "set either kwargs.target (tokens) or kwargs.field (the record's field with the target), not both"
        )
    if field is not None and field not in record:
        raise ValueError(
            f"the record has no field {field!r} with its target length; name another field in kwargs.field"
        )
    value = target if field is None else record[field]
    # A whole number may be a float: a column of numbers with gaps is read as floats.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < 1e9 or value != int(value):
        raise ValueError(f"the target length is {value!r:.80}; set it to a whole number of tokens, at least 1")
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
    """Raise ValueError for an invalid target length or `width`."""
    target_of(record, target, field)
    _check_width(width)


def _check_width(width: int | None) -> None:
    if width is not None and (isinstance(width, bool) or not isinstance(width, int | float) or not width >= 1):
        raise ValueError(f"kwargs.width = {width!r:.80}: is not valid; set it to a number of tokens, at least 1")
