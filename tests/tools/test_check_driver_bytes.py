"""The bytes of a step through the driver: a few arrays of a token, whatever the ranks of a replica."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


def test_bytes_do_not_grow_with_the_ranks_of_a_replica(
    tool: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    main = tool("check_driver_bytes").main
    totals = []
    for tp in ("1", "8"):
        assert main(["--samples", "32", "--tokens", "2000", "--dp", "2", "--tp", tp]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("32 samples, ") and [line.split()[0] for line in lines[2:6]] == [
            "advance", "policy.forward", "policy.update", "all",
        ]  # fmt: skip
        num_tokens = int(lines[0].split()[2])
        totals.append(sum(float(number) for line in lines[2:5] for number in line.split()[1:]) * 1e6 / num_tokens)
    # Token ids in and out twice, a mask, five arrays of float32 and two answers.
    assert 40 < totals[0] < 70 and totals[1] == pytest.approx(totals[0], rel=0.05)
    assert main(["--samples", "32", "--tokens", "2000", "--limit-gb", "0.001"]) == 1
