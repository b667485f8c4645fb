"""The smallest part of the check of adapters: reasoning-gym, which needs no environment of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.distributed
def test_reasoning_gym_trains_for_two_steps(
    tool: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    check = tool("check_adapters")
    assert check.main(["--only", "reasoning_gym"]) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert line.split()[0] == "reasoning_gym" and line.split()[-1] == "0.00"
