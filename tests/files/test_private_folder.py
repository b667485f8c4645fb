"""Private folders of runs: nobody else's to read, removed with the run, also after a kill."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megarl.files.private_folder import PrivateFolder

_HOLD = "from megarl.files.private_folder import PrivateFolder as F; f = F(); print(f.path, flush=True); input()"


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_is_private_and_removed(tmp_path: Path) -> None:
    folder = PrivateFolder()
    assert folder.path.parent == tmp_path and folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "socket").touch()
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_next_folder_removes_what_a_killed_process_left_and_nothing_else(tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    (tmp_path / "megarl-run-of-somebody").mkdir()  # no lock: not known to be abandoned
    mine = PrivateFolder()
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        PrivateFolder().remove()
        assert theirs.is_dir() and mine.path.is_dir()
        process.kill()
    assert theirs.is_dir()
    PrivateFolder().remove()
    assert not theirs.exists() and mine.path.is_dir() and (tmp_path / "megarl-run-of-somebody").is_dir()
    mine.remove()


def test_a_folder_of_another_parent_is_made_and_cleaned_there(tmp_path: Path) -> None:
    parent = tmp_path / "short"
    parent.mkdir()
    folder = PrivateFolder(parent)
    assert folder.path.parent == parent and folder.path.stat().st_mode & 0o777 == 0o700
    # As its process's end does.
    folder._lock.close()
    PrivateFolder().remove()
    assert folder.path.is_dir()
    PrivateFolder(parent).remove()
    assert list(parent.iterdir()) == []


def test_the_next_folder_removes_one_whose_process_was_killed_while_it_removed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock was already gone, the folder not."""
    folder = PrivateFolder()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path, **_: (Path(path) / "lock").unlink())
        folder.remove()
    assert len(list(tmp_path.iterdir())) == 1
    PrivateFolder().remove()
    assert list(tmp_path.iterdir()) == []
