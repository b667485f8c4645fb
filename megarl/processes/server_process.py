"""A supervised process answering requests, one after the other, within time limits."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol

from megarl.processes.frames import FrameError, UnsendableError, receive, receive_answer, send, time_limit
from megarl.processes.launcher import python_call
from megarl.processes.process_tree import cpu_seconds_below
from megarl.processes.supervised_process import Ended, SupervisedProcess
from megarl.types import ConfigError, PeerLostError

_SHORT_SECONDS = 0.05
"""Seconds within which an answer's CPU time is not measured, because measuring takes time itself."""
_LONGEST_WAIT_SECONDS = 3600.0
"""Longest wait, in seconds, between two checks of a request without limits. Sockets do not accept infinity."""
_MAX_OUTPUT_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Program and limits of a server process."""

    server: str | tuple[str, ...]
    """Function `package.module:name` that starts the process; or a program calling `answer_requests`."""
    name: str
    """Name of the code that the process runs, for error messages."""
    field: str
    """Recipe field to name in an error message if the process does not start."""
    start: Mapping[str, Any]
    """First message to the process."""
    search_path: tuple[str, ...]
    """Import paths (`sys.path`) of the process. A program does not get them."""
    folder: str
    _: KW_ONLY
    memory_bytes: int | None
    """Limit of the address space in bytes: for a function in addition to its imports, for a program in total."""
    start_seconds: float = 300.0
    """Maximum wall-clock seconds until the process is ready."""
    max_answer_bytes: int = 16 << 20
    end_seconds: float = 0.0
    """Seconds for the process to end by itself after the end of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Time limits of a request. None: no limit."""

    cpu_seconds: float | None = None
    """Maximum CPU seconds of the process and its descendants."""
    wall_seconds: float | None = None


NO_LIMITS = RequestLimits()


class Server(Protocol):
    """A process answering requests, on this node or another one."""

    def wait_until_ready(self) -> dict[str, Any]: ...

    def request(self, message: Mapping[str, Any], limits: RequestLimits = ...) -> dict[str, Any]: ...

    def close(self) -> None: ...


MakeServer = Callable[[ServerSettings, str | None], Server]
"""Function that starts a process. Its second argument is the path of the log for the process's output."""


