"""The driver's connection to a node's agent, and through it to the node's ranks."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl import types
from megarl.cluster.agents.handshake import enable_keepalive
from megarl.cluster.agents.topology import Introduction
from megarl.cluster.ranks.messages import AGENT, ANSWER, BATCH, NOTICE, PART, pack_control
from megarl.cluster.ranks.rank_handle import Answers, RankHandle
from megarl.types import MegarlError, PeerLostError

_SHORT_BYTES = 1 << 16
"""Message parts below this size are joined to save system calls. Joining longer parts would cost a copy."""


@dataclass(slots=True, eq=False)
class _NodeCall:
    """A call to ranks of one node. `all_answered` fails with the first error."""

    answers: Answers
    num_awaited: int
    all_answered: asyncio.Future[None]

    def take_answer(self, handle: RankHandle, message: memoryview) -> None:
        """Decode a rank's answer and complete its future."""
        answer = self.answers[handle]
        if answer.done():  # cancelled, because the group is ending
            return
        try:
            answer.set_result(handle.decode_answer(message))
        except Exception as error:
            self.fail(handle, error)
        self.num_awaited -= 1
        if not self.num_awaited and not self.all_answered.done():
            self.all_answered.set_result(None)

    def fail(self, handle: RankHandle, error: Exception) -> None:
        """Fail a rank's answer, and the whole call on this node."""
        # Mark each error as retrieved: the waiting call may have ended already, with another node's error.
        if not self.answers[handle].done():
            self.answers[handle].set_exception(error)
            self.answers[handle].exception()
        if not self.all_answered.done():
            self.all_answered.set_exception(error)
            self.all_answered.exception()


