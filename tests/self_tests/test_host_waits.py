"""The count of places where the host waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.cuda import streams

from tests.host_waits import HostWaitError, host_waits

VALUES = torch.ones(3)
UNUSED: Any = None
"""A wait is refused before it looks at its stream or event: a CPU has none.

The classes are those of `torch.cuda.streams`: vLLM 0.30 puts placeholders into `torch.cuda` on a CPU.
"""


@pytest.mark.parametrize(
    ("wait", "name"),
    [
        pytest.param(lambda: VALUES.to("cpu"), "to", id="copy to the host"),
        pytest.param(lambda: VALUES.to(device="cpu"), "to", id="copy to the host, by keyword"),
        pytest.param(lambda: VALUES.sum().item(), "item", id="value"),
        pytest.param(lambda: streams.Stream.synchronize(UNUSED), "stream", id="stream"),
        pytest.param(lambda: streams.Event.synchronize(UNUSED), "event", id="event"),
    ],
)  # fmt: skip
def test_a_wait_is_counted_and_refused(wait: Callable[[], object], name: str) -> None:
    with host_waits(is_refusing=True) as places, pytest.raises(HostWaitError):
        wait()
    [(kind, place)] = places
    assert kind == name and "test_host_waits.py" in place


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda: VALUES.to("cpu", non_blocking=True), id="asynchronous"),
        pytest.param(lambda: VALUES.to(torch.float64), id="another dtype"),
        pytest.param(lambda: VALUES.to(torch.device("cpu")), id="a rank's own device"),
        pytest.param(lambda: torch.empty(3).copy_(VALUES), id="between tensors of one device"),
    ],
)
def test_other_work_is_not(work: Callable[[], object]) -> None:
    with host_waits() as places:
        work()
    assert not places
