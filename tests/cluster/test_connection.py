"""Connections of the driver to ranks that the test plays."""

from __future__ import annotations

import asyncio
import gc
import socket
from pathlib import Path
from typing import Any

from megarl.cluster.connection import Connection, _pack_batch
from megarl.cluster.messages import pack
from megarl.cluster.rank_handle import Answers, RankError, RankHandle
from megarl.cluster.relay import ANSWER, BATCH, PART


class Handle(RankHandle):
    """Handle of a rank without a process."""

    def kill(self) -> None:
        """There is no process."""

    def exit_reason(self, is_dead: bool) -> str:
        return "left"


async def connected(count: int, *, is_relay: bool) -> tuple[Connection, list[Handle], socket.socket]:
    ours, theirs = socket.socketpair()
    handles = [Handle(rank, Path("none.log")) for rank in range(count)]
    connection = Connection(ours, handles, is_relay=is_relay)
    await connection.open()
    return connection, handles, theirs


def awaited(handles: list[Handle]) -> Answers:
    return {handle: asyncio.get_running_loop().create_future() for handle in handles}


async def test_answers_that_arrived_are_read_though_a_later_write_fails() -> None:
    connection, handles, theirs = await connected(2, is_relay=True)
    answers = awaited(handles)
    whole = connection.ask(dict.fromkeys(handles, b""), answers)
    for handle in handles:
        answer = pack((True, f"of {handle.rank}", None))[8:]
        theirs.sendall(ANSWER.pack(handle.rank, len(answer)) + answer)
    theirs.close()
    connection.send(b"to nobody")
    await whole
    assert [answers[handle].result() for handle in handles] == ["of 0", "of 1"]
    assert connection.is_lost
    connection.release()


async def test_answers_in_pieces_and_in_any_order_reach_their_calls() -> None:
    connection, handles, theirs = await connected(3, is_relay=True)
    answers = awaited(handles)
    pieces = b""
    for handle in reversed(handles):
        answer = pack((True, handle.rank, None))[8:]
        pieces += ANSWER.pack(handle.rank, len(answer)) + answer
    theirs.sendall(pieces[:5])
    await asyncio.sleep(0.01)
    # One rank is asked later than the others, as its answer was before.
    whole = connection.ask(dict.fromkeys(handles[1:], b"x"), answers)
    theirs.sendall(pieces[5:])
    await whole
    await connection.ask({handles[0]: b"x"}, answers)
    assert [answers[handle].result() for handle in handles] == [0, 1, 2]
    theirs.close()
    connection.release()


async def test_nobody_is_told_of_errors_that_no_call_waits_for() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    connection, handles, theirs = await connected(2, is_relay=True)
    answers = awaited(handles)
    connection.ask(dict.fromkeys(handles, b"x"), answers)
    for handle in handles:
        handle.died.set_result(0.0)
    theirs.close()
    await asyncio.wait(answers.values())
    assert all(isinstance(answer.exception(), RankError) for answer in list(answers.values())[:1])
    answers.clear()
    connection.release()
    await asyncio.sleep(0)
    gc.collect()
    assert not complaints


async def test_a_released_connection_reports_no_rank_as_lost() -> None:
    connection, handles, theirs = await connected(1, is_relay=False)
    answers = awaited(handles)
    connection.ask(dict.fromkeys(handles, b"x"), answers)
    connection.release()
    await asyncio.sleep(0.01)
    assert connection.is_lost and not connection.cut_off and not answers[handles[0]].done()
    theirs.close()


async def test_a_message_in_common_is_packed_with_one_head() -> None:
    handles = [Handle(rank, Path("none.log")) for rank in range(3)]
    common, other = b"c" * 5, b"other"
    parts = _pack_batch({handles[0]: common, handles[1]: other, handles[2]: common})
    first = BATCH.pack(2) + PART.pack(2, 5) + (0).to_bytes(4, "little") + (2).to_bytes(4, "little")
    assert parts == [first, common, PART.pack(1, 5) + (1).to_bytes(4, "little"), other]
