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
_FULL_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
_FAILED_NUMBERS = (errno.EIO, errno.EROFS, errno.ESTALE, errno.EFBIG)
_REMOVED_NUMBERS = (errno.ENOENT, errno.ENOTDIR)
_DENIED_NUMBERS = (errno.EACCES, errno.EPERM)
"""Errors that count as storage errors only in the run folder. So do errors about removed files."""


@contextmanager
def raise_storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError inside this context into StorageError, or DiskFullError for a full disk.

    The error names `path` if the OSError has no file name. Put only file operations inside: a lost connection is an
    OSError too.
    """
    try:
        yield
    except OSError as error:
        faulty_path = path if error.filename is None else error.filename
        reason = error.strerror or str(error)
        if error.errno in _FULL_NUMBERS:
            raise DiskFullError(f"{faulty_path}: no room on its disk ({reason}). {_MAKE_ROOM}") from None
        raise StorageError(
            f"{faulty_path}: cannot be read or written ({reason}). Check the disk and the permissions, then try again."
        ) from None


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text atomically, even if power fails. Raises OSError."""
    replace_bytes(path, text.encode("utf-8"))


def replace_bytes(path: Path, content: bytes, *, is_private: bool = False) -> None:
    """Replace a file's bytes like `replace_text`. `is_private`: only this user may read them."""
    partial_file = path.with_name(f".{path.name}.partial")
    try:
        with partial_file.open("wb") as file:
            if is_private:
                # Before the first byte is written, which another user could read.
                os.fchmod(file.fileno(), 0o600)
            file.write(content)
            file.flush()
            # Before the rename: a power failure must not leave the new name with empty contents.
            os.fsync(file.fileno())
        partial_file.replace(path)
    except OSError:
        partial_file.unlink(missing_ok=True)
        raise
    # Only an fsync of the folder makes the rename durable.
    sync(path.parent)


_REPLACED = ".replaced"
"""Suffix of a folder's hidden name while a newer folder takes its place."""


def replace_folder(complete_folder: Path, folder: Path) -> None:
    """Rename a complete folder to its final name, replacing an older folder. The new name survives a power failure.

    `end_replacement` completes or undoes this after a kill.
    """
    # A rename cannot replace a folder with files, so move the older one away first. Its deletion is slow: do it last.
    older_folder = _path_of_replaced(folder)
    # After a kill between two renames, `older_folder` is the only complete folder until the new one has its name.
    if folder.exists():
        shutil.rmtree(older_folder, ignore_errors=True)
        folder.rename(older_folder)
    try:
        complete_folder.rename(folder)
    except OSError:
        # A full disk may have no room for the new name. Then the older folder gets its name back.
        if older_folder.exists():
            older_folder.rename(folder)
        raise
    # Before the older folder is deleted: only an fsync of the parent makes the rename durable.
    sync(folder.parent)
    shutil.rmtree(older_folder, ignore_errors=True)


def end_replacement(folder: Path) -> None:
    """Complete a killed `replace_folder`: delete the older folder if the newer has its name, else restore it."""
    older_folder = _path_of_replaced(folder)
    if folder.exists():
        shutil.rmtree(older_folder, ignore_errors=True)
    elif older_folder.exists():
        older_folder.rename(folder)


def end_replacements(parent: Path) -> None:
    for older_folder in parent.glob(f".*{_REPLACED}"):
        end_replacement(older_folder.with_name(older_folder.name.removeprefix(".").removesuffix(_REPLACED)))


def _path_of_replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{_REPLACED}")


