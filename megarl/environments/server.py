"""The main function of an environment's process: it plays one attempt after the other, asked step by step."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from megarl.environments import Environment, EnvironmentUnavailableError, Start, Step, Turn, environment_maker
from megarl.environments.answers import checked_start, checked_step
from megarl.environments.tools import CALL_THREAD
from megarl.platform.frames import UnsendableError, receive, send
from megarl.platform.processes import limit_memory
from megarl.types import MegarlError, Problem, ToolCall

MAX_ERROR_CHARACTERS = 4000


def serve(connection: socket.socket) -> None:
    """Answer until the driver closes the connection.

    The first message has the recipe's name of the environment, its settings and a limit of memory; the answer is that
    it is ready, or why it is refused. Each later one has a method with what it is given, and a number, which the answer
    repeats: the `value`, or the `error` that it raised, or why it is `unavailable`. An answer that `is_last` says that
    the process is not fit for another attempt.
    """
    with suppress(EOFError, OSError):
        start = receive(connection, None)
        try:
            make = environment_maker(start["environment"], start["settings"])
        except MegarlError as error:
            send(connection, {"refused": str(error)[:MAX_ERROR_CHARACTERS]})
            return
        limit_memory(start["memory_bytes"])
        send(connection, {"ready": True})
        process = os.getpid()
        with asyncio.Runner() as runner:
            player = _Player(make, runner)
            while True:
                request = receive(connection, None)
                answer = player.answer(request)
                if os.getpid() != process:
                    # The environment forked, and this is the copy: the connection belongs to the original.
                    os._exit(0)
                try:
                    send(connection, {"id": request["id"], **answer})
                except UnsendableError as error:
                    send(connection, {"id": request["id"], "error": f"TypeError: it gave what is no JSON: {error}"})


class _Player:
    """Plays attempts with the environment that `make` makes, anew at each reset."""

    def __init__(self, make: Callable[[], Environment], runner: asyncio.Runner) -> None:
        self._make = make
        self._runner = runner
        self._environment: Environment | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"value": self._value(request), "is_last": self._is_unfit()}
        except EnvironmentUnavailableError as error:
            return {"unavailable": _text(error)}
        except BaseException as error:  # SystemExit and the time-outs of some libraries are no Exception
            return {"error": f"{type(error).__name__}: {_text(error)}", "is_last": isinstance(error, MemoryError)}

    def _value(self, request: dict[str, Any]) -> dict[str, Any] | None:
        if request["do"] == "reset":
            self._environment = self._make()
            given = request["problem"]
            tuples = {name: tuple(given[name]) for name in ("messages", "prompt_token_ids")}
            problem = Problem(**{**given, **tuples})
            return _start(checked_start(self._called(self._environment.reset, problem, request["seed"])))
        if request["do"] == "step":
            assert self._environment is not None
            turn = request["turn"]
            calls = tuple(ToolCall(**call) for call in turn["calls"])
            return _step(checked_step(self._called(self._environment.step, Turn(**{**turn, "calls": calls}))))
        environment, self._environment = self._environment, None
        if environment is not None:
            self._called(environment.close)
        return None

    def _called(self, method: Callable[..., Any], *given: object) -> Any:
        found = method(*given)
        return self._runner.run(_awaited(found)) if inspect.isawaitable(found) else found

    def _is_unfit(self) -> bool:
        """Between two attempts: a function that hangs still runs in its thread."""
        return self._environment is None and any(t.name.startswith(CALL_THREAD) for t in threading.enumerate())


async def _awaited(found: Awaitable[Any]) -> Any:
    return await found


def _start(start: Start) -> dict[str, Any]:
    return {"messages": list(map(dict, start.messages)), "tools": list(map(dict, start.tools))}


def _step(step: Step) -> dict[str, Any]:
    """The step as JSON has it: numbers of numpy become Python's."""
    return {
        "messages": list(map(dict, step.messages)),
        "reward": None if step.reward is None else float(step.reward),
        "done": bool(step.done),
        "answer_correct": None if step.answer_correct is None else bool(step.answer_correct),
        "metrics": {str(name): float(value) for name, value in step.metrics.items()},
    }


def _text(error: BaseException) -> str:
    try:
        return str(error)[:MAX_ERROR_CHARACTERS]
    except Exception:
        return "its text cannot be had"
