"""What is wrong with a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.recipe import load
from megarl.types import ConfigError


def failure(path: Path, *overrides: str) -> str:
    """The error of a recipe with these overrides: a title, and a line for each fault."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def faults(path: Path, *overrides: str) -> list[str]:
    """The lines of this error below the title."""
    return failure(path, *overrides).splitlines()[1:]
