"""Functions of one table that take different settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any


def supported_kwargs(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Of the settings that are offered by name, those that the function has a parameter for."""
    return {name: value for name, value in offered.items() if name in signature(function).parameters}
