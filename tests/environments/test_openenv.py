"""Environments behind OpenEnv servers: a stand-in that speaks the protocol, and may do anything."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from megarl.environments import Step, Turn
from megarl.environments.openenv import OpenEnv, ServerError, UnreachableError
from megarl.environments.shared import close_shared
from megarl.types import ConfigError, Problem, ToolCall

SCHEMA = {
    "action": {
        "properties": {"message": {"type": "string"}, "note": {"type": "string"}, "metadata": {"type": "object"}},
        "required": ["message"],
    }
}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}


class Server:
    """Echoes texts, adds numbers by a tool; two sessions at once."""

    def __init__(self) -> None:
        self.open = self.most = self.refused = 0
        self.resets: list[dict[str, Any]] = []

    async def schema(self, request: web.Request) -> web.Response:
        return web.json_response(SCHEMA)

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open == 2:
            self.refused += 1
            await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            return socket
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            async for message in socket:
                assert message.type == WSMsgType.TEXT
                received = json.loads(message.data)
                if received["type"] == "reset":
                    self.resets.append(received["data"])
                    await self.observe(socket, {"text": f"Seed {received['data']['seed']}", "metadata": {"a": 1}}, None)
                else:
                    await self.act(socket, received["data"])
        finally:
            self.open -= 1
        return socket

    async def act(self, socket: web.WebSocketResponse, action: dict[str, Any]) -> None:
        if action.get("type") == "list_tools":
            await self.observe(socket, {"tools": [TOOL]}, None)
        elif action.get("type") == "call_tool":
            total = sum(action["arguments"]["numbers"])
            await self.observe(socket, {"tool_name": "add", "result": {"data": total}, "error": None}, 0.5)
        elif action["message"] == "raise":
            data = {"message": "no such move", "code": "EXECUTION_ERROR"}
            await socket.send_json({"type": "error", "data": data})
        elif action["message"] == "nonsense":
            await socket.send_str("<html>")
        elif action["message"] == "leave":
            await socket.close()
        elif action["message"] != "hang":
            is_done = action["message"] == "end"
            await self.observe(socket, {"text": f"heard {action['message']}"}, float(is_done), is_done)

    async def observe(
        self, socket: web.WebSocketResponse, observation: dict[str, Any], reward: float | None, done: bool = False
    ) -> None:
        data = {"observation": observation, "reward": reward, "done": done}
        await socket.send_json({"type": "observation", "data": data})


async def served(play: Callable[[Server, str], Awaitable[None]]) -> None:
    server = Server()
    app = web.Application()
    app.add_routes([web.get("/schema", server.schema), web.get("/ws", server.session)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        await asyncio.wait_for(play(server, f"http://127.0.0.1:{runner.addresses[0][1]}"), 120)
    finally:
        await close_shared()
        await runner.cleanup()


PROBLEM = Problem(7, ({"role": "system", "content": "Play."}, {"role": "user", "content": "."}), (1,), "")


async def say(environment: OpenEnv, text: str, *calls: ToolCall) -> Step:
    return await environment.step(Turn(0, text, "stop", calls=calls))


async def test_a_session_plays_an_attempt() -> None:
    async def play(server: Server, url: str) -> None:
        game = OpenEnv(url, reset={"level": 2})
        start = await game.reset(PROBLEM, 3)
        assert [message["content"] for message in start.messages] == ["Play.", "Seed 7"]
        assert server.resets == [{"level": 2, "seed": 7}]
        assert await say(game, "a") == Step(({"role": "user", "content": "heard a"},), 0.0)
        assert await say(game, "end") == Step((), 1.0, True)
        await game.close()
        other = OpenEnv(url, observation="metadata")
        assert json.loads((await other.reset(PROBLEM, 3)).messages[-1]["content"]) == {"a": 1}
        await other.close()

    await served(play)


async def test_the_tools_of_a_server_are_called() -> None:
    async def play(server: Server, url: str) -> None:
        game = OpenEnv(url, tools=True)
        start = await game.reset(PROBLEM, 3)
        assert start.tools[0]["function"]["name"] == "add"
        calls = (ToolCall("a", "add", {"numbers": [2, 3]}), ToolCall("b", "add", None, "not JSON"))
        step = await say(game, "", *calls)
        assert [(m["tool_call_id"], m["content"]) for m in step.messages] == [("a", "5"), ("b", "error: not JSON")]
        assert (step.reward, step.done) == (0.5, False)
        assert await say(game, "It is 5.") == Step(done=True)
        await game.close()

    await served(play)


async def test_attempts_wait_for_a_server_that_is_full() -> None:
    async def play(server: Server, url: str) -> None:
        async def alone() -> Step:
            game = OpenEnv(url)
            try:
                await game.reset(PROBLEM, 3)
                return await say(game, "end")
            finally:
                await game.close()

        steps = await asyncio.gather(*(alone() for _ in range(6)))
        assert [step.reward for step in steps] == [1.0] * 6
        assert server.most == 2 and server.refused

    await served(play)


@pytest.mark.parametrize(
    ("text", "error"),
    [("raise", ServerError), ("nonsense", ServerError), ("leave", UnreachableError), ("hang", TimeoutError)],
)
async def test_a_faulty_session_fails_alone(text: str, error: type[Exception]) -> None:
    async def play(server: Server, url: str) -> None:
        faulty, good = OpenEnv(url, seconds=0.5 if text == "hang" else 20.0), OpenEnv(url)
        await faulty.reset(PROBLEM, 3)
        await good.reset(PROBLEM, 3)
        with pytest.raises(error):
            await say(faulty, text)
        await faulty.close()
        assert (await say(good, "end")).reward == 1.0
        await good.close()

    await served(play)


def test_a_server_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match="cannot be read"):
            OpenEnv(f"http://127.0.0.1:{unused.getsockname()[1]}").check()
    with pytest.raises(ConfigError, match=r"ended with exit code 1: no such app"):
        OpenEnv(command=[sys.executable, "-c", "raise SystemExit('no such app')"]).check()
    wrong: dict[str, Any]
    for wrong in ({}, {"url": "ws://a"}, {"command": ["no-such-program"]}, {"url": "http://a", "max_sessions": 0}):
        with pytest.raises(ValueError, match=r"must|set either"):
            OpenEnv(**wrong)


async def test_a_server_of_a_command_is_started_once_and_ended(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(
        "import os, sys\n"
        "from aiohttp import web\n"
        f"sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})\n"
        "from tests.environments.test_openenv import Server\n"
        "open(sys.argv[2], 'a').write(f'{os.getpid()}\\n')\n"
        "async def health(request): return web.Response()\n"
        "server, app = Server(), web.Application()\n"
        "app.add_routes([web.get('/schema', server.schema), web.get('/ws', server.session)])\n"
        "app.add_routes([web.get('/health', health)])\n"
        "web.run_app(app, host='127.0.0.1', port=int(sys.argv[1]), print=None)\n"
    )
    command = [sys.executable, str(tmp_path / "server.py"), "{port}", str(tmp_path / "pids")]

    for _ in range(2):
        game = OpenEnv(command=command)
        await game.reset(PROBLEM, 0)
        assert (await say(game, "end")).done
        await game.close()
    await close_shared()
    [pid] = (tmp_path / "pids").read_text().split()
    assert not Path(f"/proc/{pid}").exists()
