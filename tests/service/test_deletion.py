"""Deletion of the service's files: what cannot be deleted is reported, and nothing else fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megarl.service.refusals import UserError
from megarl.service.storage.checkpoints import Checkpoints
from megarl.service.storage.deletion import delete_file, delete_tree


def refuse_deletion(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Let every deletion of a file with this part in its path fail, as on a disk that fails."""
    unlink = os.unlink

    def failing(path: str | Path, **settings: int) -> None:
        if part in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        unlink(path, **settings)

    monkeypatch.setattr(os, "unlink", failing)


def test_files_that_cannot_be_deleted_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[str] = []
    for name in ("bad", "good"):
        (tmp_path / "tree").mkdir(exist_ok=True)
        (tmp_path / "tree" / name).touch()
    refuse_deletion(monkeypatch, "bad")
    assert not delete_file(tmp_path / "tree/bad", reports.append)
    assert delete_file(tmp_path / "missing", reports.append)
    delete_tree(tmp_path / "missing", reports.append)
    assert [text.split(": cannot be deleted")[0] for text in reports] == [str(tmp_path / "tree/bad")]
    delete_tree(tmp_path / "tree", reports.append)
    assert os.listdir(tmp_path / "tree") == ["bad"] and len(reports) == 3, "the file and its folder are named"


def test_a_checkpoint_that_cannot_be_deleted_stays_and_others_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, reports = [0.0], []
    checkpoints = Checkpoints(tmp_path, reports.append, lambda: now[0])
    for run in ("a:train:0", "b:train:0"):
        partial = checkpoints.begin_checkpoint(run, "weights", "one", "ann", overwrite=False)
        checkpoints.complete_checkpoint(partial, "one", {"owner": "ann"}, 3600)
    refuse_deletion(monkeypatch, "a:train:0")
    with pytest.raises(UserError, match="disk of the service fails"):
        checkpoints.delete_checkpoint("tinker://a:train:0/weights/one", "ann")
    checkpoints.find_checkpoint("tinker://a:train:0/weights/one", "ann")
    now[0] = 3601.0
    for _ in range(3):
        checkpoints.delete_expired()
    assert (tmp_path / "a:train:0/weights/one").exists() and not (tmp_path / "b:train:0/weights/one").exists()
    [report] = reports
    assert report.startswith(f"{tmp_path}/a:train:0/weights/one/service.json: cannot be deleted")
