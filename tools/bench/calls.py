"""What a call to all ranks costs besides its work: a step makes a dozen of them.

    python tools/bench/calls.py [--ranks 16]

Prints one JSON object: the median time of a call that returns at once, from the driver's side.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

from report import machine, metric_line, print_line, versions

from megarl.cluster.local import LocalGroup


class Worker:
    """What the ranks serve."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def pid(self) -> int:
        return os.getpid()


async def call_times(num_ranks: int, num_calls: int) -> list[float]:
    """Milliseconds of each call."""
    with tempfile.TemporaryDirectory() as folder:
        group = await LocalGroup(num_ranks).start("calls:Worker", {}, log_folder=Path(folder))
        try:
            found = []
            for _ in range(num_calls):
                started = time.perf_counter()
                await group.call("pid")
                found.append(1e3 * (time.perf_counter() - started))
            return found
        finally:
            await group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--calls", type=int, default=200)
    args = parser.parse_args()
    found = asyncio.run(call_times(args.ranks, args.calls))
    against = f"a call to {args.ranks} processes that do nothing, {args.calls} times"
    line = metric_line("call_time", found, "ms", target="< 5", against=against, machine=machine(), versions=versions())
    # The extremes and quartiles describe so many values well enough.
    line["spread"] = [line["spread"][round(q * (len(found) - 1))] for q in (0, 0.25, 0.5, 0.75, 1)]
    print_line(line)


if __name__ == "__main__":
    main()
