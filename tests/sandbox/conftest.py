"""A sandbox for the tests of this folder, and what they run in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from megarl.sandbox.sandbox import Sandbox, SandboxSettings


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """One of all layers, with a CPU limit below a second and ten by the clock."""
    made = Sandbox(SandboxSettings(timeout_seconds=0.9, wall_timeout_seconds=10.0, packages=()))
    with contextlib.closing(made):
        yield made
