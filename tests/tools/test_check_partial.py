"""Partial rollouts against waiting, at the smallest size: the same completions in fewer engine steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import TOOLS

SMALLEST = "--steps 4 --prompts 3 --samples 4 --median 12"


def test_partial_rollouts_take_fewer_engine_steps(
    tool: Callable[[str], ModuleType],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(TOOLS)  # where ranks find the check
    check = tool("check_partial")
    found = asyncio.run(check.measured(check.options_of(SMALLEST.split()), tiny_model(num_layers=1), tmp_path))
    assert found["lengths"]["max"] > 3 * found["lengths"]["median"]
    assert found["engine_steps"]["ratio"] < 1, found
    assert found["share_of_several_versions"] > 0 and found["largest_gap"] <= check.MOST_GAP, found
