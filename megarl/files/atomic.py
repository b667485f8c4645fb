"""Atomic writes of a run's files, and storage errors that name the path."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megarl.types import ConfigError, DiskFullError, EndedError, MegarlError, StoppedError, StorageError

_MAKE_ROOM = "Make room, choose another disk with runs_folder=FOLDER, or retain fewer checkpoints with checkpoint.keep."
LEAST_FREE_BYTES = 1 << 30
"""Free bytes that metrics, samples and logs need on a run folder's disk, without checkpoints and models."""
_FULL_BYTES = 1 << 20
"""A disk with fewer free bytes counts as full. A failed write may have left part of a block free."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FAILED = (errno.EIO, errno.EROFS, errno.ESTALE, errno.EFBIG)
_REMOVED = (errno.ENOENT, errno.ENOTDIR)
_DENIED = (errno.EACCES, errno.EPERM)
"""Errors that count as storage errors only in the run folder. So do errors about removed files."""


@contextmanager
def storage_faults_named(path: Path) -> Iterator[None]:
    """Turn an OSError inside this context into StorageError, or DiskFullError for a full disk.

    The error names `path` if the OSError has no file name. Put only file operations inside: a lost connection is an
    OSError too.
    """
    try:
        yield
    except OSError as error:
        place = path if error.filename is None else error.filename
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            raise DiskFullError(f"{place}: no room on its disk ({reason}). {_MAKE_ROOM}") from None
        raise StorageError(
            f"{place}: cannot be read or written ({reason}). Check the disk and the permissions, then try again."
        ) from None


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text atomically: after a power failure it has the old or the new text. Raises OSError."""
    replace_bytes(path, text.encode("utf-8"))


def replace_bytes(path: Path, content: bytes, *, is_private: bool = False) -> None:
    """Replace a file's bytes like `replace_text`. `is_private`: only this user may read them."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            if is_private:
                # Before the first byte is written, which another user could read.
                os.fchmod(file.fileno(), 0o600)
            file.write(content)
            file.flush()
            # Before the rename: a power failure must not leave the new name with empty contents.
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    # Only an fsync of the folder makes the rename durable.
    sync(path.parent)


_REPLACED = ".replaced"
"""Suffix of a folder's hidden name while a newer folder takes its place."""


def replace_folder(partial: Path, folder: Path) -> None:
    """Rename a complete folder to its final name, replacing an older folder. The new name survives a power failure.

    `end_replacement` completes or undoes this after a kill.
    """
    # A rename cannot replace a folder with files, so move the older one away first. Its deletion is slow: do it last.
    replaced = _replaced_path(folder)
    # After a kill between two renames, `replaced` is the only complete folder until the new one has its name.
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    try:
        partial.rename(folder)
    except OSError:
        # A full disk may have no room for the entry. Then the older folder stays.
        if replaced.exists():
            replaced.rename(folder)
        raise
    # Before the older folder is deleted: only an fsync of the parent makes the rename durable.
    sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def end_replacement(folder: Path) -> None:
    """Complete a killed `replace_folder`: delete the older folder if the newer has its name, else restore it."""
    replaced = _replaced_path(folder)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    elif replaced.exists():
        replaced.rename(folder)


def end_replacements(parent: Path) -> None:
    for replaced in parent.glob(f".*{_REPLACED}"):
        end_replacement(replaced.with_name(replaced.name.removeprefix(".").removesuffix(_REPLACED)))


def _replaced_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{_REPLACED}")


