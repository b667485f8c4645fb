"""The peak memory of calls."""

from __future__ import annotations

import pytest
import torch

from megarl.platform.memory import peak_memory

SIZE = 256 << 20


@pytest.fixture(autouse=True)
def _restarted() -> None:
    peak_memory.restart_peak()


def take() -> int:
    found = peak_memory.take_peak_bytes()
    assert found is not None
    return found


def test_a_settled_peak_leaves_out_what_is_taken_later() -> None:
    before = take()
    peak_memory.fix_peak()
    later = torch.ones(SIZE, dtype=torch.uint8)
    assert take() - before < SIZE / 2
    assert take() - before > SIZE / 2
    del later


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_restart_forgets_what_was_released(is_restarted: bool) -> None:
    before = take()
    held = torch.ones(SIZE, dtype=torch.uint8)
    del held
    if is_restarted:
        peak_memory.restart_peak()
    assert (take() - before > SIZE / 2) != is_restarted
