"""Environments behind an OpenEnv server. Each attempt is one websocket session."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from megarl.environments import EnvironmentUnavailableError, Message, Start, Step, Turn
from megarl.environments.shared import get_shared, run_alone
from megarl.files.strict_json import finite_number, make_object
from megarl.processes.supervised_process import SupervisedProcess
from megarl.types import ConfigError, Problem, ToolCall

if TYPE_CHECKING:
    import aiohttp

_MAX_MESSAGE_BYTES = 16 << 20
# Seconds for a started server to become healthy; seconds between tries for a free session.
_START_SECONDS = 120.0
_CAPACITY_SECONDS = 0.1
_HIDDEN_FIELDS = {"done", "reward", "metadata"}
"""Fields of a server's observation that the policy does not see."""


class ServerError(Exception):
    """Raised if an OpenEnv server answers with an error, or with invalid data."""


class UnreachableError(EnvironmentUnavailableError):
    """Raised if an OpenEnv server cannot be reached, or closes the connection during an attempt."""


class OpenEnv:
    """Environment on an OpenEnv server: an existing one at `url`, or one started by megarl with `command`.

    `command` is a program with arguments; `{port}` in them is replaced by a free port.

    The policy's text becomes the field `action` of the action sent; `action_fields` are its other fields. By default
    `action` is the only text field that the server's schema requires. The policy sees the observation's field
    `observation`; by default the only text field, or the whole observation as JSON. With `tools` the policy calls the
    environment's tools (MCP), and a turn without a call ends the attempt.

    The problem's number is the seed of the server's reset; `reset` has the other parameters. At most `max_sessions`
    attempts run at once. If the server accepts fewer sessions, an attempt waits up to `seconds` for a free one.
    `seconds` also limits any answer.
    """

    makes_problems = True

    def __init__(
        self,
        url: str | None = None,
        *,
        command: Sequence[str] | None = None,
        action: str | None = None,
        action_fields: Mapping[str, Any] | None = None,
        observation: str | None = None,
        tools: bool = False,
        reset: Mapping[str, Any] | None = None,
        max_sessions: int = 64,
        seconds: float = 60.0,
    ) -> None:
        if (url is None) == (command is None):
            raise ValueError(
                "set either url (address of an OpenEnv server) or command (program that starts one), not both"
            )
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f"url = {url!r}: must begin with http:// or https://")
        if command is not None and (not command or shutil.which(command[0]) is None):
            raise ValueError(f"command = {list(command)}: must begin with a program on PATH; give the program's path")
        if max_sessions < 1 or seconds <= 0:
            raise ValueError("max_sessions must be at least 1, and seconds must be above 0")
        self._server_key = url or "", tuple(command or ()), max_sessions
        self._action, self._action_fields = action, dict(action_fields or {})
        self._observation, self._has_tools = observation, tools
        self._reset, self._seconds = dict(reset or {}), seconds
        self._connection: aiohttp.ClientWebSocketResponse | None = None
        self._has_session_slot = False

    async def reset(self, problem: Problem, seed: int) -> Start:
        """Wait for a free session of the server, reset it, and return its first observation as the question."""
        self._server = get_shared(self._server_key, lambda: _Server(*self._server_key))
        await self._server.session_slots.acquire()
        self._has_session_slot = True
        async with asyncio.timeout(_START_SECONDS):
            await self._server.start()
        self._action_field = self._action or (None if self._has_tools else await self._server.find_text_field())
        answer = await self._start_session({"type": "reset", "data": {**self._reset, "seed": problem.index}})
        question = {"role": "user", "content": self._read_observation(answer)}
        messages = (*problem.messages[:-1], question)
        if not self._has_tools:
            return Start(messages)
        tool_entries = (await self._send_action({"type": "list_tools"}))["observation"].get("tools")
        if not isinstance(tool_entries, list):
            raise ServerError("tools = true: the OpenEnv server lists no tools; set tools to false")
        return Start(messages, tuple(_tool_schema(tool) for tool in tool_entries))

    async def step(self, turn: Turn) -> Step:
        """Send the policy's text or tool calls to the server, and return its observation and reward."""
        if self._has_tools:
            return await self._call_tools(turn.calls)
        answer = await self._send_action({**self._action_fields, str(self._action_field): turn.text})
        is_done = bool(answer.get("done"))
        messages = () if is_done else ({"role": "user", "content": self._read_observation(answer)},)
        return Step(messages, _read_reward(answer), is_done)

    async def close(self) -> None:
        if self._connection is not None:
            # A silent server must not delay the end of the attempt.
            with suppress(Exception):
                await asyncio.wait_for(self._connection.close(), 1.0)
        if self._has_session_slot:
            self._has_session_slot = False
            self._server.session_slots.release()

    def check(self) -> None:
        """Start a session before a run. Raises ConfigError if this fails."""
        try:
            run_alone(self._try_session)
        except Exception as error:
            server_text = self._server_key[0] or " ".join(self._server_key[1])
            raise ConfigError(f"openenv {server_text}: {type(error).__name__}: {error}") from error

    async def _try_session(self) -> None:
        try:
            await self.reset(Problem(0, ({"role": "user", "content": "."},), (), ""), 0)
        finally:
            await self.close()

    async def _call_tools(self, calls: Sequence[ToolCall]) -> Step:
        """Send a turn's tool calls to the server. Returns the replies in order, and the sum of their rewards."""
        messages: list[Message] = []
        rewards: list[float] = []
        # After a call that ends the episode, the server accepts no further call.
        is_done = not calls
        for call in calls:
            reply = f"error: {call.error}"
            if call.error is None and not is_done:
                action = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments or {})}
                answer = await self._send_action(action)
                is_done = bool(answer.get("done"))
                if (reward := _read_reward(answer)) is not None:
                    rewards.append(reward)
                observation = answer["observation"]
                error = observation.get("error")
                reply = f"error: {_read_result(error)}" if error else _read_result(observation.get("result"))
            messages.append({"role": "tool", "name": call.name, "tool_call_id": call.id, "content": reply})
        return Step(tuple(messages), sum(rewards) if rewards else None, is_done)

    async def _start_session(self, reset: Mapping[str, Any]) -> dict[str, Any]:
        """Start a session and return its first observation. Waits while the server has no free session."""
        async with asyncio.timeout(self._seconds):
            while True:
                self._connection = await self._server.connect()
                try:
                    return await self._request_observation(reset)
                except _NoFreeSessionError:
                    await self._connection.close()
                    await asyncio.sleep(_CAPACITY_SECONDS)

    async def _send_action(self, action: Mapping[str, Any]) -> dict[str, Any]:
        async with asyncio.timeout(self._seconds):
            return await self._request_observation({"type": "step", "data": action})

    async def _request_observation(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the server's observation. Raises ServerError and UnreachableError."""
        assert self._connection is not None
        try:
            await self._connection.send_str(json.dumps(message))
            answer = json.loads(await self._connection.receive_str(), object_pairs_hook=make_object)
        except (TypeError, ConnectionError) as error:  # TypeError: not a text message, such as the end.
            raise UnreachableError(f"the server closed the connection: {error}") from None
        except ValueError as error:
            raise ServerError(f"the server's answer is not valid JSON: {error}") from None
        data = answer.get("data") if isinstance(answer, dict) else None
        if isinstance(data, dict) and answer.get("type") == "error":
            if data.get("code") == "CAPACITY_REACHED":
                raise _NoFreeSessionError
            raise ServerError(f"{data.get('code')}: {data.get('message')} {data.get('errors', '')}"[:1000])
        if not isinstance(data, dict) or not isinstance(data.get("observation"), dict):
            raise ServerError(f"the OpenEnv server's answer has no observation: {answer!r:.200}")
        return data

    def _read_observation(self, answer: Mapping[str, Any]) -> str:
        """Return the configured field of an observation, its only text, or all fields as JSON."""
        observation = answer["observation"]
        if self._observation is not None:
            if self._observation not in observation:
                raise ServerError(f"the observation has no field {self._observation!r}, only {', '.join(observation)}")
            return _read_result(observation[self._observation])
        shown_fields = {name: value for name, value in observation.items() if name not in _HIDDEN_FIELDS}
        texts = [value for value in shown_fields.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(shown_fields, ensure_ascii=False)


class _NoFreeSessionError(Exception):
    """Raised if the server has no free session."""


def _read_result(value: Any) -> str:
    """Return a tool's result as text. MCP tools wrap the text in `data`, or in parts of `content`."""
    if isinstance(value, Mapping):
        if isinstance(value.get("message"), str):
            return value["message"]
        if "data" in value:
            return _read_result(value["data"])
        content = value.get("content")
        if isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content):
            return "\n".join(str(part["text"]) for part in content)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read_reward(answer: Mapping[str, Any]) -> float | None:
    """Return an answer's reward, or None. Raises ServerError unless it is a finite number."""
    reward = answer.get("reward")
    if reward is None:
        return None
    finite_reward = float(reward) if isinstance(reward, bool) else finite_number(reward)
    if finite_reward is None:
        raise ServerError(f"the reward is {reward!r:.80}, not a finite number")
    return finite_reward


def _tool_schema(tool: Any) -> dict[str, Any]:
    function_schema = {
        "name": tool["name"],
        "description": tool.get("description", ""),
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function_schema}


class _Server:
    """An OpenEnv server and its sessions. With `command` this object starts and stops the server's process."""

    def __init__(self, url: str, command: tuple[str, ...], max_sessions: int) -> None:
        self.session_slots = asyncio.Semaphore(max_sessions)
        self._url, self._command = url.rstrip("/"), command
        self._lock = asyncio.Lock()
        self._process: SupervisedProcess | None = None
        self._client: aiohttp.ClientSession | None = None
        self._text_field: str | None = None

    async def start(self) -> None:
        """Start the server if needed, and wait until its health check succeeds."""
        async with self._lock:
            if self._client is None:
                # Imported here: only recipes with this environment need aiohttp.
                import aiohttp

                # No limit on connections: `max_sessions` is the limit.
                connector = aiohttp.TCPConnector(limit=0)
                self._client = aiohttp.ClientSession(connector=connector)
            if not self._command or (self._process is not None and not self._process.has_ended):
                return
            await self._end_process()
            # Another process may take the port first. Then the server ends, and its output is quoted in the error.
            port = _free_port()
            self._url = f"http://127.0.0.1:{port}"
            command = [part.replace("{port}", str(port)) for part in self._command]
            self._process = SupervisedProcess(command)
            while not await self._is_healthy():
                if self._process.has_ended:
                    server_end = await self._process.stop()
                    output = " ".join((server_end.stderr or server_end.stdout).split())[-400:]
                    raise ServerError(f"{self._command[0]} {server_end}: {output}")
                await asyncio.sleep(0.1)

    async def connect(self) -> aiohttp.ClientWebSocketResponse:
        """Open a new websocket session. Raises UnreachableError."""
        assert self._client is not None
        import aiohttp

        try:
            return await self._client.ws_connect(f"{self._url}/ws", max_msg_size=_MAX_MESSAGE_BYTES)
        except aiohttp.ClientError as error:
            raise UnreachableError(f"{self._url}: the OpenEnv server opened no session: {error}") from None

    async def find_text_field(self) -> str:
        """Return the name of the action's text field: the only one that the server's schema requires.

        Raises ServerError if no field or several fields qualify.
        """
        if self._text_field is not None:
            return self._text_field
        assert self._client is not None
        import aiohttp

        try:
            async with self._client.get(f"{self._url}/schema") as answer:
                action = (await answer.json())["action"]
        except (aiohttp.ClientError, KeyError, ValueError) as error:
            raise UnreachableError(f"{self._url}/schema: cannot be read: {error}") from None
        required_fields = action.get("required", ())
        text_fields = [name for name, part in action.get("properties", {}).items() if part.get("type") == "string"]
        # Optional fields count only if no text field is required.
        text_fields = [name for name in text_fields if name in required_fields] or text_fields
        if len(text_fields) != 1:
            raise ServerError(
                "rollout.environment_kwargs.action: not set, and the server's schema does not determine it; set it to "
                "the action's field for the policy's text (text fields of the schema: "
                f"{', '.join(text_fields) or 'none'})"
            )
        self._text_field = text_fields[0]
        return text_fields[0]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        await self._end_process()

    async def _end_process(self) -> None:
        if self._process is not None:
            await self._process.stop()

    async def _is_healthy(self) -> bool:
        assert self._client is not None
        import aiohttp

        try:
            async with self._client.get(f"{self._url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
