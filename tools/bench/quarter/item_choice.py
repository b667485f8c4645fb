"""The items that a call of `tools/gpu_quarter.py` measures next, chosen by their value and their usual seconds."""

from __future__ import annotations

from collections.abc import Iterable

from tools.bench.quarter.quarter_items import Item


def choose_items(
    pending: Iterable[Item], size: str, *, call_seconds: float, budget_seconds: float, end_seconds: float
) -> list[Item]:
    """Return the next items of one program that fit in the call, in the order of the list; [] if none fits.

    `call_seconds` are left in this call, `budget_seconds` in all calls; `end_seconds` are those of another call's end.
    An item that fits in the budget but not in this call reserves its seconds of the budget. Without that, an item of
    little value that fits in the rest of a call would take the next call's time from one of more value.
    """
    items, seconds = list[Item](), 0.0
    reserved_seconds, reserved_program = 0.0, None
    for item in pending:
        if items and item.program is not items[0].program:
            continue
        needed = item.seconds[size] + (0.0 if items else item.program.start_seconds[size])
        budget_left = budget_seconds - seconds - reserved_seconds
        if seconds + needed <= call_seconds and needed <= budget_left:
            items.append(item)
            seconds += needed
            continue
        # Measured in another call, it starts its program there, together with others of that program.
        needed = item.seconds[size]
        if reserved_program is not item.program:
            needed += item.program.start_seconds[size]
        if not reserved_seconds:
            needed += end_seconds
        if needed <= budget_left:
            reserved_seconds, reserved_program = reserved_seconds + needed, item.program
    return items
