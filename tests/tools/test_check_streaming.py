"""Sources that do not fit in memory: the memory of reading one does not grow with its size."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.parametrize(("kind", "megabytes", "limit"), [("parquet", "128", "100"), ("jsonl", "48", "30")])
def test_a_source_is_streamed(
    tool: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], kind: str, megabytes: str, limit: str
) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    main = tool("check_streaming").main
    assert main(["--kind", kind, "--mb", megabytes, "--limit-mb", limit]) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.startswith(f"{megabytes} MB of {kind}, ")


def test_the_limit_is_held_to(tool: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    assert tool("check_streaming").main(["--kind", "jsonl", "--mb", "2", "--limit-mb", "-1"]) == 1
