"""Folders known by size and sha256, and what a full disk says."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.checkpoint.manifest import ManifestWriter, check_hashes, check_sizes, file_record
from megarl.files.atomic import check_space, raise_disk_full_errors
from megarl.types import DiskFullError


def test_a_disk_that_fills_up_in_the_middle_of_a_tensor_is_named(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("size=256k")
    manifest = ManifestWriter(disk)
    torch.save(torch.arange(1000), manifest.stream("fits"))
    with (
        pytest.raises(DiskFullError, match=rf"^{disk}: no room on its disk: 12 bytes needed, \d+ free") as caught,
        raise_disk_full_errors(disk, 12),
    ):
        torch.save(torch.arange(100_000), manifest.stream("does_not"))
    assert caught.value.exit_code == 74
    with contextlib.suppress(OSError):
        manifest.release()


def test_only_a_full_disk_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), raise_disk_full_errors(tmp_path, 1):
        raise PermissionError(errno.EACCES, "no")
    check_space(tmp_path, 1)
    with pytest.raises(DiskFullError, match="no room"):
        check_space(tmp_path, 1 << 60)


def test_a_stream_knows_where_it_is_and_its_file_is_known(tmp_path: Path) -> None:
    manifest = ManifestWriter(tmp_path)
    stream = manifest.stream("a")
    assert stream.tell() == 0
    stream.write(b"abc")
    assert stream.tell() == 3
    manifest.release(durable=True)
    # FIPS 180-2, appendix B.1.
    known = {"size": 3, "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
    assert manifest.files == {"a": known} and file_record(tmp_path / "a") == known
    assert check_sizes(tmp_path) == {}
    check_hashes(tmp_path, {"a": known["sha256"]})
