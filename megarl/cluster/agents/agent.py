"""The process that a launcher starts on each node. It forks the node's ranks, and serves them and the driver.

It imports the ranks' libraries once (`processes.fork_server`), relays calls, kills ranks, reports their ends and reads
their stacks. Its copies of the training state outlive the ranks. It unpickles nothing. When the driver ends, the agent
ends. When the agent ends, its ranks end.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from megarl.cluster.agents.handshake import enable_keepalive, introduce, receive_json
from megarl.cluster.agents.memory_files import MemoryFiles
from megarl.cluster.agents.topology import Introduction, find_interface
from megarl.cluster.ranks.messages import ANSWER, BATCH, CONTROL, HEAD, LENGTH, NOTICE, PART, pack_event
from megarl.cluster.ranks.stacks import STACKS_SECONDS, has_begun, is_complete
from megarl.files.private_folder import PrivateFolder
from megarl.platform import native_stacks
from megarl.processes.fork_server import ForkedProcess, end_fork_servers, fork_server
from megarl.processes.open_files import provide_open_files
from megarl.processes.process_tree import ENDING_SIGNALS, die_with
from megarl.sandbox.containers.host import ContainerHost
from megarl.types import MegarlError

_GATHER_SECONDS = 0.05
"""Seconds to wait for further answers after a call's first answer. Then the agent sends them together."""
_LOOK_SECONDS = 0.1
"""Seconds between two readings of logs for stacks."""
_EXIT_SECONDS = 1.0
"""Seconds for a rank's process to end after its connection has ended."""

RANK_VARIABLES = {"PYTHONUNBUFFERED": "1"}
"""Environment variables of ranks: unbuffered output reaches their logs at once."""

_RANK_MODULE = "megarl.cluster.ranks.rank"
"""Module imported by every fork server, so that ranks share its 2.4 MB. It initialises no device."""

Environment = Mapping[str, str]


@dataclass(slots=True, eq=False)
class _NodeCall:
    """A call to ranks of this node: how many have still to answer, and the answers not yet sent."""

    num_awaited: int = 0
    unsent_answers: list[bytes] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Rank:
    """A rank process of this node. `folder` is its private TMPDIR."""

    forked: ForkedProcess
    writer: asyncio.StreamWriter
    log: Path
    folder: Path
    call: _NodeCall = field(default_factory=_NodeCall)
    """The rank's newest call."""

    @property
    def obstacle(self) -> str | None:
        """Why the process cannot run. None: it can. Empty: the process itself is stopped."""
        if (server := self.forked.stopped_server) is not None:
            return f"its fork server (process {server}) is stopped"
        pid = self.forked.pid
        return "" if pid is not None and self.forked.exit_code is None and native_stacks.is_stopped(pid) else None