class AgentLink(asyncio.Protocol):
    """Connection to the agent of one node. Call `open` first.

    `introduction` is the agent's first message. `addresses` are the IP addresses of agent and driver; None: the agent
    is a child of the driver. `on_signal` gets the name of a stop signal to the agent.
    """

    def __init__(self, connected: socket.socket, introduction: Introduction) -> None:
        self.introduction, self._socket = introduction, connected
        self.addresses: tuple[str, str] | None = None
        if connected.family != socket.AF_UNIX:
            enable_keepalive(connected)
            self.addresses = connected.getpeername()[0], connected.getsockname()[0]
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Completes when the connection ends, and with it the agent's ranks."""
        self.on_signal: Callable[[str], object] = lambda signal_name: None
        self._handles: dict[int, RankHandle] = {}
        """Living ranks by process number."""
        self._calls: dict[RankHandle, _NodeCall] = {}
        """Call in progress by rank."""
        self._requests: dict[int, asyncio.Future[Any]] = {}
        self._request_numbers = itertools.count(1)
        self._unread = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    @property
    def node(self) -> str:
        return self.introduction.node

    @property
    def is_lost(self) -> bool:
        return self.ended.done()

    async def open(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, sock=self._socket)

    async def request(self, do: str, *, patience_seconds: float | None = None, **fields: Any) -> Any:
        """Let the agent execute request `do` with these fields, and return the result.

        Raises the agent's OSError or MegarlError. Raises PeerLostError if the connection ended, or after
        `patience_seconds` (None: no limit) without an answer.
        """
        if self.is_lost:
            raise PeerLostError(f"the agent of node {self.node} has ended or lost its connection")
        request_id = next(self._request_numbers)
        answer = self._requests[request_id] = asyncio.get_running_loop().create_future()
        self.send(pack_control({"do": do, "id": request_id, **fields}))
        try:
            async with asyncio.timeout(patience_seconds):
                return await answer
        except TimeoutError:
            raise PeerLostError(
                f"the agent of node {self.node} did not answer `{do}` within {patience_seconds:g} s"
            ) from None
        finally:
            self._requests.pop(request_id, None)

    async def fork(
        self,
        handles: Sequence[RankHandle],
        variables: Sequence[Mapping[str, str]],
        environment: Mapping[str, str],
        imports: Sequence[str],
        patience_seconds: float,
    ) -> None:
        """Fork rank processes, with `variables` of each and the `environment` of all.

        Their fork server imports the modules `imports` once. Raises OSError or MegarlError, or PeerLostError after
        `patience_seconds`. Then no process is left.
        """
        self._handles |= {handle.process: handle for handle in handles}
        ranks = [
            {
                "process": handle.process,
                "name": f"megarl rank {handle.rank}",
                "log": str(handle.log.absolute()),
                "environment": dict(environment_of_rank),
            }
            for handle, environment_of_rank in zip(handles, variables, strict=True)
        ]
        try:
            await self.request(
                "fork",
                patience_seconds=patience_seconds,
                ranks=ranks,
                environment=dict(environment),
                imports=list(imports),
            )
        except (OSError, MegarlError):
            # The agent may have forked some ranks already. Kill them, so that their group need not wait for their end.
            self.kill(handles)
            for handle in handles:
                if handle.process in self._handles:
                    self._record_end(handle, "was not started", time.time())
            raise

    def ask(self, messages: Mapping[RankHandle, bytes], answers: Answers) -> asyncio.Future[None]:
        """Send a command to each rank. `answers` has a future for each rank's answer.

        The returned future completes after the last answer, and fails with the first error. So a call to a thousand
        ranks waits for one future per node.
        """
        call = _NodeCall(answers, len(messages), asyncio.get_running_loop().create_future())
        living_messages = {handle: message for handle, message in messages.items() if not handle.died.done()}
        self._calls |= dict.fromkeys(living_messages, call)
        for handle in messages.keys() - living_messages.keys():
            call.fail(handle, handle.loss_error())
        if living_messages:
            self.send(*_pack_messages(living_messages))
        return call.all_answered

    def send_notice(self, handles: Sequence[RankHandle], notice: bytes) -> None:
        """Send a notice to ranks. They read it even during a call."""
        process_numbers = [handle.process for handle in handles]
        head = PART.pack(len(process_numbers), len(notice)) + struct.pack(f"<{len(process_numbers)}I", *process_numbers)
        self.send(BATCH.pack(NOTICE), head, notice)

    def kill(self, handles: Sequence[RankHandle]) -> None:
        self._send_control("kill", handles)

    def dismiss(self, handles: Sequence[RankHandle]) -> None:
        """Let ranks exit, by closing their streams of commands."""
        self._send_control("dismiss", handles)

    def _send_control(self, do: str, handles: Sequence[RankHandle]) -> None:
        self.send(pack_control({"do": do, "processes": [handle.process for handle in handles]}))

    def send(self, *parts: bytes) -> None:
        """Send a message after all earlier ones. Does nothing on an ended connection."""
        if self._transport is None:
            return
        if sum(map(len, parts)) < _SHORT_BYTES:
            parts = (b"".join(parts),)
        for part in parts:
            self._transport.write(memoryview(part))

    def cut(self) -> None:
        """End the connection at once. The agent and its ranks then end too."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unread += data
        self._take_answers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report this agent's ranks as ended, and fail its requests (called by asyncio)."""
        self._transport = None
        if exc is not None:
            self._read_remaining_data()
        self.ended.set_result(None)
        end_text = f"was cut off: the agent of its node {self.node} ended or lost its connection"
        for handle in list(self._handles.values()):
            self._record_end(handle, end_text, time.time(), is_cut_off=True)
        error = PeerLostError(f"the agent of node {self.node} ended or lost its connection")
        for answer in self._requests.values():
            if not answer.done():
                answer.set_exception(error)
        self._requests.clear()

    def _read_remaining_data(self) -> None:
        """Read the data that arrived before a write to an ended agent failed.

        asyncio does not read it, and closes the socket only after `connection_lost`.
        """
        with suppress(OSError):
            while data := self._socket.recv(_SHORT_BYTES):
                self._unread += data
        self._take_answers()

    def _take_answers(self) -> None:
        """Decode the complete messages received so far: answers of ranks, and events of the agent."""
        # Local variables, for speed. In a short call of a thousand ranks the driver spends most of its time in this
        # loop.
        handles, calls = self._handles, self._calls
        unpack, head_bytes = ANSWER.unpack_from, ANSWER.size
        view = memoryview(self._unread)
        num_bytes, message_start = len(view), 0
        while num_bytes - message_start >= head_bytes:
            process, size = unpack(view, message_start)
            message_end = message_start + head_bytes + size
            if message_end > num_bytes:
                break
            if process == AGENT:
                self._take_event(json.loads(bytes(view[message_end - size : message_end])))
            elif (handle := handles.get(process)) is not None and (call := calls.pop(handle, None)) is not None:
                call.take_answer(handle, view[message_end - size : message_end])
            message_start = message_end
        if message_start:
            # A new buffer, because a buffer cannot be shortened while views of it exist.
            self._unread = bytearray(view[message_start:])

    def _take_event(self, event: dict[str, Any]) -> None:
        """Handle a message of the agent itself: a request's result, a stop signal, or the end of a rank."""
        if "id" in event:
            self._take_result(event)
        elif event["event"] == "signal":
            self.on_signal(event["name"])
        elif (handle := self._handles.get(event["process"])) is not None:
            end_text = _describe_end(event["code"], ended_with_server=event["ended_with_server"])
            self._record_end(handle, end_text, event["at"] or time.time())

    def _take_result(self, event: dict[str, Any]) -> None:
        """Complete a request with the agent's result, or fail it with an error of the class that the agent names."""
        answer = self._requests.pop(event["id"], None)
        if answer is None or answer.done():
            return
        if "result" in event:
            answer.set_result(event["result"])
        elif "megarl_class" in event:
            answer.set_exception(getattr(types, event["megarl_class"])(event["error"]))
        else:
            error = OSError(event["errno"], event["error"], event["file"])
            answer.set_exception(error if event["errno"] is not None else OSError(event["error"]))

    def _record_end(self, handle: RankHandle, end_text: str, epoch_seconds: float, *, is_cut_off: bool = False) -> None:
        """Record the end of a rank, and fail its running call. `is_cut_off`: its node is lost; `end_text` names it."""
        del self._handles[handle.process]
        node_text = "" if self.addresses is None else f"on node {self.node} "
        handle.record_end(end_text if is_cut_off else node_text + end_text, epoch_seconds, is_cut_off=is_cut_off)
        if (call := self._calls.pop(handle, None)) is not None:
            call.fail(handle, handle.loss_error())


