"""Tools of an environment that the policy never calls: it may not know the form of a call, or need no tool."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_CALLS = re.compile(r"tools/([^/]+)/calls")


class ToolUse:
    """Calls of each tool since the start of a run or an evaluation."""

    def __init__(self) -> None:
        self._calls: dict[str, float] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step or of an attempt: `tools/NAME/calls` of every tool that it had."""
        for name, value in metrics.items():
            if match := _CALLS.fullmatch(name):
                self._calls[match[1]] = self._calls.get(match[1], 0.0) + value

    @property
    def never_called(self) -> list[str]:
        """The tools that no attempt has called so far."""
        return [name for name, count in self._calls.items() if not count]


def uncalled_text(tools: Iterable[str], when: str, look: str) -> str:
    """A sentence for the screen: the tools, when they were not called, the command by which to look at the prompts."""
    names = ", ".join(tools)
    return f"tools that were never called {when}: {names}; look at what the policy is shown of them: {look}"
