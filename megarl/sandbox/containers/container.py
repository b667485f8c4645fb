"""A container as seen by the process that starts it: start, programs, files, lease and end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from megarl.files.shipped import PACKAGE
from megarl.processes.frames import (
    HEADER_BYTES,
    FrameError,
    decode_message,
    encode_message,
    payload_size,
    receive,
    time_limit,
)
from megarl.processes.launcher import LaunchedProgram
from megarl.processes.process_tree import kill_by_descriptor
from megarl.processes.supervised_process import SupervisedProcess
from megarl.sandbox.containers.outliving import connect_to_container, launch_outliving, remove_socket
from megarl.sandbox.containers.requests import MAX_MESSAGE_BYTES, Limits

# Time for six renewals (`serving.agent.containers._RENEW_SECONDS`), so a few late ones do no harm.
LEASE_SECONDS = 60.0
"""Seconds after a lease's last renewal until the container ends."""
COMMAND_LINES = ("podman", "docker")
"""Kinds of containers that command-line programs control."""
_USER_SETTINGS = (
    "HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "TMPDIR", "CONTAINERS_CONF",
    "CONTAINERS_STORAGE_CONF", "CONTAINER_HOST", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG",
    "APPTAINER_CONFIGDIR", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR",
)  # fmt: skip
"""Environment variables through which podman, docker and apptainer find their settings, images and daemon."""
# The keeper may take this long to remove a container (`command_lines.SHORT_SECONDS`).
_REMOVAL_SECONDS = 60.0
# Longer than a start of podman or docker (`command_lines._START_SECONDS`), so the keeper itself reports a late one.
_TRIAL_SECONDS = 330.0
"""Seconds to wait for a keeper's first message."""
# The interpreter starts without site packages, so the script adds the folder of megarl to its path.
_KEEPER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from megarl.sandbox.containers.keeper import main
main()
"""


class ContainerError(Exception):
    """Raised if a container does not start, is lost, or rejects a request. The text is `KIND: reason`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """Settings of a container. `name` combines the run, the attempt and the try."""

    kind: str
    name: str
    address: tuple[str, int]
    """Address of the policy's endpoint, as seen from this node."""
    image: str | None = None
    folders: tuple[str, ...] = ()
    network: str = "endpoint"
    limits: Limits = field(default_factory=Limits)
    lease_seconds: float = LEASE_SECONDS
    outlives_host: bool = False
    """Whether the container outlives its host process until its lease ends. A later host can `adopt` it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """How a program in a container ended. `outcome` is the exceeded limit, as `KIND: text`; empty: none."""

    exit_code: int | None
    stdout: str
    stderr: str
    outcome: str
    refused: str
    """Why the program could not be started; empty: it was started."""


class Container:
    """One container of this node. Call `start` or `adopt` first, and `stop` at the end."""

    def __init__(self, settings: ContainerSettings) -> None:
        self.settings = settings
        self.url = ""
        """Base URL of the policy's endpoint for the container's programs."""
        self.seconds_to_start = 0.0
        self.running_label = ""
        """Label of the program that was running when the container was adopted; empty: none."""
        self.seconds_running = 0.0
        """Seconds since the start of the program in `running_label`; 0: there is none."""
        self._launched_supervisor: LaunchedProgram | None = None
        self._supervisor_pidfd: int | None = None
        """Pidfd of the process that ends last, for a container that outlives its host."""
        self._request_ids = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._process: SupervisedProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the container's keeper process, and wait until the container runs. Raises ContainerError."""
        start_time = time.monotonic()
        try:
            if self.settings.outlives_host:
                self._launched_supervisor, connection = launch_outliving(
                    self.settings.name, *_keeper_command(self.settings)
                )
                # Set before the keeper answers, so that `stop` can limit its wait.
                self._supervisor_pidfd = os.pidfd_open(self._launched_supervisor.pid)
            else:
                self._process = start_keeper(self.settings)
                # A duplicate: stopping the process closes its own descriptor.
                connection = self._process.connection.dup()
        except OSError as error:
            raise ContainerError(f"OSError: {error.strerror or error}") from error
        try:
            await self._read_greeting(connection)
        except (EOFError, OSError, FrameError) as error:
            keeper_end = None if self._process is None else await self._process.stop()
            reason = "its keeper ended" if keeper_end is None else keeper_end.stderr_tail() or keeper_end
            raise ContainerError(f"ContainerError: the container does not start: {reason}") from error
        self.seconds_to_start = time.monotonic() - start_time

    async def adopt(self) -> None:
        """Take over a container of an earlier host. Raises ContainerError if it has ended."""
        try:
            await self._read_greeting(connect_to_container(self.settings.name))
            self.renew()
        except (EOFError, OSError, FrameError) as error:
            raise ContainerError("ContainerLost: the container has ended") from error

    async def _read_greeting(self, connection: socket.socket) -> None:
        """Read the keeper's first message: the container's facts, or the reason why it does not start."""
        reader, self._writer = await asyncio.open_connection(sock=connection)
        greeting = await _read_frame(reader)
        if "refused" in greeting:
            if self._process is not None:
                await self._process.stop()
            raise ContainerError(f"ContainerError: the container does not start: {greeting['refused']}")
        self.url, self.running_label, self.seconds_running = greeting["url"], greeting["running"], greeting["seconds"]
        if self.settings.outlives_host and self._supervisor_pidfd is None:
            self._supervisor_pidfd = os.pidfd_open(greeting["supervisor"])
        self._reading_task = asyncio.create_task(self._pass_on_answers(reader))

    async def execute(
        self,
        command: list[str],
        environment: Mapping[str, str],
        *,
        stdin: str = "",
        folder: str | None = None,
        label: str = "",
    ) -> Executed:
        """Run a program to its end, then kill all others in the container. Raises ContainerError.

        `stdin` is in base64. A later host can `join` the program by its `label`. Cancelling the call kills all
        programs.
        """
        return await self._await_end(
            "exec", command=command, environment=dict(environment), stdin=stdin, folder=folder, label=label
        )

    async def join(self, label: str) -> Executed:
        """Wait for a program started by an earlier host; any other program is killed. Raises ContainerError if it is
        absent.
        """
        return await self._await_end("join", label=label)

    async def _await_end(self, do: str, **fields: Any) -> Executed:
        """Request a program's run or `join`, and return its end. A cancelled call ends the program."""
        try:
            answer = await self._request(do, **fields)
        except asyncio.CancelledError:
            # No number is needed: a container runs one program at a time.
            self._send({"do": "cancel"})
            raise
        return Executed(**answer)

    async def put(self, folder: str, files: Mapping[str, tuple[int, str]]) -> None:
        """Replace a folder by `files`: relative path to (mode, content in base64). Raises ContainerError."""
        await self._request("put", folder=folder, files=dict(files))

    async def get(self, path: str, max_bytes: int) -> str:
        """Return a file's content, in base64. Raises ContainerError if it is missing or longer than `max_bytes`."""
        return (await self._request("get", path=path, max_bytes=max_bytes))["content"]

    def renew(self) -> None:
        self._send({"do": "renew"})

    async def disconnect(self) -> None:
        """Close the connection. A container that outlives its host continues; any other is stopped."""
        if not self.settings.outlives_host:
            await self.stop()
            return
        if self._writer is not None:
            self._writer.close()
        if self._reading_task is not None:
            await self._reading_task
        if self._supervisor_pidfd is not None:
            os.close(self._supervisor_pidfd)
            self._supervisor_pidfd = None

    async def stop(self) -> None:
        """End the container, and wait for its end."""
        if self.settings.outlives_host:
            await self._stop_keeper()
        if self._process is not None:
            if self._writer is not None and self.settings.kind in COMMAND_LINES:
                # At the end of the connection the keeper removes the container. A killed keeper would leave this to a
                # daemon.
                self._writer.write_eof()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_REMOVAL_SECONDS):
                        await self._process.wait_for_end()
            await self._process.stop()
        if self._writer is not None:
            self._writer.close()
        if self._reading_task is not None:
            await self._reading_task

    async def _stop_keeper(self) -> None:
        """Ask the keeper, which outlives this process, to end. Kill its supervisor if it does not end in time."""
        if self._writer is not None:
            self._send({"do": "stop"})
            self._writer.write_eof()
        elif self._launched_supervisor is not None:
            # The start was cancelled before the keeper could be asked to end.
            self._launched_supervisor.kill()
        if self._supervisor_pidfd is not None:
            if not await _is_readable(self._supervisor_pidfd, _REMOVAL_SECONDS):
                kill_by_descriptor(self._supervisor_pidfd)
            os.close(self._supervisor_pidfd)
            self._supervisor_pidfd = None
        if self._launched_supervisor is not None:
            await self._launched_supervisor.wait_for_end()
        remove_socket(self.settings.name)

    async def _request(self, do: str, **fields: Any) -> dict[str, Any]:
        """Send a request to the keeper and return its answer. Raises ContainerError."""
        assert self._reading_task is not None, "requests come after the start"
        # Without the reading task, a new request would never be answered.
        if self._reading_task.done():
            raise ContainerError("ContainerLost: the container has ended")
        request_id = next(self._request_ids)
        future = self._answers[request_id] = asyncio.get_running_loop().create_future()
        try:
            self._send({"do": do, "id": request_id, **fields})
            answer = await future
        finally:
            self._answers.pop(request_id, None)
        del answer["id"]
        if "error" in answer:
            raise ContainerError(f"{answer.get('kind', 'OSError')}: {answer['error']}")
        return answer

    def _send(self, message: dict[str, Any]) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(encode_message(message))

    async def _pass_on_answers(self, reader: asyncio.StreamReader) -> None:
        """Pass answers to their requests. At the end of the connection, fail the unanswered ones."""
        try:
            while True:
                answer = await _read_frame(reader)
                # A cancelled request has no reader for its answer.
                if (future := self._answers.get(answer.get("id", 0))) is not None and not future.done():
                    future.set_result(answer)
        except (EOFError, OSError, FrameError):
            pass
        for future in self._answers.values():
            if not future.done():
                future.set_exception(ContainerError("ContainerLost: the container ended before its program"))


