"""The smallest part of the check of judges: exact counts; how fast it is the check itself tells."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


def test_counts_are_exact(tool: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--completions", "128", "--no-throughput", "--timeout-seconds", "4", "--service-seconds", "0.01"]
    assert tool("check_judge").main(arguments) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.startswith("128 completions, ")


def test_a_server_that_never_gives_an_answer_is_refused(
    tool: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tool("check_judge").main(["--errors", "50", "--hangs", "50", "--nonsense", "0"])
    assert "give less than 100" in capsys.readouterr().err
