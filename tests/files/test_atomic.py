from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from megarl.files.atomic import replace_text, storage_faults_named
from megarl.types import DiskFullError, StorageError


def test_a_file_that_cannot_be_replaced_stays_as_it_was(
    tmp_path: Path, no_file_may_grow: Callable[[], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "status.json"
    replace_text(path, "before\n")
    refusal = pytest.raises(StorageError, match=rf"^{path}: cannot be read or written")
    with no_file_may_grow(), refusal, storage_faults_named(path):
        replace_text(path, "after\n")
    assert path.read_text() == "before\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


def test_a_full_disk_ends_with_74_and_the_path() -> None:
    full = Path("/dev/full")
    refusal = pytest.raises(DiskFullError, match=rf"^{full}: no room on its disk")
    with refusal as caught, storage_faults_named(full), full.open("w") as file:
        file.write("x")
        file.flush()
    assert caught.value.exit_code == 74


def test_another_fault_of_the_storage_ends_with_74_and_the_path(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    refusal = pytest.raises(StorageError, match=rf"^{folder}: cannot be read or written \(Is a directory\)")
    with refusal as caught, storage_faults_named(tmp_path):
        folder.read_bytes()
    assert caught.value.exit_code == 74
