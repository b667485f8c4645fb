"""Engines that sample while the trainer trains against turns, at the smallest size: what is measured, and printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.conftest import TOOLS

SMALLEST = (
    "--steps 1 --pairs 1 --calibrations 0 --prompts 2 --samples 2 --tokens 8 --layers 1 --hidden-size 128 --no-bounds"
)


def test_both_ways_are_timed(
    tool: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TOOLS)
    check = tool("check_overlap")
    assert check.main(SMALLEST.split()) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["prompts"] == 2
    in_turns, ahead = (report["step_seconds"][name] for name in ("in_turns", "one_step_off"))
    assert report["ratio"] == pytest.approx(in_turns / ahead)
    assert report["samples_per_second"]["one_step_off"] == pytest.approx(4 / ahead)
    longer = max(report["sampling_seconds"], report["training_seconds"])
    assert 0 < longer < in_turns and report["step_over_longer_side"] == pytest.approx(ahead / longer)
    assert [len(steps) for steps in report["steps_of_pairs"].values()] == [1, 1]
