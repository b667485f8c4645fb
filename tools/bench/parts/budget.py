"""How long a benchmark may take: what the budget does not allow is left out, and said."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

from tools.bench.parts.report import print_line

SECONDS = 450.0
"""Under eight minutes, with what it takes to end."""


class Budget:
    """Seconds that a benchmark may take, from now on."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until it is used up; negative afterwards."""
        return self._end - time.monotonic()

    def rounds(self, max_rounds: int) -> Iterator[int]:
        """Yield the numbers of at most `max_rounds` rounds. Later ones begin only if the longest so far would fit."""
        longest = 0.0
        for number in range(max_rounds):
            if number and longest > self.seconds_left:
                return
            started = time.monotonic()
            yield number
            longest = max(longest, time.monotonic() - started)

    def leaves_out(self, names: Sequence[str], seconds_needed: float = 0.0) -> bool:
        """Return whether no time is left for these metrics, and print a line if so."""
        if self.seconds_left > seconds_needed:
            return False
        print_line({"left_out": list(names), "why": f"--budget-seconds {self.seconds:g} is used up"})
        return True


def add_budget(parser: argparse.ArgumentParser) -> None:
    """Add `--budget-seconds` to a benchmark's options."""
    parser.add_argument(
        "--budget-seconds", type=float, default=SECONDS, metavar="S", help="print what S seconds allow, and end"
    )