class Agent:
    """Serves the driver's messages until the connection `upward` ends."""

    def __init__(self, upward: asyncio.StreamWriter) -> None:
        self._upward = upward
        self._ranks: dict[int, _Rank] = {}
        """Living ranks by process number. The driver never reuses a number."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder = PrivateFolder()
        self._memory = MemoryFiles()
        self._containers = ContainerHost()
        self._requests: dict[str, Callable[..., Awaitable[Any]]] = {
            "fork": self._fork,
            "stacks": self._read_stacks,
            "stopped": self._find_stopped,
            "thread_states": self._read_thread_states,
            "native_stacks": self._read_native_stacks,
            "hold": self._memory.hold,
            "copies": self._memory.list_files,
            "keep_only": self._memory.keep_only,
            "offer": self._memory.offer,
            "fetch": self._memory.fetch,
            "container": self._containers.request,
        }

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Serve until the driver closes its connection. Then kill all ranks and release everything."""
        loop = asyncio.get_running_loop()
        for ending_signal in ENDING_SIGNALS:
            # A launcher signals the agents only. The driver then saves and ends the run.
            loop.add_signal_handler(
                ending_signal, self._send_event, {"event": "signal", "name": signal.Signals(ending_signal).name}
            )
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    await self._take_message(reader)
        finally:
            for rank in self._ranks.values():
                rank.forked.kill()
            end_fork_servers()
            await self._containers.close()
            self._folder.remove()

    async def _take_message(self, reader: asyncio.StreamReader) -> None:
        """Execute one message of the driver, or pass it to ranks."""
        (num_parts,) = BATCH.unpack(await reader.readexactly(BATCH.size))
        if num_parts == CONTROL:
            (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            await self._take_control(json.loads(await reader.readexactly(size)))
            return
        call = None if num_parts == NOTICE else _NodeCall()
        for _ in range(1 if call is None else num_parts):
            num_processes, size = PART.unpack(await reader.readexactly(PART.size))
            numbers = struct.unpack(f"<{num_processes}I", await reader.readexactly(4 * num_processes))
            message = await reader.readexactly(size)
            # A rank may have ended meanwhile. The driver knows that already, or is about to read it.
            for rank in self._living_ranks(numbers).values():
                rank.writer.write(message)
                if call is not None:
                    rank.call = call
                    call.num_awaited += 1

    async def _take_control(self, message: dict[str, Any]) -> None:
        """Execute a control message. The answer to a request has its `id`."""
        action, request_id = message.pop("do"), message.pop("id", None)
        if action == "kill":
            for rank in self._living_ranks(message["processes"]).values():
                rank.forked.kill()
        elif action == "dismiss":
            for rank in self._living_ranks(message["processes"]).values():
                with suppress(OSError):
                    rank.writer.write_eof()
        else:
            answer_task = self._start_task(self._answer(request_id, self._requests[action](**message)))
            if action == "fork":
                # The next message may be a call to these processes.
                await answer_task

    async def _answer(self, request_id: int, work: Awaitable[Any]) -> None:
        """Await the work of a request, and send the driver its result or its error, as plain data."""
        try:
            self._send_event({"id": request_id, "result": await work})
        except OSError as error:
            file_name = None if error.filename is None else str(error.filename)
            self._send_event(
                {"id": request_id, "errno": error.errno, "error": error.strerror or str(error), "file": file_name}
            )
        except MegarlError as error:
            self._send_event({"id": request_id, "megarl_class": type(error).__name__, "error": str(error)})
        except Exception as error:
            self._send_event({"id": request_id, "errno": None, "error": repr(error), "file": None})

    def _send_event(self, message: dict[str, Any]) -> None:
        self._upward.write(pack_event(message))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work in the background. The agent holds the task, because asyncio does not."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _living_ranks(self, processes: Collection[int]) -> dict[int, _Rank]:
        return {
            process_number: self._ranks[process_number] for process_number in processes if process_number in self._ranks
        }

    async def _fork(self, ranks: Sequence[Mapping[str, Any]], environment: Environment, imports: Sequence[str]) -> None:
        """Fork rank processes, each with `process`, `name`, `log` and `environment` (its own variables).

        Their fork server has the variables `environment` and has imported `imports`. Raises OSError or ConfigError.
        """
        # At most 4 files per rank: its connection, its status socket, its log, and a copy of its state.
        provide_open_files(4 * (len(self._ranks) + len(ranks)), f"{len(ranks)} ranks on this node")
        # A placeholder: these ranks have no call yet.
        call = _NodeCall()
        for rank_fields in ranks:
            process_number, log_file = rank_fields["process"], Path(rank_fields["log"])
            folder = self._folder.path / f"rank_{process_number}"
            folder.mkdir(mode=0o700)
            variables = {
                **os.environ,
                **RANK_VARIABLES,
                **environment,
                **rank_fields["environment"],
                "TMPDIR": str(folder),
            }
            with log_file.open("ab") as output:
                rank_server = fork_server(variables, (_RANK_MODULE, *imports), output)
                forked = rank_server.fork(rank_fields["name"], f"{_RANK_MODULE}:main", variables, output)
            reader, writer = await asyncio.open_connection(sock=forked.connection)
            # A child of the rank may have the other end open. Then reading would never show the end of the process.
            forked.ended.add_done_callback(lambda _, forked=forked: _shut_down(forked.connection))
            rank = self._ranks[process_number] = _Rank(forked, writer, log_file, folder, call)
            self._start_task(self._listen(process_number, rank, reader))

    async def _listen(self, process_number: int, rank: _Rank, reader: asyncio.StreamReader) -> None:
        """Collect a rank's answers until its connection ends, then report its end."""
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                message = await reader.readexactly(size)
                self._take_answer(rank.call, ANSWER.pack(process_number, size), message)
        # Send the answers that arrived before the rank's end first.
        self._send_answers(rank.call)
        await asyncio.wait([rank.forked.ended], timeout=_EXIT_SECONDS)
        has_exited = rank.forked.ended.done()
        self._send_event(
            {
                "event": "ended",
                "process": process_number,
                "code": rank.forked.exit_code,
                "ended_with_server": rank.forked.ended_with_server,
                "at": rank.forked.ended.result() if has_exited else None,
            }
        )
        if not has_exited:
            # Without a connection the rank is of no further use.
            rank.forked.kill()
            await rank.forked.ended
        del self._ranks[process_number]
        rank.writer.close()
        rank.forked.release()
        await asyncio.to_thread(shutil.rmtree, rank.folder, ignore_errors=True)

    def _take_answer(self, call: _NodeCall, *answer: bytes) -> None:
        """Add an answer to its call. Send when all are present, or a short time after the first."""
        call.num_awaited -= 1
        if not call.unsent_answers and call.num_awaited > 0:
            asyncio.get_running_loop().call_later(_GATHER_SECONDS, self._send_answers, call)
        call.unsent_answers += answer
        if call.num_awaited <= 0:
            self._send_answers(call)

    def _send_answers(self, call: _NodeCall) -> None:
        self._upward.write(b"".join(call.unsent_answers))
        call.unsent_answers.clear()

    async def _read_stacks(self, processes: Collection[int], seconds: float) -> dict[int, str]:
        """Return the stacks that ranks write to their logs on a signal, by process; empty after `seconds`.

        A rank reacts even while Python waits in C code.
        """
        ranks = self._living_ranks(processes)
        # Only text after the end of a log at the request counts, because logs may hold earlier stacks.
        old_log_sizes = {process: _log_size(rank.log) for process, rank in ranks.items()}
        for rank in ranks.values():
            with suppress(OSError):
                rank.forked.signal(signal.SIGUSR2)
        stack_texts = dict.fromkeys(processes, "")
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            seconds_waited = loop.time() - began
            incomplete_processes = [process for process in old_log_sizes if not is_complete(stack_texts[process])]
            stack_texts |= {
                process: _read_log_from(ranks[process].log, old_log_sizes[process]) for process in incomplete_processes
            }
            # An incomplete text may never become complete: threads at work change while their frames are read.
            is_finished = all(
                is_complete(stack_texts[process])
                or (has_begun(stack_texts[process]) and seconds_waited > STACKS_SECONDS)
                or process not in self._ranks
                or ranks[process].obstacle is not None
                for process in incomplete_processes
            )
            if is_finished or seconds_waited > seconds:
                return stack_texts

    async def _find_stopped(self, processes: Collection[int]) -> dict[int, str]:
        """Return the processes that the kernel has stopped (SIGSTOP, for example), each with its obstacle."""
        obstacles = {process_number: rank.obstacle for process_number, rank in self._living_ranks(processes).items()}
        return {process_number: obstacle for process_number, obstacle in obstacles.items() if obstacle is not None}

    async def _read_thread_states(self, processes: Collection[int]) -> dict[int, str]:
        pids = {process_number: rank.forked.pid for process_number, rank in self._living_ranks(processes).items()}
        return {
            process_number: native_stacks.thread_states(pid) for process_number, pid in pids.items() if pid is not None
        }

    async def _read_native_stacks(self, processes: Collection[int], seconds: float) -> dict[int, str]:
        """Return native stacks by process. A debugger has `seconds` for each."""
        pids = {process_number: rank.forked.pid for process_number, rank in self._living_ranks(processes).items()}
        readings = [asyncio.to_thread(_native_stacks, pid, seconds) for pid in pids.values()]
        return dict(zip(pids, await asyncio.gather(*readings), strict=True))


def _native_stacks(pid: int | None, seconds: float) -> str:
    return "no native stacks: the process has not started" if pid is None else native_stacks.native_stacks(pid, seconds)


def _shut_down(connection: socket.socket) -> None:
    """End a connection. Data that has arrived can still be read."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _log_size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _read_log_from(log: Path, offset: int) -> str:
    with suppress(OSError), log.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")
    return ""


def connect(address: tuple[str, int], key: bytes, introduction: Introduction) -> NoReturn:
    """Run the agent: connect to the driver, prove the key, introduce the node, and serve.

    The driver answers with its folder, its module search path, and the arguments of `serve`.
    """
    driver = socket.create_connection(address)
    driver.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    enable_keepalive(driver)
    introduce(driver, key, introduction._asdict())
    welcome = receive_json(driver)
    # A recipe's relative paths start from the driver's folder. Launchers may start agents in another one.
    os.chdir(welcome.pop("folder"))
    sys.path[:] = welcome.pop("path")
    # Gloo would choose an interface by the host name. The interface to the driver is one that other nodes reach.
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := find_interface(driver.getsockname()[0])):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    serve(driver, **welcome)


def serve(driver: socket.socket, environment: Environment, imports: Sequence[str]) -> NoReturn:
    """Run the agent on its connection to the driver, and exit when it ends.

    Meanwhile a fork server for `environment` imports the modules `imports`.
    """
    asyncio.run(_serve(driver, environment, imports))
    raise AssertionError("the agent exits in its loop")


async def _serve(driver: socket.socket, environment: Environment, imports: Sequence[str]) -> NoReturn:
    """Serve the driver until it closes the connection, then exit."""
    if imports:
        # The same variables as in a later `fork`, so that the fork uses this server.
        fork_server({**os.environ, **RANK_VARIABLES, **environment}, (_RANK_MODULE, *imports))
    reader, writer = await asyncio.open_connection(sock=driver)
    await Agent(writer).run(reader)
    # At once: `asyncio.run` would wait for threads, and a debugger may still run in one.
    os._exit(0)


def main(descriptor: str, parent: str, settings: str) -> NoReturn:
    """Run the agent of the driver's own machine.

    `descriptor` is the agent's end of a socket pair, `parent` the driver's process id. `settings` are the arguments of
    `serve` in JSON.
    """
    die_with(int(parent))
    # The host name may resolve to another interface than the loopback.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    driver = socket.socket(fileno=int(descriptor))
    driver.set_inheritable(False)
    serve(driver, **json.loads(settings))


if __name__ == "__main__":
    sys.exit("start a run with `megarl train`; launchers start agents")
