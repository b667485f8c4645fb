"""Division of sizes that rounds up. The numbers are exact: floats would lose the last digits of large byte counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Integers = TypeVar("Integers", int, "NDArray[np.int64]")


def divide_up(numbers: Integers, *, by: int) -> Integers:
    """Return `numbers / by`, rounded up to whole numbers. `divide_up(7, by=4)` is 2."""
    return -(-numbers // by)


def round_up(numbers: Integers, *, multiple: int) -> Integers:
    """Return the next multiples that are not smaller than `numbers`. `round_up(7, multiple=4)` is 8."""
    return divide_up(numbers, by=multiple) * multiple
