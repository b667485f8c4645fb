"""The driver's side of an environment library's child process: start, requests and end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from megarl.platform.commands import run_command
from megarl.processes.frames import (
    HEADER_BYTES,
    FrameError,
    UnsendableError,
    answered_request,
    decode_message,
    encode_message,
    payload_size,
)
from megarl.processes.server_process import ServerProcess, ServerSettings
from megarl.types import ConfigError, PeerLostError

_SCRIPT = Path(__file__).with_name("child.py")
# The first import of a library can take minutes on a shared file system.
_START_SECONDS = 300.0
_GIB = 1 << 30


class ChildError(Exception):
    """Raised if a child process cannot be started, died or gave an invalid answer."""


class ForeignError(Exception):
    """Raised for an exception of the library in its child process."""


def make_child_settings(
    library: str,
    settings: Mapping[str, Any],
    *,
    python: str,
    memory_gib: float | None = None,
    end_seconds: float = 0.0,
) -> ServerSettings:
    """Return the settings of a child process: `child.py` with the adapter of `library`, run by `python`.

    The adapter gets `settings`. `memory_gib` limits the address space; None: no limit. Forks get `end_seconds` to stop
    what they have started, also after the end of this process.
    """
    return ServerSettings(
        (python, str(_SCRIPT), library),
        library,
        "rollout.environment",
        {**settings, "end_seconds": end_seconds},
        (),
        os.getcwd(),
        memory_bytes=int(memory_gib * _GIB) if memory_gib else None,
        start_seconds=_START_SECONDS,
        end_seconds=end_seconds,
    )


@lru_cache(maxsize=64)
def check_installed(python: str, module: str, package: str) -> None:
    """Raise ConfigError if the interpreter `python` lacks `module`. Nothing is imported."""
    command = [python, "-c", f"import importlib.util as u; raise SystemExit(u.find_spec({module!r}) is None)"]
    try:
        is_installed = run_command(command, seconds=_START_SECONDS).returncode == 0
    except OSError as error:
        raise ConfigError(
            f"python = {python!r}: cannot be run ({error}); give the interpreter of an environment"
        ) from None
    if not is_installed:
        interpreter_text = "this environment" if python == sys.executable else python
        raise ConfigError(
            f"the package {package} is missing in {interpreter_text}; install it there (`uv pip install --python "
            f"{python} {package}`), or name the interpreter that has it in rollout.environment_kwargs.python"
        )


class LibraryChild:
    """Child process of a library, started at its first use, and again if it ended."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._lock = asyncio.Lock()
        self._process: LibraryProcess | None = None
        self._start_task: asyncio.Task[LibraryProcess] | None = None
        self._is_closed = False

    async def get_process(self) -> LibraryProcess:
        """Return the running process, started if needed. Raises ChildError if the start fails, and after `close`."""
        async with self._lock:
            if self._is_closed:
                raise ChildError("the process of an environment library was called after its end")
            if self._process is None or self._process.has_ended:
                self._start_task = asyncio.create_task(self._start())
                try:
                    self._process = await self._start_task
                finally:
                    # If the caller is cancelled, its start must end too.
                    self._start_task.cancel()
            return self._process

    async def _start(self) -> LibraryProcess:
        """Start a process, and try once more if it is lost. Raises ChildError."""
        try:
            try:
                return await LibraryProcess.start(self._settings)
            except PeerLostError:
                # A process may be killed from outside, for example for lack of memory.
                return await LibraryProcess.start(self._settings)
        except (ConfigError, PeerLostError) as error:
            raise ChildError(str(error)) from None

    async def close(self) -> None:
        """Kill the process, even during its start, and wait for its end."""
        self._is_closed = True
        if self._start_task is not None:
            self._start_task.cancel()
            await asyncio.wait([self._start_task])
        if self._process is not None:
            await self._process.close()