class RankPlace(NamedTuple):
    """A rank's agent, its node's number in the run, and its GPU's index on the node."""

    agent: AgentLink
    node_number: int
    local_rank: int


def _describe_end(code: int | None, *, ended_with_server: bool) -> str:
    """Return how a process ended, as a verb phrase. `code` None: it lost its connection and was killed."""
    if code is None:
        return "lost its connection"
    end_text = f"exited with code {code}"
    if code < 0:
        name = signal.Signals(-code).name
        # Linux's out-of-memory killer sends SIGKILL, and leaves no other sign here.
        end_text = f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"ended with its fork server, which {end_text}" if ended_with_server else end_text


def _pack_messages(messages: Mapping[RankHandle, bytes]) -> list[bytes]:
    """Return the messages of one call as byte strings to be sent in this order. `ranks.messages` has the format.

    Ranks with the same message object share one part of the node's call, so the message is sent once.
    """
    # Grouped by the object's identity, because comparing long messages would be slow.
    processes_by_message: defaultdict[int, list[int]] = defaultdict(list)
    for handle, message in messages.items():
        processes_by_message[id(message)].append(handle.process)
    message_by_identity = {id(message): message for message in messages.values()}
    byte_strings: list[bytes] = []
    header = BATCH.pack(len(processes_by_message))
    for identity, processes in processes_by_message.items():
        message = message_by_identity[identity]
        header += PART.pack(len(processes), len(message)) + struct.pack(f"<{len(processes)}I", *processes)
        # Headers are joined into one write. A message has its own, so that a long one is not copied.
        byte_strings += [header, message]
        header = b""
    return byte_strings