def sync(path: Path) -> None:
    """Write a file, or a folder's list of entries, to disk (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_full(error: BaseException) -> DiskFullError | None:
    cause = _os_error(error, _FULL)
    return None if cause is None else _full_disk_error(cause, None, None)


def storage_error(folder: Path, error: BaseException) -> StorageError | None:
    """Return a StorageError if the run folder or its disk caused an error, else None."""
    if not isinstance(error, Exception) or isinstance(error, ConfigError | StoppedError | EndedError):
        return None
    if not folder.is_dir():
        return StorageError(
            f"{folder}: the run folder is gone: it was removed, or its disk is no longer there. Nothing more could be "
            "saved; start the run again from its recipe."
        )
    if isinstance(error, StorageError):
        return error
    if full := _os_error(error, _FULL):
        return _full_disk_error(full, folder, None)
    if failed := _os_error(error, _FAILED):
        return StorageError(f"{failed.filename or folder}: cannot be written or read ({failed.strerror}).")
    removed = _os_error(error, _REMOVED)
    if removed is not None and _is_below(folder, removed.filename):
        return StorageError(
            f"{removed.filename}: the file or its folder was removed while the run went on. Continue with --resume, or "
            "start the run again from its recipe."
        )
    denied = _os_error(error, _DENIED)
    if denied is not None and _is_below(folder, denied.filename):
        return StorageError(
            f"{denied.filename}: the file cannot be written or read ({denied.strerror}). Give the run's user write "
            "permission again, then continue with --resume."
        )
    return None


def _is_below(folder: Path, name: object) -> bool:
    if not isinstance(name, str | bytes | os.PathLike):
        return False
    return Path(os.path.abspath(os.fsdecode(name))).is_relative_to(folder.absolute())


@contextmanager
def disk_full_named(folder: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turn an error caused by a full disk into DiskFullError. `num_bytes` is the size of the write, or None."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, DiskFullError) and (full := _os_error(error, _FULL)):
            raise _full_disk_error(full, folder, num_bytes) from None
        raise


def append_whole(path: Path, data: bytes) -> None:
    """Append data to a file completely or not at all. Raises OSError."""
    # Unbuffered, so that an error appears in this call, not when the file is closed.
    with path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(size)
            raise


def check_space(folder: Path, num_bytes: int) -> None:
    if num_bytes > _free_bytes(folder):
        raise _no_space_error(folder, num_bytes)


def _full_disk_error(error: OSError, folder: Path | None, num_bytes: int | None) -> DiskFullError:
    """Return the error for a write of `num_bytes` into `folder` on a full disk; None: unknown."""
    place = error.filename
    # Unlike an error of an open, an error of a write has no file name.
    if place is None:
        place = _full_place(folder)
    if folder is not None and (place is None or _is_below(folder, place)):
        return _no_space_error(folder, num_bytes)
    if place is None:
        return DiskFullError(f"no room on a disk ({error.strerror}). {_MAKE_ROOM}")
    if _is_below(Path(tempfile.gettempdir()), place):
        remedy = "It is for temporary files: make room, or set TMPDIR to a folder on another disk."
    else:
        remedy = "Make room there, or write to another disk."
    return DiskFullError(f"{os.fsdecode(place)}: no room on its disk ({error.strerror}). {remedy}")


def _full_place(folder: Path | None) -> str | None:
    """Return the first full place that a run writes to (its folder, temporary files, its output), or None."""
    for place in (folder, Path(tempfile.gettempdir())):
        if place is not None and _free_bytes(place) < _FULL_BYTES:
            return str(place)
    for descriptor in (1, 2):
        with suppress(OSError):
            output = os.readlink(f"/proc/self/fd/{descriptor}")
            # The device /dev/full is always full.
            if output == "/dev/full" or (os.path.isfile(output) and _free_bytes(Path(output)) < _FULL_BYTES):
                return output
    return None


def _no_space_error(folder: Path, num_bytes: int | None) -> DiskFullError:
    sizes = (
        f"{_free_bytes(folder)} free" if num_bytes is None else f"{num_bytes} bytes needed, {_free_bytes(folder)} free"
    )
    return DiskFullError(f"{folder}: no room on its disk: {sizes}. {_MAKE_ROOM}")


def _free_bytes(folder: Path) -> int:
    # A run folder may not exist yet; its nearest existing parent is on the same disk.
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _os_error(error: BaseException, numbers: tuple[int, ...]) -> OSError | None:
    """Return the first OSError with one of these numbers among an error and its causes, or None.

    For a full disk, an error of another class counts too if it quotes the system's message.
    """
    full_texts = {os.strerror(number): number for number in numbers if number in _FULL}
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            if cause.errno in numbers:
                return cause
        # Libraries in C++ and Rust, such as torch and safetensors, raise errors with texts only. megarl's errors have
        # classes.
        elif not isinstance(cause, MegarlError):
            text = str(cause)
            if (words := next((words for words in full_texts if words in text), None)) is not None:
                return OSError(full_texts[words], words)
        cause = cause.__cause__ or cause.__context__
    return None
