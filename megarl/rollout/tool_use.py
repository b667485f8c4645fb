"""Detection of tools that the policy never calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_CALLS = re.compile(r"tools/([^/]+)/calls")


class ToolUse:
    """Number of calls per tool since the start of a run or an evaluation."""

    def __init__(self) -> None:
        self._calls: dict[str, float] = {}

    def add_counts(self, metrics: Mapping[str, float]) -> None:
        """Add the call counts of a step or an attempt: `tools/NAME/calls` for every available tool."""
        for name, value in metrics.items():
            if match := _CALLS.fullmatch(name):
                self._calls[match[1]] = self._calls.get(match[1], 0.0) + value

    @property
    def never_called(self) -> list[str]:
        return [name for name, count in self._calls.items() if not count]


def uncalled_text(tools: Iterable[str], period_text: str, prompts_command: str) -> str:
    """Return the notice on tools never called. `prompts_command` is the command that prints the prompts."""
    names = ", ".join(tools)
    return f"tools that were never called {period_text}: {names}; check how the prompt presents them: {prompts_command}"
