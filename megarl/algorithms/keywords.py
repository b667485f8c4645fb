"""Selection of keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any


def supported_kwargs(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in offered.items() if name in signature(function).parameters}