class LibraryProcess:
    """A running child process. Several requests may be in flight."""

    def __init__(
        self,
        server: ServerProcess,
        introduction: Mapping[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_answer_bytes: int,
        end_seconds: float,
    ) -> None:
        self.introduction = introduction
        """The adapter's description of the library."""
        self.has_ended = False
        """Whether the process ended or was killed. It then takes no requests."""
        self._is_closing = False
        self._server = server
        self._writer = writer
        self._max_answer_bytes = max_answer_bytes
        self._end_seconds = end_seconds
        self._num_requests = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        """Awaited answers by request number."""
        self._reading_task = asyncio.create_task(self._read_answers(reader))

    @classmethod
    async def start(cls, settings: ServerSettings) -> LibraryProcess:
        """Start a process and wait until it has loaded the library.

        Raises ConfigError if the library cannot be loaded, and PeerLostError if the process ends meanwhile.
        """
        server = ServerProcess(settings)
        try:
            introduction = await asyncio.to_thread(server.wait_until_ready)
            # A copy: asyncio closes the socket that it reads.
            reader, writer = await asyncio.open_connection(sock=server.connection.dup())
        except BaseException:
            # In a thread: a cancelled start must not block the event loop.
            asyncio.get_running_loop().run_in_executor(None, server.close)
            raise
        max_answer_bytes, end_seconds = settings.max_answer_bytes, settings.end_seconds
        return cls(server, introduction, reader, writer, max_answer_bytes=max_answer_bytes, end_seconds=end_seconds)

    async def request(self, message: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Send a request and return the value in its answer. Waits at most `seconds`; None: no limit.

        Raises ForeignError for an error of the library, ChildError for an ended process or an invalid answer, and
        TimeoutError. An overdue or cancelled request ends its fork, or the process if it has no forks.
        """
        self._num_requests += 1
        request_id = self._num_requests
        answer = self._answers[request_id] = asyncio.get_running_loop().create_future()
        try:
            self._send_message({"id": request_id, **message})
            async with asyncio.timeout(seconds):
                return _read_value(await answer)
        except TimeoutError:
            raise TimeoutError(f"the environment did not answer within {seconds or 0:g} s") from None
        except FrameError as error:
            self.kill()
            raise ChildError(f"the answer of the environment's child process is not valid: it sent {error}") from None
        finally:
            del self._answers[request_id]
            if answer.cancelled():
                self._cancel_request(request_id)

    def kill(self) -> None:
        self.has_ended = True
        asyncio.get_running_loop().run_in_executor(None, self._server.close)

    async def close(self) -> None:
        """End the process and its descendants, and wait. Forks get `end_seconds` to stop what they have started."""
        if self._end_seconds and not self.has_ended:
            self._is_closing = True
            self._writer.write_eof()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._end_seconds):
                    await asyncio.shield(self._reading_task)
        self.has_ended = True
        await asyncio.to_thread(self._server.close)
        await self._reading_task

    def _send_message(self, message: Mapping[str, Any]) -> None:
        """Send a message to the process. Raises ChildError if it has ended."""
        if self._reading_task.done() or self._is_closing:
            raise ChildError("the child process of the environment ended")
        try:
            self._writer.write(encode_message(dict(message)))
        except UnsendableError as error:
            raise ChildError(f"the request to the environment's child process is not JSON: {error}") from None

    def _cancel_request(self, request_id: int) -> None:
        """End the fork of the request, or the whole process if it has no forks."""
        if self.introduction.get("is_forked") is not True:
            self.kill()
        # A closing process ends all forks itself.
        elif not self.has_ended and not self._is_closing:
            self._writer.write(encode_message({"cancel": request_id}))

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        """Pass answers to the waiting requests. When the process ends, fail those still waiting."""
        try:
            while True:
                message = await _receive(reader, self._max_answer_bytes)
                answer = self._answers.get(answered_request(message, self._num_requests))
                # A cancelled request may still get an answer.
                if answer is not None and not answer.done():
                    answer.set_result(message)
        except FrameError as error:
            self.kill()
            reason = f"the answer of the environment's child process is not valid: it sent {error}"
        except (EOFError, OSError):
            self.has_ended = True
            server_end = await asyncio.to_thread(self._server.end)
            reason = f"the child process of the environment {server_end}: {server_end.stderr_tail()}"
        finally:
            self._writer.transport.abort()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ChildError(reason))


async def _receive(reader: asyncio.StreamReader, max_bytes: int) -> dict[str, Any]:
    # IncompleteReadError is an EOFError.
    size = payload_size(await reader.readexactly(HEADER_BYTES), max_bytes)
    return decode_message(await reader.readexactly(size))


def _read_value(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value in an answer. Raises ForeignError for an error of the library, FrameError without a value."""
    if "error" in answer:
        raise ForeignError(str(answer["error"]))
    value = answer.get("value")
    if not isinstance(value, dict):
        raise FrameError(f"a message without a value: {answer!r:.200}")
    return value
