"""Temporary folders on shared storage, and those that a killed process left."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megarl.files.temporary_folder import temporary_folder


def test_old_folders_of_the_same_kind_are_removed(tmp_path: Path) -> None:
    names = (".replay_old", ".replay_new", ".doctor-old", "replay")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / ".replay_link").symlink_to(tmp_path / "replay")
    two_days_ago = time.time() - 2 * 24 * 3600
    for name in (".replay_old", ".doctor-old", "replay"):
        os.utime(tmp_path / name, (two_days_ago, two_days_ago))
    os.utime(tmp_path / ".replay_link", (two_days_ago, two_days_ago), follow_symlinks=False)
    with temporary_folder(tmp_path, ".replay_") as folder:
        assert folder.parent == tmp_path and folder.name.startswith(".replay_")
        (folder / "file").touch()
    assert not folder.exists()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".replay_new", ".doctor-old", "replay", ".replay_link"}
    assert (tmp_path / "replay/file").exists()
