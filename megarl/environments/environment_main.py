"""Main function of a process that runs an environment's attempts, one after the other."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from megarl.environments import Environment, EnvironmentUnavailableError, Start, Step, Turn, environment_maker
from megarl.environments.tools import CALL_THREAD
from megarl.environments.validation import copy_valid_start, copy_valid_step
from megarl.processes.frames import MAX_ERROR_CHARACTERS, Answer, RefusedError
from megarl.types import MegarlError, Problem, ToolCall


def start(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Import an environment by its name in the recipe, and return the function that answers requests.

    A request names a method of the environment in `do`, with its arguments. The answer has the `value` returned, the
    `error` raised, or `unavailable` with the reason. `is_last`: the process cannot run another attempt. Raises
    RefusedError.
    """
    try:
        make = environment_maker(settings["environment"], settings["settings"])
    except MegarlError as error:
        raise RefusedError(str(error)) from error
    return {}, _Player(make, asyncio.Runner()).answer


class _Player:
    def __init__(self, make: Callable[[], Environment], runner: asyncio.Runner) -> None:
        self._make = make
        self._runner = runner
        self._environment: Environment | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request. After an answer with `is_last` the process must be replaced."""
        try:
            return {"value": self._call_environment(request), "is_last": self._is_unfit()}
        except EnvironmentUnavailableError as error:
            return {"unavailable": _error_text(error)}
        except BaseException as error:  # SystemExit and timeouts of some libraries are not Exceptions.
            # After a MemoryError the process may be in any state: it runs no further attempt.
            return {"error": f"{type(error).__name__}: {_error_text(error)}", "is_last": isinstance(error, MemoryError)}

    def _call_environment(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Call the environment's method in `do`: reset, step or close. Return its value as JSON values."""
        if request["do"] == "reset":
            self._environment = self._make()
            fields = request["problem"]
            tuple_fields = {name: tuple(fields[name]) for name in ("messages", "prompt_token_ids", "tools")}
            problem = Problem(**{**fields, **tuple_fields})
            return _start_values(copy_valid_start(self._call(self._environment.reset, problem, request["seed"])))
        if request["do"] == "step":
            assert self._environment is not None
            turn = request["turn"]
            calls = tuple(ToolCall(**call) for call in turn["calls"])
            return _step_values(copy_valid_step(self._call(self._environment.step, Turn(**{**turn, "calls": calls}))))
        # Forget the environment first, so that a failing `close` is not called again.
        environment, self._environment = self._environment, None
        if environment is not None:
            self._call(environment.close)
        return None

    def _call(self, method: Callable[..., Any], *arguments: object) -> Any:
        result = method(*arguments)
        return self._runner.run(_await_result(result)) if inspect.isawaitable(result) else result

    def _is_unfit(self) -> bool:
        """Whether a tool of the last attempt still runs in a thread of this process."""
        return self._environment is None and any(t.name.startswith(CALL_THREAD) for t in threading.enumerate())


async def _await_result(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _start_values(start: Start) -> dict[str, Any]:
    return {
        "messages": list(map(dict, start.messages)),
        "tools": list(map(dict, start.tools)),
        "state": start.state,
        "role": start.role,
    }


def _step_values(step: Step) -> dict[str, Any]:
    """Return a step as JSON values. NumPy numbers become Python numbers."""
    return {
        "messages": list(map(dict, step.messages)),
        "reward": None if step.reward is None else float(step.reward),
        "done": bool(step.done),
        "answer_correct": None if step.answer_correct is None else bool(step.answer_correct),
        "metrics": {str(name): float(value) for name, value in step.metrics.items()},
        "state": step.state,
    }


def _error_text(error: BaseException) -> str:
    try:
        return str(error)[:MAX_ERROR_CHARACTERS]
    except Exception:
        return "its text cannot be read"