async def _read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    size = payload_size(await reader.readexactly(HEADER_BYTES), MAX_MESSAGE_BYTES)
    return decode_message(await reader.readexactly(size))


def start_keeper(settings: ContainerSettings) -> SupervisedProcess:
    """Start a container's keeper process. Its first message says whether the container runs."""
    command, environment = _keeper_command(settings)
    return SupervisedProcess(command, environment=environment, has_connection=True)


def _keeper_command(settings: ContainerSettings) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of a container's keeper. The caller appends the connection's descriptor."""
    # -P -S -s -B: no paths of this folder or user, no site packages, no bytecode files.
    command = [sys.executable, "-P", "-S", "-s", "-B", "-c", _KEEPER, str(PACKAGE.parent)]
    values = json.dumps({**asdict(settings), "python": [sys.base_prefix, sys.prefix]})
    # A rootless podman finds its images through HOME, and its running containers through XDG_RUNTIME_DIR.
    names = _USER_SETTINGS if settings.kind in (*COMMAND_LINES, "apptainer") else ()
    user_settings = {name: os.environ[name] for name in names if name in os.environ}
    return [*command, values], {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", **user_settings}


async def _is_readable(descriptor: int, seconds: float) -> bool:
    loop, is_ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, is_ready.set)
    try:
        async with asyncio.timeout(seconds):
            await is_ready.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
    return True


def find_start_fault(settings: ContainerSettings) -> str | None:
    """Start a container on trial, and remove it at once. Returns the reason if it did not start; None: it started."""
    keeper = start_keeper(settings)
    try:
        return receive(keeper.connection, MAX_MESSAGE_BYTES, time_limit(_TRIAL_SECONDS)).get("refused")
    except (EOFError, OSError, FrameError) as error:
        return keeper.end().stderr_tail() or str(error)
    finally:
        if settings.kind in COMMAND_LINES:
            # Let the keeper remove the container, as in `stop`. If the keeper is killed first, the container stays.
            with suppress(EOFError, OSError, FrameError):
                keeper.connection.shutdown(socket.SHUT_WR)
                receive(keeper.connection, MAX_MESSAGE_BYTES, time_limit(_REMOVAL_SECONDS))
        keeper.kill()
