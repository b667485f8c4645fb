"""Lock of a folder on shared storage: at most one owner among the processes of all machines."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from megarl.files.pid_space import START_TICKS, STATE, boot_id, pid_namespace, stat_fields
from megarl.files.strict_json import loads
from megarl.types import RunFolderLockedError

HOME = "owners"
"""Folder with the lock, inside the locked folder. Its only file belongs to the newest owner."""
HEARTBEAT_SECONDS = 5.0
"""Seconds between two touches of the owner's file."""
DEAD_SECONDS = 60.0
"""An owner on another machine counts as dead when its last touch is this old: 12 lost heartbeats."""
SILENT_SECONDS = 15.0
"""An owner is reported after this time without a heartbeat: 3 lost heartbeats."""
_POLL_SECONDS = 0.25
_OWNER_FILE_NAME = re.compile(r"\d{8,}")
_ENDED = b"ended"
"""Content of an owner's file after its release. Overwriting needs no space, so it works on a full disk."""
_UNKNOWN_START = -1
_MAX_PID = (1 << 31) - 1
_MAX_OWNER_BYTES = 1 << 16
"""Maximum bytes read of an owner's file. This module writes fewer."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that owns, or owned, a folder."""

    host: str
    boot_id: str
    """Identity of the machine's boot: /proc/sys/kernel/random/boot_id."""
    pid_namespace: str
    """Identity of the container's process numbers (`pid_space.pid_namespace`)."""
    pid: int
    started: int
    """Start of the process in clock ticks since the boot. A reused `pid` has another start."""
    run: str
    job: str
    """Slurm's job id; empty outside of Slurm."""

    @classmethod
    def this_process(cls, run: str) -> Self:
        return cls(
            socket.gethostname(), boot_id(), pid_namespace(), os.getpid(), _start_ticks(os.getpid()) or 0, run,
            os.environ.get("SLURM_JOB_ID", ""),
        )  # fmt: skip

    @classmethod
    def parse(cls, content: bytes) -> Self | None:
        """Return the owner in a file's content; None: not readable."""
        try:
            values = loads(content)
            owner = cls(**values)
        except (ValueError, TypeError):
            return None
        non_text_fields = {"pid": int, "started": int}
        is_valid = all(type(value) is non_text_fields.get(name, str) for name, value in asdict(owner).items())
        # Messages print the values. Others could write a terminal's control characters into the file.
        return owner if is_valid and 0 < owner.pid <= _MAX_PID and str(owner).isprintable() else None

    @property
    def is_on_this_machine(self) -> bool:
        """Whether `pid` is a number of this machine, boot and container."""
        return (self.boot_id, self.pid_namespace) == (boot_id(), pid_namespace())

    @property
    def is_running(self) -> bool:
        """Valid only if `is_on_this_machine`."""
        return _start_ticks(self.pid) in (self.started, _UNKNOWN_START)

    @property
    def is_suspended(self) -> bool:
        """Whether SIGSTOP or Ctrl-Z has suspended the process. Valid only if `is_on_this_machine`."""
        fields = stat_fields(self.pid)
        return bool(fields) and fields[STATE] == "T" and int(fields[START_TICKS]) == self.started

    def __str__(self) -> str:
        job = f", Slurm job {self.job}" if self.job else ""
        return f"host {self.host}, pid {self.pid}{job}, run {self.run}"