class ServerProcess:
    """A process on this machine answering requests. One thread at a time may call it; any thread may close it."""

    def __init__(self, settings: ServerSettings, log_file: str | None = None) -> None:
        """Start the process without waiting for it. Raises PeerLostError if the machine cannot start it."""
        self._settings = settings
        self._log_file = log_file
        self._num_requests = 0
        self._lock = threading.Lock()
        self._ended: Ended | None = None
        self._introduction: dict[str, Any] | None = None
        command = settings.server
        if isinstance(command, str):
            command = python_call("megarl.processes.child:run", command, path=settings.search_path)
        try:
            self._process = SupervisedProcess(
                command,
                folder=settings.folder,
                log_file=log_file,
                has_connection=True,
                end_seconds=settings.end_seconds,
            )
        except OSError as error:
            raise PeerLostError(f"a process for {settings.name} cannot be started: {error}") from None
        with suppress(OSError):  # If it ended already, waiting for its answer fails.
            send(self._process.connection, {**settings.start, "memory_bytes": settings.memory_bytes})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def connection(self) -> socket.socket:
        """This process's end of the socket. Once the child is ready, callers may use a message format of their own."""
        return self._process.connection

    def wait_until_ready(self) -> dict[str, Any]:
        """Wait until the process is ready, and return what it reports about itself.

        Raises ConfigError if the process refuses or takes too long, PeerLostError if it ends or is closed.
        """
        if self._introduction is not None:
            return self._introduction
        settings = self._settings
        try:
            message = receive(self._process.connection, settings.max_answer_bytes, time_limit(settings.start_seconds))
        except TimeoutError:
            self.close()
            raise ConfigError(
                f"{settings.field}: importing {settings.name} took more than {settings.start_seconds:g} s"
            ) from None
        except FrameError as error:
            self.close()
            raise PeerLostError(f"the process of {settings.name} sent {error} while it started") from None
        except (EOFError, OSError):
            # The process ended. Its last output usually has the cause.
            ended = self.end()
            output = self._read_end_of_log() or ended.stderr_tail()
            output_text = f"; it printed:\n{output}" if output else ""
            raise PeerLostError(f"the process of {settings.name} {ended} while it started{output_text}") from None
        # The process answered, but its `start` function refused the settings.
        if message.get("ready") is not True:
            self.close()
            raise ConfigError(str(message.get("refused")))
        self._introduction = message
        return message

    def request(self, message: Mapping[str, Any], limits: RequestLimits = NO_LIMITS) -> dict[str, Any]:
        """Send a request. Return the answer, or a dictionary with one of these keys and a text if there is none:

        invalid: the message is not JSON
        overdue: a limit was exceeded, `cpu` or `wall`
        ended: the process ended; `output` is its last output
        violation: the process broke the protocol
        lost: the process's node is lost

        The last three texts are verb phrases about the process. After any key except `invalid` a new process is needed.
        """
        self._num_requests += 1
        clock = _Clock(self._process.pid, limits)
        connection = self._process.connection
        try:
            send(connection, {"id": self._num_requests, **message}, clock.seconds_until_check)
            answer = receive_answer(
                connection, self._num_requests, self._settings.max_answer_bytes, clock.seconds_until_check
            )
            # Between the last check and the answer, the CPU time may have exceeded the limit.
            clock.check_cpu()
        except _OverdueError as error:
            self.close()
            return {"overdue": str(error)}
        except UnsendableError as error:
            return {"invalid": str(error)}
        except FrameError as error:
            self.close()
            return {"violation": f"sent {error}"}
        except (EOFError, OSError):
            ended = self.end()
            return {"ended": str(ended), "output": ended.stderr_tail()}
        return answer

    def close(self) -> None:
        with self._lock:
            self._ended = self._ended or self._process.kill()

    def end(self) -> Ended:
        """Wait for the end of a process that closed its connection. Return how it ended."""
        with self._lock:
            self._ended = self._ended or self._process.end()
            return self._ended

    def _read_end_of_log(self) -> str:
        if self._log_file is None:
            return ""
        try:
            return Path(self._log_file).read_text(encoding="utf-8", errors="replace").strip()[-_MAX_OUTPUT_CHARACTERS:]
        except OSError:
            return ""


class _OverdueError(Exception):
    """Raised if a request exceeds a time limit. The text is the kind of limit, `cpu` or `wall`."""


class _Clock:
    """Time spent on a request: wall-clock seconds, and CPU seconds of all descendants of the supervisor."""

    def __init__(self, supervisor: int, limits: RequestLimits) -> None:
        self._supervisor = supervisor
        self._cpu_limit = math.inf if limits.cpu_seconds is None else limits.cpu_seconds
        self._wall_limit = math.inf if limits.wall_seconds is None else limits.wall_seconds
        self._started = time.monotonic()
        self._cpu_before: float | None = None
        self._cpu_used = 0.0

    def seconds_until_check(self) -> float:
        """Return the seconds until the next check of the limits. Raises _OverdueError if a limit is exceeded."""
        elapsed_seconds = time.monotonic() - self._started
        if elapsed_seconds >= self._wall_limit:
            raise _OverdueError("wall")
        wall_seconds_left = min(self._wall_limit - elapsed_seconds, _LONGEST_WAIT_SECONDS)
        if self._cpu_limit == math.inf:
            return wall_seconds_left
        # Most answers are quick. Do not measure CPU time before a short wall-clock time has passed.
        if elapsed_seconds < min(_SHORT_SECONDS, self._cpu_limit):
            return min(_SHORT_SECONDS, self._cpu_limit, wall_seconds_left)
        if self._cpu_before is None:
            self._cpu_before = cpu_seconds_below(self._supervisor)
        self.check_cpu()
        # At least 10 ms between checks: reading CPU times in /proc takes time, too.
        return min(max(self._cpu_limit - self._cpu_used, 0.01), wall_seconds_left)

    def check_cpu(self) -> None:
        """Raise _OverdueError if the CPU limit is exceeded. The CPU time of quick answers is not measured."""
        if self._cpu_before is None:
            return
        # The time of descendants that ended may disappear from /proc, so never let it decrease.
        self._cpu_used = max(self._cpu_used, cpu_seconds_below(self._supervisor) - self._cpu_before)
        if self._cpu_used >= self._cpu_limit:
            raise _OverdueError("cpu")
