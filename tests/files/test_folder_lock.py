"""The lock of a folder on shared storage: one owner at a time, dead owners replaced, living ones named."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.files import folder_lock
from megarl.files.folder_lock import HOME, FolderLock, Heartbeats, Owner, owner_is_gone
from megarl.types import RunFolderLockedError

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys
from pathlib import Path
from megarl.files.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "theirs")
print("owned", flush=True)
sys.stdin.readline()
lock.release()
print("released", flush=True)
sys.stdin.readline()
"""
TAKE = """
import os, sys, time
from pathlib import Path
from megarl.files.folder_lock import FolderLock
from megarl.types import RunFolderLockedError
folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
won = 0
sys.stdin.readline()
while won < rounds:
    try:
        lock = FolderLock(folder, "race")
    except RunFolderLockedError:
        continue
    # Two owners at a time cannot both create this file.
    os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
    won += 1
    os.unlink(folder / "inside")
    # Every third owner dies, so that the next one takes over from a dead process.
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    if won == rounds and os.getpid() % 2:
        os._exit(0)
    lock.release()
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def write_owner(folder: Path, number: int = 1, seconds_ago: float = 0.0, **other: object) -> Path:
    """Write the file of an owner: this process, except for the fields in `other`."""
    file = folder / HOME / f"{number:08d}"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**asdict(Owner.this_process("theirs")), **other}))
    touched = file.stat().st_mtime - seconds_ago
    os.utime(file, (touched, touched))
    return file


def owner_files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / HOME).iterdir())


def test_a_living_owner_is_named_and_a_killed_one_is_replaced(tmp_path: Path) -> None:
    with start(HOLD, tmp_path) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "owned\n"
        assert not owner_is_gone(tmp_path)
        with pytest.raises(
            RunFolderLockedError, match=rf"in use by host {os.uname().nodename}, pid {owner.pid}, run t"
        ):
            FolderLock(tmp_path, "mine")
        # Stopped is not dead.
        owner.send_signal(signal.SIGSTOP)
        with pytest.raises(RunFolderLockedError):
            FolderLock(tmp_path, "mine")
        owner.send_signal(signal.SIGKILL)
        # Not reaped: a zombie has ended.
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        assert owner_is_gone(tmp_path)
        lock = FolderLock(tmp_path, "mine")
    assert lock.taken_from == f"host {os.uname().nodename}, pid {owner.pid}, run theirs"
    assert owner_files(tmp_path) == ["00000002"]
    lock.check()
    with pytest.raises(RunFolderLockedError, match=rf"pid {os.getpid()}, run mine"):
        FolderLock(tmp_path, "again")
    lock.release()
    lock.release()
    again = FolderLock(tmp_path, "again")
    assert again.taken_from is None and owner_files(tmp_path) == ["00000003"]
    again.release()


def test_a_released_folder_is_free_while_its_process_lives(tmp_path: Path) -> None:
    with start(HOLD, tmp_path) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        assert owner.stdout.readline() == "owned\n"
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "released\n"
        assert owner_is_gone(tmp_path)
        lock = FolderLock(tmp_path, "mine")
        assert lock.taken_from is None
        lock.release()
        owner.communicate("\n")


def test_of_many_takers_one_wins(tmp_path: Path) -> None:
    num_takers, rounds = 6, 25
    takers = [start(TAKE, tmp_path, rounds) for _ in range(num_takers)]
    for taker in takers:
        assert taker.stdin is not None
        taker.stdin.write("\n")
        taker.stdin.flush()
    for taker in takers:
        _, errors = taker.communicate(timeout=120)
        assert taker.returncode == 0, errors
    # Each ownership has its own number, so none was lost or given twice.
    assert owner_files(tmp_path) == [f"{num_takers * rounds:08d}"]


@pytest.mark.parametrize(
    ("fields", "seconds_ago"),
    [
        pytest.param({"pid": 2**22 + 1}, 0, id="no such process"),
        pytest.param({"started": 1}, 0, id="the number belongs to a later process"),
        pytest.param({"boot_id": "earlier"}, time.clock_gettime(time.CLOCK_BOOTTIME) + 5, id="rebooted"),
        pytest.param({"host": "elsewhere", "boot_id": "other"}, 61, id="another machine, no heartbeat"),
        pytest.param({"pid_namespace": "pid:[1]"}, 61, id="another container, no heartbeat"),
    ],
)
def test_a_dead_owner_is_replaced_at_once(tmp_path: Path, fields: dict[str, Any], seconds_ago: float) -> None:
    write_owner(tmp_path, number=7, seconds_ago=seconds_ago, **fields)
    waits: list[str] = []
    lock = FolderLock(tmp_path, "mine", waits.append)
    assert lock.taken_from is not None and "run theirs" in lock.taken_from and waits == []
    assert owner_files(tmp_path) == ["00000008"]
    lock.release()


@pytest.mark.parametrize(
    "fields", [{"host": "elsewhere", "boot_id": "other"}, {"pid_namespace": "pid:[1]"}, {"boot_id": "same host name"}]
)
def test_an_owner_elsewhere_is_refused_by_its_next_heartbeat(tmp_path: Path, fields: dict[str, Any]) -> None:
    # The number is not one of this machine: whether a process has it here means nothing.
    file = write_owner(tmp_path, seconds_ago=20, **{"pid": 2**22 + 1, **fields})
    waits: list[str] = []

    def on_wait(text: str) -> None:
        waits.append(text)
        os.utime(file)

    with pytest.raises(RunFolderLockedError, match="run theirs"):
        FolderLock(tmp_path, "mine", on_wait)
    (text,) = waits
    assert "waiting up to 40 s for a sign of life of host" in text
    assert owner_files(tmp_path) == ["00000001"]


def test_an_owner_elsewhere_that_stays_silent_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "DEAD_SECONDS", 1.0)
    # A local clock that is years off must not matter: only times of the file server are compared.
    monkeypatch.setattr(time, "time", lambda: 0.0)
    write_owner(tmp_path, host="elsewhere", boot_id="other")
    waits: list[str] = []
    started = time.monotonic()
    lock = FolderLock(tmp_path, "mine", waits.append)
    assert time.monotonic() - started >= 0.9 and len(waits) == 1
    lock.release()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"\xff\x00", b"null", b'{"pid": "x"}', b"[" * 100_000, b'{"host": "\x1b[31m"}', b"1" * 5000],
)
def test_a_file_that_names_nobody_counts_by_its_age(tmp_path: Path, content: bytes) -> None:
    file = write_owner(tmp_path)
    file.write_bytes(content)
    assert not owner_is_gone(tmp_path)
    with pytest.raises(RunFolderLockedError, match="another process"):
        FolderLock(tmp_path, "mine", lambda text: os.utime(file, (1e9 + 1e9, 1e9 + 1e9)))
    os.utime(file, (1, 1))
    FolderLock(tmp_path, "mine").release()


def test_a_taker_with_an_old_view_does_not_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write_owner(tmp_path, pid=2**22 + 1)
    create = folder_lock._create_owner_file

    def create_late(file: Path, content: bytes) -> None:
        # Others were faster: number 2 came and went, number 3 owns the folder and has removed the older files.
        if old.exists():
            old.unlink()
            write_owner(tmp_path, number=3)
        create(file, content)

    monkeypatch.setattr(folder_lock, "_create_owner_file", create_late)
    with pytest.raises(RunFolderLockedError, match="run theirs"):
        FolderLock(tmp_path, "mine")
    assert owner_files(tmp_path) == ["00000003"]


def test_a_heartbeat_in_the_future_does_not_lengthen_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "DEAD_SECONDS", 0.5)
    write_owner(tmp_path, seconds_ago=-1e7, host="elsewhere", boot_id="other")
    waits: list[str] = []
    lock = FolderLock(tmp_path, "mine", waits.append)
    assert len(waits) == 1 and "waiting up to 0 s" in waits[0]
    lock.release()


def test_the_highest_number_of_eight_digits_has_a_next_one(tmp_path: Path) -> None:
    file = write_owner(tmp_path, number=99_999_999)
    file.write_bytes(b"")
    os.utime(file, (1, 1))
    lock = FolderLock(tmp_path, "mine")
    assert owner_files(tmp_path) == ["100000000"]
    lock.check()
    lock.release()


def test_a_number_that_is_no_process_id_names_nobody(tmp_path: Path) -> None:
    os.utime(write_owner(tmp_path, pid=10**30), (1, 1))
    FolderLock(tmp_path, "mine").release()


@pytest.mark.parametrize("is_checked_before", [True, False])
def test_an_owner_whose_file_was_removed_stays_the_only_one(tmp_path: Path, is_checked_before: bool) -> None:
    lock = FolderLock(tmp_path, "mine")
    shutil.rmtree(tmp_path / HOME)
    if is_checked_before:
        lock.check()
        with pytest.raises(RunFolderLockedError, match="run mine"):
            FolderLock(tmp_path, "theirs")
        lock.check()
        lock.release()
        FolderLock(tmp_path, "theirs").release()
        return
    with start(HOLD, tmp_path) as owner:
        assert owner.stdin is not None and owner.stdout is not None and owner.stdout.readline() == "owned\n"
        with pytest.raises(RunFolderLockedError, match=rf"removed.* taken over by host .*pid {owner.pid}"):
            lock.check()
        lock.release()
        # Its release must not free the folder of the other owner, whose file has the same name.
        with pytest.raises(RunFolderLockedError, match="run theirs"):
            FolderLock(tmp_path, "again")
        owner.communicate("\n\n")


def test_an_owner_that_was_replaced_writes_no_more(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path, "mine")
    lock.check()
    write_owner(tmp_path, number=2, host="elsewhere", boot_id="other")
    with pytest.raises(RunFolderLockedError, match=r"taken over by host elsewhere.* writes no more"):
        lock.check()
    lock.release()
    # Its release must not free the folder of the later owner.
    assert json.loads((tmp_path / HOME / "00000002").read_text())["host"] == "elsewhere"


def test_the_heartbeat_goes_on_until_the_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: Callable[[Callable[[], bool]], None]
) -> None:
    monkeypatch.setattr(folder_lock, "HEARTBEAT_SECONDS", 0.01)
    lock = FolderLock(tmp_path, "mine")
    (file,) = (tmp_path / HOME).iterdir()
    for _ in range(2):
        os.utime(file, (1, 1))
        wait(lambda: file.stat().st_mtime > 1)
    lock.release()
    assert not any(thread.name == "folder lock" for thread in threading.enumerate())
    os.utime(file, (1, 1))
    time.sleep(0.05)
    assert file.stat().st_mtime == 1


@pytest.fixture
def wait() -> Callable[[Callable[[], bool]], None]:
    """Wait for a condition; fail after two minutes."""

    def until(is_so: Callable[[], bool]) -> None:
        ending = time.monotonic() + 120
        while not is_so():
            assert time.monotonic() < ending
            time.sleep(0.005)

    return until


def test_a_suspended_owner_is_named_until_it_is_resumed(tmp_path: Path) -> None:
    process = start(HOLD, tmp_path)
    try:
        assert process.stdout is not None and process.stdout.readline() == "owned\n"
        heartbeats = Heartbeats(tmp_path)
        assert heartbeats.describe_silence() == ""
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        message = heartbeats.describe_silence()
        assert "is suspended" in message and f"kill -CONT {process.pid}" in message
        os.kill(process.pid, signal.SIGCONT)
        while heartbeats.describe_silence():
            time.sleep(0.01)
        assert process.communicate("\n\n")[0] == "released\n"
        assert heartbeats.describe_silence() == ""
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("is_here", [True, False])
def test_an_owner_without_heartbeats_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_here: bool) -> None:
    file = write_owner(tmp_path, seconds_ago=1000, **({} if is_here else {"host": "far", "boot_id": "other"}))
    now = 0.0
    monkeypatch.setattr(folder_lock, "time", SimpleNamespace(monotonic=lambda: now))
    heartbeats = Heartbeats(tmp_path)
    # The watching process knows nothing of the time before its first look.
    assert heartbeats.describe_silence() == ""
    now = 15.0
    assert heartbeats.describe_silence() == ""
    now = 16.0
    assert (
        "no heartbeat for 16 s" in heartbeats.describe_silence()
        and ("machine hangs" in heartbeats.describe_silence()) != is_here
    )
    heartbeats.forget()
    assert heartbeats.describe_silence() == ""
    now = 32.0
    assert "no heartbeat for 16 s" in heartbeats.describe_silence()
    os.utime(file)
    assert heartbeats.describe_silence() == ""
    file.write_bytes(b"ended")
    now = 100.0
    assert heartbeats.describe_silence() == ""


def test_a_folder_without_an_owner_is_not_silent(tmp_path: Path) -> None:
    assert Heartbeats(tmp_path).describe_silence() == ""
