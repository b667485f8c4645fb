"""A worker group of processes on this machine: the driver's end.

Each rank is a fresh interpreter in a session of its own that runs `python -m megarl.workers.rank`. It connects back
over an abstract Unix socket and proves with a challenge that it holds the key it read from its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from megarl import types
from megarl.workers import rank as rank_end
from megarl.workers.group import RankFailedError

_HANDSHAKE_SECONDS = 5
_REPORT_GRACE_SECONDS = 1.0
_LEAVE_SECONDS = 10.0
_KILL_SECONDS = 10.0
_LOG_TAIL_LINES = 60


class _RankError(Exception):
    """One rank's report; `echo` if it only tells that another rank broke a collective."""

    def __init__(self, seat: _Seat, at: float, *, echo: bool = False, report: Mapping[str, Any] | None = None) -> None:
        self.seat, self.at, self.echo, self.report = seat, at, echo, report


class _Seat:
    """The driver's end of one rank: its process, its socket, its log."""

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path | None) -> None:
        self.rank, self.log, self.log_start = rank, log, 0
        self.socket: socket.socket | None = None
        with contextlib.ExitStack() as stack:
            output = None
            if log is not None:
                output = stack.enter_context(log.open("ab"))
                self.log_start = output.tell()
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
            )
        loop = asyncio.get_running_loop()
        self.died: asyncio.Future[float] = loop.create_future()
        self._pidfd = os.pidfd_open(self.process.pid)
        loop.add_reader(self._pidfd, self._notice_death)

    def give_key(self, key: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(key)

    def _notice_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.died.set_result(time.time())
        if self.socket is not None:  # a child of the rank may hold the other end open: no end of file would come
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    async def ask(self, pieces: Sequence[rank_end.Buffer]) -> Any:
        """Send one command and return what the rank answers.

        Raises `_RankError` if the method raised or the process is gone.
        """
        assert self.socket is not None
        try:
            await _send(self.socket, pieces)
            answered, content = rank_end.unpack(*await _receive(self.socket))
        except (OSError, EOFError):
            await asyncio.wait([self.died], timeout=_REPORT_GRACE_SECONDS)
            raise _RankError(self, self.died.result() if self.died.done() else time.time()) from None
        if not answered:
            raise _RankError(self, content["time"], echo=content["echo"], report=content)
        return content

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal the rank and its children. The process is not reaped before, so the group id is still its own."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def release(self) -> None:
        """Reap the process and close the socket."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.process.poll()
        os.close(self._pidfd)
        if self.socket is not None:
            self.socket.close()

    def fate(self) -> str:
        code = self.process.returncode
        if code is None:
            return "lost its connection"
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    def log_tail(self) -> str:
        if self.log is None:
            return ""
        with self.log.open("rb") as file:
            file.seek(max(self.log_start, file.seek(0, os.SEEK_END) - 16384))
            lines = file.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join([f"The end of {self.log}:", *lines]) if lines else f"{self.log} is empty."


class ProcessGroup:
    """The `WorkerGroup` of `world_size` processes on this machine. Make one with `start`.

    `answer_timeout_seconds` is how long a call may wait for its slowest rank; None waits for ever.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.answer_timeout_seconds: float | None = None
        self._seats: list[_Seat] = []
        self._port: socket.socket | None = None
        self._turn = asyncio.Lock()
        self._over: Exception | None = None

    @classmethod
    async def start(
        cls,
        worker: str,
        kwargs: Mapping[str, Any],
        *,
        world_size: int,
        log_folder: Path | None = None,
        start_timeout_seconds: float = 300.0,
        environment: Mapping[str, str] | None = None,
    ) -> ProcessGroup:
        """Start the ranks and construct `Class(rank=..., world_size=..., **kwargs)` in each.

        `worker` is "package.module:Class". `environment` is added to the driver's own; `RANK`, `WORLD_SIZE`,
        `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` to that. Output goes to
        `log_folder/rank_NNNN.log`, or to the driver's own. The ranks die with the thread that called this.
        Errors are those of `WorkerGroup`; that of the time-out names the ranks that did not connect.
        """
        group = cls(world_size)
        try:
            await group._seat(log_folder, environment or {}, start_timeout_seconds)
            await group.call("__init__", list(sys.path), worker, dict(kwargs))
        except BaseException:
            await group._end()
            raise
        return group

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return await self._exchange(method, [rank_end.pack((method, args, kwargs))] * self.world_size)

    async def scatter(self, method: str, per_rank: Sequence[Any], *args: Any) -> list[Any]:
        if len(per_rank) != self.world_size:
            raise ValueError(
                f"scatter of {method} needs {self.world_size} arguments, one per rank: got {len(per_rank)}"
            )
        return await self._exchange(method, [rank_end.pack((method, (first, *args), {})) for first in per_rank])

    async def close(self) -> None:
        """End of file tells the ranks to leave; one that has not left after a few seconds, or is busy, is killed."""
        if self._over is None:
            self._over = types.PeerLostError("the worker group is closed")
            if not self._turn.locked():
                for seat in self._seats:
                    if seat.socket is not None:
                        with contextlib.suppress(OSError):
                            seat.socket.shutdown(socket.SHUT_WR)
                await asyncio.wait([seat.died for seat in self._seats], timeout=_LEAVE_SECONDS)
        await self._end()

    async def _seat(self, log_folder: Path | None, environment: Mapping[str, str], timeout_seconds: float) -> None:
        """Start the processes and wait until each has connected."""
        key, name = secrets.token_bytes(32), f"megarl-{secrets.token_hex(8)}"
        self._port = _reserve_port()
        if log_folder is not None:
            log_folder.mkdir(parents=True, exist_ok=True)
        shared = {
            **{"PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ, **environment},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port.getsockname()[1])},
            **{"WORLD_SIZE": str(self.world_size), "LOCAL_WORLD_SIZE": str(self.world_size)},
        }
        command = [sys.executable, "-P", "-m", "megarl.workers.rank", name, str(os.getpid())]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + name)
            listener.listen(self.world_size)
            listener.setblocking(False)
            for rank in range(self.world_size):
                log = log_folder / f"rank_{rank:04d}.log" if log_folder else None
                self._seats.append(_Seat(rank, command, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, log))
                self._seats[rank].give_key(key)
            admission = asyncio.create_task(self._admit(listener, key))
            died = [seat.died for seat in self._seats]
            try:
                await asyncio.wait([admission, *died], timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
                if admission.done():
                    return admission.result()
            finally:
                admission.cancel()
        failures = [_RankError(seat, seat.died.result()) for seat in self._seats if seat.died.done()]
        if failures:
            raise await self._fail("the start", failures)
        absent = [seat for seat in self._seats if seat.socket is None]
        raise await self._fall_silent(f"did not connect within {timeout_seconds:g} s", absent)

    async def _admit(self, listener: socket.socket, key: bytes) -> None:
        """Accept connections until every seat has one that proved to hold the key."""
        loop = asyncio.get_running_loop()
        while any(seat.socket is None for seat in self._seats):
            sock, _ = await loop.sock_accept(listener)
            if not await asyncio.to_thread(_prove, sock, key):
                sock.close()
                continue
            with contextlib.suppress(OSError, EOFError):  # it died meanwhile, which is noticed elsewhere
                (rank,) = rank_end.unpack(*await _receive(sock))
                self._seats[rank].socket = sock

    async def _exchange(self, method: str, messages: Sequence[Sequence[rank_end.Buffer]]) -> list[Any]:
        async with self._turn:
            if self._over is not None:
                raise self._over
            asks = [asyncio.create_task(seat.ask(m)) for seat, m in zip(self._seats, messages, strict=True)]
            try:
                return await self._gather(method, asks)
            except BaseException as error:
                for ask in asks:
                    ask.cancel()
                # A call abandoned half-way leaves the ranks in no known state.
                self._over = self._over or types.PeerLostError(f"`{method}` was abandoned: {error!r}")
                await self._end()
                raise

    async def _gather(self, method: str, asks: Sequence[asyncio.Task[Any]]) -> list[Any]:
        """The answers by rank; after a failure the other ranks have a moment to tell of an earlier one."""
        timeout = self.answer_timeout_seconds
        done, waiting = await asyncio.wait(asks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        if waiting and any(ask.exception() for ask in done):
            await asyncio.wait(waiting, timeout=_REPORT_GRACE_SECONDS)
        elif waiting:
            silent = [seat for seat, ask in zip(self._seats, asks, strict=True) if ask in waiting]
            raise await self._fall_silent(f"did not answer `{method}` within {timeout:g} s", silent)
        errors = [error for ask in asks if ask.done() and (error := ask.exception())]
        failures = [error for error in errors if isinstance(error, _RankError)]
        if len(failures) < len(errors):  # an answer that the driver cannot read
            raise next(error for error in errors if error not in failures)
        if failures:
            raise await self._fail(f"`{method}`", failures)
        return [ask.result() for ask in asks]

    async def _fail(self, what: str, failures: Sequence[_RankError]) -> Exception:
        """End the group and return the error that names the first cause."""
        dead = {seat.rank for seat in self._seats if seat.died.done()}
        first = min(failures, key=lambda failure: (failure.echo, failure.at))
        await self._end()
        seat, report = first.seat, first.report
        where = f"rank {seat.rank} of {self.world_size}"
        if report is None:
            fate = seat.fate() if seat.rank in dead else "lost its connection"
            error = RankFailedError(seat.rank, f"{where} {fate} during {what}", seat.log_tail())
        elif report["megarl_class"]:
            error = getattr(types, report["megarl_class"])(report["message"])
            error.add_note(f"raised by {where} during {what}\n{report['traceback']}")
        else:
            cause = f"{where} raised {report['class']} during {what}: {report['message']}"
            error = RankFailedError(seat.rank, cause, report["traceback"])
        self._over = error
        return error

    async def _fall_silent(self, what: str, silent: Sequence[_Seat]) -> Exception:
        """End the group and return the error that shows where each silent rank stood."""
        for seat in silent:
            seat.kill(signal.SIGABRT)  # the rank's fault handler writes the stacks of all its threads to the log
        await asyncio.wait([seat.died for seat in silent], timeout=_REPORT_GRACE_SECONDS)
        await self._end()
        names = ", ".join(str(seat.rank) for seat in silent)
        cause = f"rank{'s' * (len(silent) > 1)} {names} of {self.world_size} {what}"
        self._over = RankFailedError(silent[0].rank, cause, "\n".join(seat.log_tail() for seat in silent))
        return self._over

    async def _end(self) -> None:
        """Kill what still lives and release everything."""
        seats, self._seats = self._seats, []
        for seat in seats:
            seat.kill()
        if seats:
            await asyncio.wait([seat.died for seat in seats], timeout=_KILL_SECONDS)
        for seat in seats:
            seat.release()
        if self._port is not None:
            self._port.close()


def _prove(sock: socket.socket, key: bytes) -> bool:
    """Whether the peer holds the key; proves that we do, too. Runs in a thread, for a bounded time."""
    sock.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _HANDSHAKE_SECONDS, 0))
    try:
        with Connection(os.dup(sock.fileno())) as connection:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
    except (OSError, EOFError, multiprocessing.AuthenticationError):
        return False
    sock.setblocking(False)
    return True


def _reserve_port() -> socket.socket:
    """A free loopback port, kept from others but not from rank 0: bound, address reusable, not listening."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


async def _send(sock: socket.socket, pieces: Sequence[rank_end.Buffer]) -> None:
    for piece in pieces:
        await asyncio.get_running_loop().sock_sendall(sock, piece)


async def _receive(sock: socket.socket) -> tuple[bytearray, list[bytearray]]:
    reader = rank_end.read_message()
    wanted = next(reader)
    while True:
        view = memoryview(wanted)
        while view:
            received = await asyncio.get_running_loop().sock_recv_into(sock, view)
            if not received:
                raise EOFError
            view = view[received:]
        try:
            wanted = reader.send(None)
        except StopIteration as message:
            return message.value