def sync(path: Path) -> None:
    """Write a file, or a folder's list of entries, to disk (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_full(error: BaseException) -> DiskFullError | None:
    cause = _find_os_error(error, _FULL_NUMBERS)
    return None if cause is None else _full_disk_error(cause, None, None)


def storage_error(folder: Path, error: BaseException) -> StorageError | None:
    """Return a StorageError if the run folder or its disk caused an error, else None."""
    # Errors of the recipe, and orderly ends of a run, are never the storage's.
    if not isinstance(error, Exception) or isinstance(error, ConfigError | StoppedError | EndedError):
        return None
    if not folder.is_dir():
        return StorageError(
            f"{folder}: the run folder is gone: it was removed, or its disk is no longer there. Nothing more could be "
            "saved; start the run again from its recipe."
        )
    if isinstance(error, StorageError):
        return error
    # A full or failing disk counts wherever the file is: temporary files matter too.
    if full_error := _find_os_error(error, _FULL_NUMBERS):
        return _full_disk_error(full_error, folder, None)
    if device_error := _find_os_error(error, _FAILED_NUMBERS):
        return StorageError(f"{device_error.filename or folder}: cannot be written or read ({device_error.strerror}).")
    # Missing files and permissions count only inside the run folder: elsewhere they are errors of the input.
    removed_error = _find_os_error(error, _REMOVED_NUMBERS)
    if removed_error is not None and _is_below(folder, removed_error.filename):
        return StorageError(
            f"{removed_error.filename}: the file or its folder was removed while the run went on. Continue with "
            "--resume, or start the run again from its recipe."
        )
    denied_error = _find_os_error(error, _DENIED_NUMBERS)
    if denied_error is not None and _is_below(folder, denied_error.filename):
        return StorageError(
            f"{denied_error.filename}: the file cannot be written or read ({denied_error.strerror}). Give the run's "
            "user write permission again, then continue with --resume."
        )
    return None


def _is_below(folder: Path, name: object) -> bool:
    if not isinstance(name, str | bytes | os.PathLike):
        return False
    return Path(os.path.abspath(os.fsdecode(name))).is_relative_to(folder.absolute())


@contextmanager
def raise_disk_full_errors(folder: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Turn an error caused by a full disk into DiskFullError. `num_bytes` is the size of the write, or None."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, DiskFullError) and (full_error := _find_os_error(error, _FULL_NUMBERS)):
            raise _full_disk_error(full_error, folder, num_bytes) from None
        raise


def append_whole(path: Path, data: bytes) -> None:
    """Append data to a file completely or not at all. Raises OSError."""
    # Unbuffered, so that an error appears in this call, not when the file is closed.
    with path.open("ab", buffering=0) as file:
        size_before = os.fstat(file.fileno()).st_size
        unwritten = memoryview(data)
        try:
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
        except OSError:
            file.truncate(size_before)
            raise


def check_space(folder: Path, num_bytes: int) -> None:
    if num_bytes > _free_bytes(folder):
        raise _no_space_error(folder, num_bytes)


def _full_disk_error(error: OSError, folder: Path | None, num_bytes: int | None) -> DiskFullError:
    """Return the error for a write of `num_bytes` into `folder` on a full disk; None: unknown."""
    full_place = error.filename
    # Unlike an error of an open, an error of a write has no file name.
    if full_place is None:
        full_place = _find_full_place(folder)
    if folder is not None and (full_place is None or _is_below(folder, full_place)):
        return _no_space_error(folder, num_bytes)
    if full_place is None:
        return DiskFullError(f"no room on a disk ({error.strerror}). {_MAKE_ROOM}")
    if _is_below(Path(tempfile.gettempdir()), full_place):
        remedy = "It is for temporary files: make room, or set TMPDIR to a folder on another disk."
    else:
        remedy = "Make room there, or write to another disk."
    return DiskFullError(f"{os.fsdecode(full_place)}: no room on its disk ({error.strerror}). {remedy}")


def _find_full_place(folder: Path | None) -> str | None:
    """Return the first full place that a run writes to (its folder, temporary files, its output), or None."""
    for candidate in (folder, Path(tempfile.gettempdir())):
        if candidate is not None and _free_bytes(candidate) < _FULL_BYTES:
            return str(candidate)
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


def _find_os_error(error: BaseException, error_numbers: tuple[int, ...]) -> OSError | None:
    """Return the first OSError with one of these numbers among an error and its causes, or None.

    For a full disk, an error of another class counts too if it quotes the system's message.
    """
    number_of_message = {
        os.strerror(error_number): error_number for error_number in error_numbers if error_number in _FULL_NUMBERS
    }
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            if cause.errno in error_numbers:
                return cause
        # Libraries in C++ and Rust, such as torch and safetensors, raise errors with texts only. megarl's errors have
        # classes.
        elif not isinstance(cause, MegarlError):
            error_text = str(cause)
            if (message := next((message for message in number_of_message if message in error_text), None)) is not None:
                return OSError(number_of_message[message], message)
        cause = cause.__cause__ or cause.__context__
    return None
