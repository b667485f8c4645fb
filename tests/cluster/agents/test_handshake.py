"""The meeting of the driver and its processes, while strangers hold connections."""

from __future__ import annotations

import asyncio
import socket

from megarl.cluster.agents.handshake import STRANGERS, accept_peers_with_key, enable_keepalive, introduce

KEY = bytes(32)


async def test_a_process_enters_at_once_though_silent_strangers_hold_more_places_than_there_are() -> None:
    met: dict[int, socket.socket] = {}
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as server:
        server.setblocking(False)
        meeting = asyncio.create_task(accept_peers_with_key(met, server, KEY, 1, lambda message: message["rank"]))
        strangers = []
        for _ in range(STRANGERS + 20):
            strangers.append(socket.create_connection(server.getsockname()))
            await asyncio.sleep(0)
        with socket.create_connection(server.getsockname()) as process:
            await asyncio.wait_for(asyncio.to_thread(introduce, process, KEY, {"rank": 0}), 5)
            await asyncio.wait_for(meeting, 5)
            # A connection that blocks would stop the driver, and Nagle's algorithm would delay short commands.
            assert not met[0].getblocking() and met[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            met[0].close()
        for stranger in strangers:
            stranger.close()
    assert list(met) == [0]


def test_a_connection_ends_after_half_a_minute_of_silence() -> None:
    with socket.socket() as connected:
        enable_keepalive(connected)
        idle, interval, count, unread = (
            connected.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        )
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert idle + interval * count == 30
    # Milliseconds. A shorter limit would cut off an agent that is only slow to read.
    assert unread >= 30_000


async def test_a_meeting_that_is_over_leaves_no_stranger_connected() -> None:
    met: dict[int, socket.socket] = {}
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as stranger, socket.socket() as process:
        server.setblocking(False)
        stranger.connect(server.getsockname())
        process.connect(server.getsockname())
        tasks_before = asyncio.all_tasks()
        entering = asyncio.create_task(asyncio.to_thread(introduce, process, KEY, {"rank": 0}))
        await accept_peers_with_key(met, server, KEY, 1, lambda message: message["rank"])
        # Before the event loop's next turn: the caller closes the server at once.
        assert asyncio.all_tasks() <= {*tasks_before, entering}
        await entering
        stranger.settimeout(10)
        while stranger.recv(1024):
            pass
        met[0].close()
