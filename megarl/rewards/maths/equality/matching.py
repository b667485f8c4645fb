"""Matching of two lists whose items may be in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def match_in_any_order(
    golds: Sequence[Item], predictions: Sequence[Item], is_same: Callable[[Item, Item], bool]
) -> bool:
    """Return whether each gold item has a predicted item of its own for which `is_same(gold, predicted)` is true.

    The first such item counts, so `is_same` must be an equivalence.
    """
    candidates = list(predictions)
    for gold in golds:
        index = next((index for index, candidate in enumerate(candidates) if is_same(gold, candidate)), None)
        if index is None:
            return False
        candidates.pop(index)
    return True