class FolderLock:
    """Ownership of a folder by this process, from `__init__` to `release`.

    Each owner has a numbered file in `owners/`; the highest number owns the folder. A process becomes owner by creating
    the next number exclusively, so one of several takers wins, also on NFS and Lustre. The highest file is never
    renamed or removed, only overwritten. Therefore a slow taker that saw an older state cannot win.

    A background thread touches the file every 5 s. If somebody has removed the file, the thread and `check` write it
    again with the next number. `taken_from` is the dead owner before this one; None: the folder was free.
    """

    def __init__(self, folder: Path, run: str, on_wait: Callable[[str], None] = lambda text: None) -> None:
        """Take the folder. `on_wait` is called once if an owner on another machine must be watched first.

        Raises RunFolderLockedError if a living process owns it, OSError if the folder cannot be written.
        """
        self._folder = folder
        self._home = folder / HOME
        self._home.mkdir(exist_ok=True)
        self.taken_from: str | None = None
        self._content = json.dumps(asdict(Owner.this_process(run))).encode()
        self._file = self._claim_folder(self._content, on_wait)
        self._restore_lock = threading.Lock()
        self._is_released = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="folder lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise RunFolderLockedError if another process has taken the folder.

        This happens after a pause of more than 60 s, of a virtual machine or its file server, or if somebody removed
        `owners/`. Raises OSError if the folder is gone.
        """
        if self._is_owner() or self._restore_owner_file():
            return
        newest_file = _newest_owner_file(self._home)
        raise RunFolderLockedError(
            f"{self._folder}: this process gave no sign of life for {DEAD_SECONDS:.0f} s, or {HOME}/ was removed, so "
            f"the folder was taken over by {_describe_owner_in(newest_file)}. This process writes no more; leave the "
            "other one running."
        )

    def _is_owner(self) -> bool:
        """Return whether this process wrote the newest file, by its content: another owner may use its name."""
        with suppress(FileNotFoundError):
            return _newest_owner_file(self._home) == self._file and _read_owner_file(self._file)[0] == self._content
        return False

    def _restore_owner_file(self) -> bool:
        """Write this process's file again after `owners/` was emptied. Returns False if the folder has another owner.

        A taker that creates the first number meanwhile loses. Raises OSError, also if the locked folder is gone.
        """
        with self._restore_lock, suppress(FileExistsError):
            if self._is_owner():
                return True
            self._home.mkdir(exist_ok=True)
            if _newest_owner_file(self._home) is None:
                restored_file = self._home / f"{int(self._file.name) + 1:08d}"
                _create_owner_file(restored_file, self._content)
                self._file = restored_file
                return self._is_owner()
        return False

    def release(self) -> None:
        """Release the folder, unless it has another owner by now."""
        if self._is_released.is_set():
            return
        self._is_released.set()
        # Otherwise the thread may touch a later owner's file in this process. It waits only for the event.
        self._thread.join(_POLL_SECONDS)
        # The file is missing if a later owner removed it, and another's if `owners/` was removed.
        with suppress(OSError):
            if not self._is_owner():
                return
        with suppress(OSError), self._file.open("r+b", buffering=0) as file:
            file.write(_ENDED)
            file.truncate()

    def _claim_folder(self, content: bytes, on_wait: Callable[[str], None]) -> Path:
        """Create this process's file as the highest number, and return it."""
        while True:
            newest_file = _newest_owner_file(self._home)
            try:
                self.taken_from = None if newest_file is None else self._watch_until_dead(newest_file, on_wait)
            except FileNotFoundError:
                # A later owner removed the file.
                continue
            owner_number = 1 if newest_file is None else int(newest_file.name) + 1
            claimed_file = self._home / f"{owner_number:08d}"
            try:
                _create_owner_file(claimed_file, content)
            except FileExistsError:
                # Another taker was faster. It owns the folder now, or has already ended.
                continue
            if _newest_owner_file(self._home) == claimed_file:
                self._remove_older_files(owner_number)
                return claimed_file
            # A still later owner has removed the number seen before, so that it was free again.
            claimed_file.unlink(missing_ok=True)

    def _watch_until_dead(self, file: Path, on_wait: Callable[[str], None]) -> str | None:
        """Return the owner in `file` as text if its process is dead; None: it released the folder.

        Raises RunFolderLockedError if the process lives.
        """
        first_touch_time: float | None = None
        watch_started = time.monotonic()
        while True:
            content, touch_time = _read_owner_file(file)
            if content == _ENDED:
                return None
            owner = Owner.parse(content)
            if owner is not None and owner.is_on_this_machine:
                if owner.is_running:
                    raise self._in_use_error(owner)
                return str(owner)
            # The owner is on another machine, so only the age of its last heartbeat shows whether it lives.
            now = _server_time(self._home)
            # The same machine after a reboot: a touch before the boot is by a process that the reboot ended.
            is_of_earlier_boot = (
                owner is not None
                and owner.host == socket.gethostname()
                and owner.boot_id != boot_id()
                and touch_time < now - time.clock_gettime(time.CLOCK_BOOTTIME)
            )
            # The last touch may lie in the future. So the watch ends after DEAD_SECONDS too.
            if is_of_earlier_boot or now - touch_time > DEAD_SECONDS or time.monotonic() - watch_started > DEAD_SECONDS:
                return _describe_owner(owner)
            if first_touch_time is None:
                first_touch_time = touch_time
                max_wait_seconds = DEAD_SECONDS - max(0.0, now - touch_time)
                owner_text = _describe_owner(owner)
                on_wait(f"{self._folder}: waiting up to {max_wait_seconds:.0f} s for a sign of life of {owner_text}")
            elif touch_time != first_touch_time:
                raise self._in_use_error(owner)
            time.sleep(_POLL_SECONDS)

    def _in_use_error(self, owner: Owner | None) -> RunFolderLockedError:
        return RunFolderLockedError(
            f"{self._folder}: the run folder is in use by {_describe_owner(owner)}. Wait until it ends, or choose "
            "another name=NAME."
        )

    def _remove_older_files(self, newest_number: int) -> None:
        """Remove the files of earlier owners, and `.clock-` files of processes killed while they took the folder."""
        for path in list(self._home.iterdir()):
            is_older = _OWNER_FILE_NAME.fullmatch(path.name) is not None and int(path.name) < newest_number
            if is_older or (path.name.startswith(".clock-") and _seconds_since_touch(path) > DEAD_SECONDS):
                path.unlink(missing_ok=True)

    def _send_heartbeats(self) -> None:
        while not self._is_released.wait(HEARTBEAT_SECONDS):
            # Ignore errors: `check` notices a lost folder.
            with suppress(OSError):
                if self._is_owner() or self._restore_owner_file():
                    # Without times the file server uses its own clock.
                    os.utime(self._file)


