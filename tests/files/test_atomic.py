from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from megarl.files.atomic import (
    disk_full,
    end_replacements,
    raise_disk_full_errors,
    raise_storage_errors,
    replace_folder,
    replace_text,
    storage_error,
)
from megarl.types import DiskFullError, StorageError


def test_a_file_that_cannot_be_replaced_stays_as_it_was(
    tmp_path: Path, no_file_may_grow: Callable[[], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "status.json"
    replace_text(path, "before\n")
    refusal = pytest.raises(StorageError, match=rf"^{path}: cannot be read or written")
    with no_file_may_grow(), refusal, raise_storage_errors(path):
        replace_text(path, "after\n")
    assert path.read_text() == "before\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]


def make_folder(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "file").write_text(text)
    return path


def test_a_replacement_that_fails_keeps_the_folder_of_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill came between the two renames, so the older folder has its hidden name only."""
    folder, partial = tmp_path / "step_1", make_folder(tmp_path / ".partial", "newer")
    make_folder(tmp_path / ".step_1.replaced", "older")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == partial:
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(OSError, match="No space left"):
            replace_folder(partial, folder)
    assert (folder / "file").read_text() == "older"
    replace_folder(partial, folder)
    assert (folder / "file").read_text() == "newer" and [path.name for path in tmp_path.iterdir()] == ["step_1"]


@pytest.mark.parametrize("has_newer", [False, True])
def test_a_killed_replacement_is_undone_or_completed(tmp_path: Path, has_newer: bool) -> None:
    make_folder(tmp_path / ".step_1.replaced", "older")
    if has_newer:
        make_folder(tmp_path / "step_1", "newer")
    end_replacements(tmp_path)
    assert (tmp_path / "step_1/file").read_text() == ("newer" if has_newer else "older")
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_full_disk_ends_with_74_and_the_path() -> None:
    full = Path("/dev/full")
    refusal = pytest.raises(DiskFullError, match=rf"^{full}: no room on its disk")
    with refusal as caught, raise_storage_errors(full), full.open("w") as file:
        file.write("x")
        file.flush()
    assert caught.value.exit_code == 74


def test_another_fault_of_the_storage_ends_with_74_and_the_path(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    refusal = pytest.raises(StorageError, match=rf"^{folder}: cannot be read or written \(Is a directory\)")
    with refusal as caught, raise_storage_errors(tmp_path):
        folder.read_bytes()
    assert caught.value.exit_code == 74


def test_a_full_disk_elsewhere_is_not_taken_for_the_run_folder(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/elsewhere/part")
    named = storage_error(tmp_path, error)
    assert isinstance(named, DiskFullError) and str(named).startswith("/elsewhere/part: no room on its disk")
    with pytest.raises(DiskFullError, match=r"^/elsewhere/part: "), raise_disk_full_errors(tmp_path):
        raise error
    inside = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "part"))
    assert str(storage_error(tmp_path, inside)).startswith(f"{tmp_path}: no room on its disk")


def test_a_full_folder_of_temporary_files_is_named(
    tmp_path: Path, small_disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk("size=64k")
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    with pytest.raises(OSError, match="No space") as caught, (disk / "part").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert caught.value.filename is None
    for named in (storage_error(run, caught.value), disk_full(caught.value)):
        assert str(named).startswith(f"{disk}: no room on its disk") and "TMPDIR" in str(named)


def test_a_full_output_is_named(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from megarl.files.atomic import storage_error; import sys\n"
        "try:\n    print('x', flush=True)\n"
        f"except OSError as error:\n    print(storage_error(Path({str(tmp_path)!r}), error), file=sys.stderr)\n"
        "    import os; os._exit(0)"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr.startswith("/dev/full: no room on its disk")


@pytest.mark.parametrize("kind", [FileNotFoundError, NotADirectoryError])
def test_a_removed_part_of_the_run_folder_ends_with_74(tmp_path: Path, kind: type[OSError]) -> None:
    number = {FileNotFoundError: errno.ENOENT, NotADirectoryError: errno.ENOTDIR}[kind]
    named = storage_error(tmp_path, kind(number, "gone", str(tmp_path / "samples/step_000001.jsonl")))
    assert named is not None and named.exit_code == 74 and "samples" in str(named)
    assert storage_error(tmp_path, kind(number, "gone", "/elsewhere/model")) is None
    gone = storage_error(tmp_path / "run", StorageError("draws.jsonl: cannot be read"))
    assert "run folder is gone" in str(gone)
