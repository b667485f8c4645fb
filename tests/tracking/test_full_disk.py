"""Errors of a run folder that is gone or whose disk is full: a real file system of a few kilobytes, really full."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from megarl.config import Recipe
from megarl.files.atomic import append_whole, disk_full, replace_text, storage_error
from megarl.tracking.display import Display
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker
from megarl.types import DataError, DiskFullError, StoppedError, StorageError


def fill(folder: Path) -> Path:
    """Write a file until its disk takes no further byte."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file, pytest.raises(OSError) as full:
        while True:
            file.write(b"x" * 4096)
    assert full.value.errno == errno.ENOSPC
    return ballast


def recipe_on(runs_folder: Path) -> Recipe:
    sections = {"name": "small", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}}
    return Recipe.model_validate({**sections, "runs_folder": str(runs_folder)})


def tracker_of(folder: RunFolder) -> Tracker:
    return Tracker(folder, display=Display(Console(file=io.StringIO())))


def status(folder: RunFolder) -> dict[str, object]:
    return json.loads((folder.path / "status.json").read_text())


@pytest.mark.parametrize("part", ["metrics.jsonl", "samples", "tensorboard"])
def test_what_a_full_disk_does_not_take_ends_the_run_with_74(
    small_disk: Callable[[str], Path], tmp_path: Path, part: str
) -> None:
    disk = small_disk("size=64k")
    folder = RunFolder(recipe_on(tmp_path))
    folder.begin()
    if part == "metrics.jsonl":
        (folder.path / part).symlink_to(disk / part)
    else:
        shutil.rmtree(folder.path / part, ignore_errors=True)
        (disk / part).mkdir()
        (folder.path / part).symlink_to(disk / part)
    with pytest.raises(DiskFullError, match="no room on its disk") as caught, folder:
        folder.set_status("running")
        with contextlib.closing(tracker_of(folder)) as tracker:
            tracker.log(0, {"train/loss": 1.0})
            fill(disk)
            for step in range(1, 2000):
                tracker.samples(step, [{"completion": "x"}])
                tracker.log(step, {f"train/loss_{number}": 1.0 for number in range(100)})
                folder.set_status(step=step)
    assert caught.value.exit_code == 74
    ended = status(folder)
    assert (ended["state"], ended["exit_code"]) == ("failed", 74)
    steps = [json.loads(line)["step"] for line in folder.metrics_file.read_text().splitlines()]
    assert steps == list(range(len(steps))), "a line is not whole"


def test_status_is_true_although_its_own_disk_is_full(small_disk: Callable[[str], Path]) -> None:
    folder = RunFolder(recipe_on(small_disk("size=64k")))
    folder.begin()
    with pytest.raises(DiskFullError) as caught, folder:
        folder.set_status("running", step=3)
        fill(folder.path)
        folder.set_status(step=4)
    assert str(caught.value).startswith(f"{folder.path}: no room on its disk: 0 free. Make room")
    ended = status(folder)
    assert ended == {"state": "failed", "step": 4, "cause": f"DiskFullError: {caught.value}", "exit_code": 74}
    assert not list(folder.path.glob(".*.partial"))


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        pytest.param(None, "done", 0, id="done"),
        pytest.param(StoppedError("SIGTERM: saved after step 3"), "stopped", 75, id="stopped"),
        pytest.param(ValueError("é" * 9000), "failed", 70, id="long cause"),
        pytest.param(OSError(errno.ENOSPC, "full", "x" * 9000), "failed", 74, id="full"),
    ],
)
def test_any_end_can_be_written_to_a_full_disk(
    small_disk: Callable[[str], Path], error: Exception | None, state: str, code: int
) -> None:
    folder = RunFolder(recipe_on(small_disk("size=64k")))
    folder.begin()

    def run() -> None:
        with folder:
            folder.set_status("running", step=3)
            fill(folder.path)
            if error:
                raise error

    if error:
        with pytest.raises(DiskFullError if code == 74 else type(error)):
            run()
    else:
        run()
    ended = status(folder)
    assert (ended["state"], ended["step"], ended["exit_code"]) == (state, 3, code)


def test_a_start_on_a_full_disk_is_reported_in_one_line(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("size=64k")
    fill(disk)
    with pytest.raises(DiskFullError, match=f"^{disk / 'small'}: no room on its disk"):
        RunFolder(recipe_on(disk))


def test_a_run_folder_that_is_gone_is_reported_in_one_line(tmp_path: Path) -> None:
    folder = RunFolder(recipe_on(tmp_path))
    folder.begin()
    with pytest.raises(StorageError) as caught, folder:
        tracker = tracker_of(folder)
        tracker.log(0, {})
        shutil.rmtree(folder.path)
        tracker.log(1, {})
    assert caught.value.exit_code == 74
    assert str(caught.value).startswith(f"{folder.path}: the run folder is gone") and "\n" not in str(caught.value)
    assert not folder.path.exists()


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    """The effective user of the block owns nothing: root's own writes are never denied."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


def test_a_run_folder_that_is_denied_from_now_on_ends_the_run_with_74(tmp_path: Path) -> None:
    folder = RunFolder(recipe_on(tmp_path))
    folder.begin()
    with pytest.raises(StorageError) as caught, folder:
        folder.path.chmod(0o500)
        with as_another_user():
            replace_text(folder.path / "status.json", "{}")
    assert caught.value.exit_code == 74 and "Permission denied" in str(caught.value)
    elsewhere = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "rewards.py"))
    assert storage_error(folder.path, elsewhere) is None, "a file of the user's own"


def test_data_is_appended_whole_or_not_at_all(small_disk: Callable[[str], Path]) -> None:
    file = small_disk("size=64k") / "file"
    append_whole(file, b"first\n")
    with pytest.raises(OSError, match="No space left"):
        append_whole(file, b"y" * 100_000)
    assert file.read_bytes() == b"first\n"


def test_a_full_disk_is_found_behind_other_errors(tmp_path: Path) -> None:
    cause = OSError(errno.EDQUOT, "Disk quota exceeded", "/home/x")
    try:
        raise RuntimeError("not saved") from cause
    except RuntimeError as error:
        assert str(disk_full(error)).startswith("/home/x: no room on its disk (Disk quota exceeded). Make room")
        assert isinstance(storage_error(tmp_path, error), DiskFullError)
    assert disk_full(ValueError("other")) is None and storage_error(tmp_path, ValueError("other")) is None
    of_library = ValueError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert str(disk_full(of_library)).startswith("no room on a disk (No space left on device). ")
    assert disk_full(DataError("a record: No space left on device")) is None
    failed = storage_error(tmp_path, OSError(errno.EROFS, "Read-only file system", str(tmp_path / "x")))
    assert str(failed) == f"{tmp_path / 'x'}: cannot be written or read (Read-only file system)."
