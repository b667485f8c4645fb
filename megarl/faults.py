"""Named points of the code at which tests break a process on purpose: `tests/faults/injection.py`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any

from megarl.types import ConfigError

VARIABLE = "MEGARL_FAULT"
TEST_MARK = "MEGARL_TEST_RUN"
"""Variable set by pytest (tests/leftovers.py) for all processes that it starts. Without it, `VARIABLE` is an error."""
DRIVER = "driver"
_INJECTION = "tests.faults.injection"

_injector: Any = None
"""The `Injector` of this process; None: it has no faults."""


def reach(point: str, tensors: Callable[[], Iterable[Any]] = tuple) -> None:
    """Inject the fault that a test set for this point, if any. The fault may change `tensors`."""
    # This condition is the only cost in a run without faults.
    if _injector is not None:
        _injector.reach(point, tensors)


def begin_step(number: int) -> None:
    if _injector is not None:
        _injector.step = number


def text() -> str:
    """Return the faults to inject, from the environment variable `VARIABLE`."""
    return os.environ.get(VARIABLE, "")


def arm(text: str, process: str) -> None:
    """Set this process's faults. `process` is `driver`, or the rank's number. Raises ConfigError."""
    global _injector
    _injector = importlib.import_module(_INJECTION).Injector(text, process)


def arm_driver(world_size: int | None = None) -> None:
    """Set the faults of a driver from the environment variable, if it is set.

    `world_size` is the number of the run's ranks, if known. Raises ConfigError for a wrong value, or outside of tests.
    """
    if not text():
        return
    if not os.environ.get(TEST_MARK):
        raise ConfigError(f"{VARIABLE} = {text()}: breaks a run on purpose, so only tests may set it; unset it")
    arm(text(), DRIVER)
    if world_size is not None:
        _injector.check_ranks(world_size)
