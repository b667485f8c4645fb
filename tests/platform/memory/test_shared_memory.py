"""Shared memory that cannot be written is told before a rank starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.platform.memory.shared_memory import check_shared_memory
from megarl.types import ConfigError, DiskFullError, MegarlError


def test_shared_memory_of_this_machine_serves() -> None:
    check_shared_memory()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        pytest.param("ro", ConfigError, id="read-only"),
        pytest.param("size=1m", DiskFullError, id="no room"),
        pytest.param(None, ConfigError, id="absent"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, small_disk: Callable[[str], Path], options: str | None, error: type[MegarlError]
) -> None:
    folder = tmp_path / "absent" if options is None else small_disk(options)
    with pytest.raises(error, match=str(folder)):
        check_shared_memory(folder)
