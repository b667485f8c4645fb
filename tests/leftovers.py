"""Find what one run of pytest leaves behind at its end, and remove it even if pytest itself is killed.

All that a run starts inherits its mark, an entry of the environment, and its temporary folder. A watching process
knows the marked processes and the shared memory that they map. It answers pytest's question for what is left, and when
pytest has ended, in whatever way, it kills and removes what still is there. Other work on the machine is not touched.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

MARK = "MEGARL_TEST_RUN"
"""Names the runs of pytest that a process belongs to, each followed by a comma; a test may start pytest itself."""
WITHOUT_SLURM = "without_slurm"
"""Folder of links to programs (`hidden_slurm`), in the run's temporary folder as long as the run."""
_ENDING_SECONDS = 20.0
_POLL_SECONDS = 8.0
_OF_LIBRARIES = re.compile(r"torchinductor_.*|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|tmp\w+wandb-\w+")
"""Temporary files that are removed at the end but are nobody's fault: torch's cache, vLLM's sockets, W&B's folders."""
_TRIAL = re.compile(r"[a-z0-9_]{8}")
"""A file that `tempfile` writes and removes when it is first asked for a folder."""
_SHARED_MEMORY = re.compile(rb"/dev/shm/(?!standin_gpu-|libpod_)(\S+)")
"""Shared memory of the tests alone.

tools/standin_gpu/run.py, which has started pytest, removes the memory of an imitated GPU. `libpod_lock` belongs to the
machine: the first podman makes it, all podmans map it, and it stays until the next start of the machine.
"""


class Process(NamedTuple):
    """A living process."""

    pid: int
    command: str


def marked_processes(mark: str) -> list[Process]:
    """All living processes of the run of that mark."""
    wanted = f"{mark},".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            entries = (folder / "environ").read_bytes().split(b"\0")
            if not any(entry.startswith(MARK.encode()) and wanted in entry for entry in entries):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            found.append(Process(int(folder.name), command))
    return sorted(found)


class Watch:
    """Knows what the run of that mark has started, from a process of its own that outlives pytest."""

    def __init__(self) -> None:
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        self.folder = Path(tempfile.mkdtemp(prefix="megarl-"))
        command = [sys.executable, "-S", __file__, str(os.getpid()), self.mark, str(self.folder)]
        pipe = subprocess.PIPE
        # Without a mark, its own or of a run that started this one, and in a session of its own: what ends pytest does
        # not reach it.
        unmarked = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(command, env=unmarked, stdin=pipe, stdout=pipe, start_new_session=True)
        os.environ[MARK] = f"{os.environ.get(MARK, '')}{self.mark},"

    def leftovers(self, seconds: float) -> list[str]:
        """Return what the run has left, one line each. Waits up to `seconds` for processes that are about to end."""
        ending = time.monotonic() + seconds
        while True:
            left = self._ask()
            if not any(line.startswith("process") for line in left) or time.monotonic() > ending:
                return left
            time.sleep(0.1)

    def leftovers_at_end(self, seconds: float, remove_abandoned: Callable[[], None]) -> list[str]:
        """Return what the run has left at its end. `remove_abandoned` deletes the private folders of ended processes.

        Waits up to `seconds` for processes that are about to end. Those forked by a server of several runs have no mark
        of this run, so they are known only by the folders that they hold.
        """
        ending = time.monotonic() + seconds
        while True:
            left = self.leftovers(max(0.0, ending - time.monotonic()))
            remove_abandoned()
            left = [line for line in left if line.startswith("process") or Path(line).exists()]
            if not left or time.monotonic() > ending:
                return left
            time.sleep(0.1)

    def _ask(self) -> list[str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"?\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def mapped_memory(processes: list[Process]) -> set[str]:
    """Names of the shared memory that the processes map."""
    names: set[str] = set()
    for process in processes:
        with suppress(OSError):
            names |= memory_names(Path(f"/proc/{process.pid}/maps").read_bytes())
    return names


def memory_names(maps: bytes) -> set[str]:
    """Names of the shared memory in what `/proc/PID/maps` holds."""
    return {name.decode() for name in _SHARED_MEMORY.findall(maps)}


def _left(mark: str, folder: Path, memory: set[str]) -> list[str]:
    """Return what a run has on this machine, one line each."""
    processes = [f"process {pid}: {command[:200]}" for pid, command in marked_processes(mark)]
    made = (path for path in sorted(folder.glob("*")) if not (path.name == WITHOUT_SLURM or _is_of_libraries(path)))
    files = [str(path) for path in (*made, *(Path("/dev/shm") / n for n in sorted(memory)))]
    return processes + [path for path in files if Path(path).exists()]


def _is_of_libraries(path: Path) -> bool:
    return _OF_LIBRARIES.fullmatch(path.name) is not None or _is_trial(path)


def _is_trial(path: Path) -> bool:
    """Whether Python tried with this file if it can write to the folder; a process that is killed then leaves it."""
    with suppress(OSError):
        return _TRIAL.fullmatch(path.name) is not None and path.read_bytes() in (b"", b"blat")
    return False


def _remove(mark: str, folder: Path, memory: set[str]) -> None:
    """End the processes of a run, then remove its files."""
    ending = time.monotonic() + _ENDING_SECONDS
    while (processes := marked_processes(mark)) and time.monotonic() < ending:
        memory |= mapped_memory(processes)
        for process in processes:
            with suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.1)
    for name in memory:
        (Path("/dev/shm") / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def main(pid: str, mark: str, name: str) -> None:
    """Watch until the process of that id has ended."""
    folder = Path(name)
    memory: set[str] = set()
    try:
        pytest_itself = os.pidfd_open(int(pid))
    except ProcessLookupError:
        return _remove(mark, folder, memory)
    poll = select.poll()
    poll.register(pytest_itself, select.POLLIN)
    poll.register(sys.stdin, select.POLLIN)
    while True:
        ready: dict[int, Any] = dict(poll.poll(_POLL_SECONDS * 1000))
        if pytest_itself in ready:
            return _remove(mark, folder, memory)
        memory |= mapped_memory(marked_processes(mark))
        if sys.stdin.fileno() in ready:
            if sys.stdin.readline():
                print(json.dumps(_left(mark, folder, memory)), flush=True)
            else:
                poll.unregister(sys.stdin)


if __name__ == "__main__":
    main(*sys.argv[1:])