@dataclass(slots=True)
class Heartbeats:
    """Watches the heartbeats of a run folder's owner, the driver. Only reads the folder.

    It times them by this machine's monotonic clock, so other machines' clocks do not matter.
    """

    folder: Path
    _last_touch: tuple[str, float] | None = None
    """Name of the newest owner's file, and the time of its last touch."""
    _changed_at: float = 0.0

    def forget(self) -> None:
        self._last_touch = None

    def describe_silence(self) -> str:
        """Return a message if the driver is suspended, or sends no heartbeats; else an empty string.

        Call this repeatedly: it compares the newest heartbeat with that of earlier calls. A driver is silent if the
        newest heartbeat has not changed between calls more than 15 s apart, so the first call never reports silence.
        Raises OSError if the owner's file in `owners/` cannot be read.
        """
        newest_file = _newest_owner_file(self.folder / HOME)
        if newest_file is None:
            return ""
        try:
            content, touch_time = _read_owner_file(newest_file)
        # A later owner removed the file.
        except FileNotFoundError:
            return ""
        if self._last_touch != (newest_file.name, touch_time):
            self._last_touch, self._changed_at = (newest_file.name, touch_time), time.monotonic()
        owner = Owner.parse(content)
        if owner is None:
            return ""
        if owner.is_on_this_machine and owner.is_suspended:
            return f"the driver ({owner}) is suspended by SIGSTOP or Ctrl-Z. Resume it with: kill -CONT {owner.pid}"
        silent_seconds = time.monotonic() - self._changed_at
        if silent_seconds <= SILENT_SECONDS:
            return ""
        if owner.is_on_this_machine:
            causes = "a debugger holds it, the machine is overloaded, or the file system does not respond"
        else:
            causes = "it is suspended or dead, its machine hangs, or the shared file system does not respond"
        return f"the driver ({owner}) has sent no heartbeat for {silent_seconds:.0f} s. Perhaps {causes}."


def owner_is_gone(folder: Path) -> bool:
    """Return whether the newest owner has ended: its file says so, or its process on this machine is gone.

    False: it runs, is on another machine, or its state is unknown. Raises no error, and writes nothing.
    """
    try:
        newest_file = _newest_owner_file(folder / HOME)
        if newest_file is None:
            return False
        content, _ = _read_owner_file(newest_file)
    except OSError:
        return False
    owner = Owner.parse(content)
    return content == _ENDED or (owner is not None and owner.is_on_this_machine and not owner.is_running)


def _create_owner_file(file: Path, content: bytes) -> None:
    """Create a file with this content, on stable storage. Raises FileExistsError if it exists."""
    # O_EXCL is atomic on NFS since version 3, on Lustre and on GPFS. Hard links are missing on some file systems.
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    except OSError:
        file.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _read_owner_file(file: Path) -> tuple[bytes, float]:
    """Return a file's content, and its last touch in seconds by the file server's clock."""
    # Opening makes an NFS client ask its server; stat alone may return values that are a minute old.
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(descriptor, _MAX_OWNER_BYTES), os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def _server_time(home: Path) -> float:
    """Return the file server's time in seconds. The same clock stamps the heartbeats."""
    clock = home / f".clock-{uuid.uuid4().hex}"
    descriptor = os.open(clock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        clock.unlink(missing_ok=True)


def _seconds_since_touch(path: Path) -> float:
    try:
        return _server_time(path.parent) - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _newest_owner_file(home: Path) -> Path | None:
    """Return the owner's file with the highest number; None: the folder never had one."""
    try:
        names = [name for name in os.listdir(home) if _OWNER_FILE_NAME.fullmatch(name)]
    except FileNotFoundError:
        return None
    # Compare as numbers: the one after 99999999 has a digit more.
    return home / max(names, key=int) if names else None


def _describe_owner_in(file: Path | None) -> str:
    with suppress(OSError):
        return _describe_owner(None) if file is None else _describe_owner(Owner.parse(_read_owner_file(file)[0]))
    return _describe_owner(None)


def _describe_owner(owner: Owner | None) -> str:
    return "another process" if owner is None else str(owner)


def _start_ticks(pid: int) -> int | None:
    """Return a process's start in clock ticks since the boot; None: it has ended."""
    if fields := stat_fields(pid):
        # A zombie has ended; its parent has not read the exit code yet.
        return None if fields[STATE] in "ZX" else int(fields[START_TICKS])
    # With hidepid=2, another user's process has no folder in /proc, but can be opened as a pidfd.
    try:
        os.close(os.pidfd_open(pid))
    except OSError:
        return None
    return _UNKNOWN_START
