"""Environments whose tools are Python functions. Each call gets a reply; a turn without a call ends the attempt.

    from megarl.environments.tools import ToolEnvironment, tool

    class Shop(ToolEnvironment):
        prices = {"tea": 3, "milk": 1}

        @tool
        async def price(self, item: str) -> int:
            \"\"\"The price of an item in euros.

            item: its name, in the singular.
            \"\"\"
            return self.prices[item]

If this is the file `shop.py`, a recipe names it `rollout.environment: shop.py:Shop`. The chat template shows the policy
the tools' JSON schemas. These are made from the functions' signatures and docstrings, or given (`tool(schema=...)`).
The recipe's reward functions score the last turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError

from megarl.environments import TOOL_SCHEMA, EnvironmentUnavailableError, Message, Start, Step, Turn
from megarl.tracking.metric_rows import PER_ATTEMPT, MetricRow
from megarl.types import Problem, ToolCall

METRICS = (
    MetricRow("tools/NAME/calls", "count", "calls of a tool", PER_ATTEMPT),
    MetricRow("tools/NAME/errors", "count", "calls of a tool with an error or a timeout", PER_ATTEMPT),
    MetricRow("tools/NAME/seconds", "seconds", "running time of a tool", PER_ATTEMPT),
    MetricRow("tools/invalid", "count", "calls of an unknown tool or with wrong arguments", PER_ATTEMPT),
    MetricRow(
        "tools/shortened",
        "count",
        "replies shortened in the middle, to the environment's or the recipe's limit",
        PER_ATTEMPT,
    ),
)

_MARKER = "\n[... {} characters and more left out ...]\n"
"""Replaces the middle of a long reply, with the number of omitted characters."""
_WRITTEN_MARKER = re.compile(r"\d+".join(map(re.escape, _MARKER.split("{}"))))

CALL_THREAD = "call of "
"""Prefix of the names of threads that run a tool's function."""


_PARAMETER_TYPES = "_megarl_parameter_types"
"""Attribute of a tool's method: the type of each parameter."""


def tool(function: Callable[..., Any] | None = None, *, schema: Mapping[str, Any] | None = None) -> Any:
    """Mark a method of a `ToolEnvironment` as a tool. `schema` replaces the JSON schema of its parameters.

    Methods with `async def` run concurrently and must not block. Other methods may block: they run in threads, one at a
    time within an attempt. By default they make attempts run in processes (`rollout.environment_processes`).

    Parameters need type hints that pydantic can read from JSON: str, int, float, bool, list, dict, Literal, X | None,
    enumerations, dataclasses, pydantic models, Annotated[int, Field(ge=1)]. The method gets values of these types.
    """

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        setattr(method, TOOL_SCHEMA, make_tool_schema(method, schema))
        setattr(method, _PARAMETER_TYPES, _parameter_types(method) if schema is None else {})
        return method

    return mark if function is None else mark(function)


def make_tool_schema(function: Callable[..., Any], parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a function's tool schema in OpenAI's form, {"type": "function", "function": {...}}.

    The docstring up to the first empty line describes the tool. Later lines `name: text` describe parameters. Raises
    TypeError for a parameter without a type known to JSON.
    """
    description, parameter_texts = _split_docstring(inspect.getdoc(function) or "")
    if parameters is None:
        type_adapters = _parameter_types(function)
        for name, adapter in type_adapters.items():
            try:
                adapter.json_schema()
            except PydanticUserError as error:
                raise _unknown_type_error(function, name, error) from None
        # Made in one call: a $ref is relative to the root, and classes of one name need different names there.
        schemas, shared_schema = TypeAdapter.json_schemas(
            [(name, "validation", adapter) for name, adapter in type_adapters.items()]
        )
        properties = {name: dict(schemas[name, "validation"]) for name in type_adapters}
        definitions = shared_schema.get("$defs", {})
        for name in properties.keys() & parameter_texts.keys():
            properties[name]["description"] = parameter_texts[name]
        named_parameters = inspect.signature(function).parameters
        required_names = [name for name in properties if named_parameters[name].default is inspect.Parameter.empty]
        parameters = {
            "type": "object",
            "properties": properties,
            "required": required_names,
            "additionalProperties": False,
        } | ({"$defs": definitions} if definitions else {})
    function_schema = {"name": function.__name__, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function_schema}


def _split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of a tool, and those of its parameters by name."""
    description, _, parameter_lines = text.partition("\n\n")
    parameter_texts = {}
    for line in parameter_lines.splitlines():
        name, colon, parameter_text = line.strip().partition(":")
        if colon and name.isidentifier() and parameter_text.strip():
            parameter_texts[name] = parameter_text.strip()
    return " ".join(description.split()), parameter_texts


def _parameter_types(function: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    """Return pydantic's adapter for the type of each parameter except `self`.

    Raises TypeError for a parameter without a type, or with a type unknown to pydantic.
    """
    hints = get_type_hints(function, include_extras=True)
    types = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        if name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"tool {function.__name__}: parameter {name} needs a type, and may not be * or **")
        try:
            types[name] = TypeAdapter(hints[name])
        except PydanticUserError as error:
            raise _unknown_type_error(function, name, error) from None
    return types


def _unknown_type_error(function: Callable[..., Any], name: str, error: PydanticUserError) -> TypeError:
    reason = str(error).partition(". ")[0]
    return TypeError(
        f"tool {function.__name__}: parameter {name} has a type unknown to JSON ({reason}); use str, int, float, bool, "
        "list, dict or a dataclass"
    )


class ToolEnvironment:
    """Environment with the problem's messages and the tools of its class. A turn without a call ends the attempt.

    Each tool call gets one reply, a message of role `tool`, in the order of the calls. The reply is an error text for
    an invalid call, for a tool that raises and for a tool slower than `tool_seconds`. If a tool raises
    EnvironmentUnavailableError, the attempt is retried, because the policy is not at fault.

    A reply longer than `max_reply_characters` is shortened in the middle (`rollout.budget.reply_tokens` is a limit in
    tokens). `rollout.budget.invalid_calls` limits the invalid calls in a row before the attempt ends.
    """

    def __init__(self, *, max_reply_characters: int = 4000, tool_seconds: float = 30.0) -> None:
        if max_reply_characters < 100 or tool_seconds <= 0:
            raise ValueError("max_reply_characters must be at least 100, tool_seconds above 0")
        self.max_reply_characters = max_reply_characters
        self.tool_seconds = tool_seconds
        # Blocking tools may change the environment's state, so calls of an attempt must not overlap.
        self._blocking_call_lock = asyncio.Lock()
        method_names = [name for name in dir(type(self)) if hasattr(getattr(type(self), name), TOOL_SCHEMA)]
        self.tools: tuple[Mapping[str, Any], ...] = tuple(
            getattr(getattr(self, name), TOOL_SCHEMA) for name in method_names
        )
        self._functions: dict[str, Callable[..., Any]] = {
            schema["function"]["name"]: getattr(self, name)
            for name, schema in zip(method_names, self.tools, strict=True)
        }

    async def reset(self, problem: Problem, seed: int) -> Start:
        return Start(problem.messages, self.tools)

    async def step(self, turn: Turn) -> Step:
        """Run a turn's tool calls, and return their results as messages. A turn without calls ends the attempt."""
        metrics = {
            f"tools/{name}/{measure}": 0.0 for name in self._functions for measure in ("calls", "errors", "seconds")
        }
        metrics |= {"tools/invalid": 0.0, "tools/shortened": 0.0}
        if not turn.calls:
            return Step(done=True, metrics=metrics)
        invalid_calls = [call for call in turn.calls if call.error is not None]
        is_last_call_cut = turn.finish_reason == "length" and turn.calls[-1].error is not None
        # The length limit broke the last call, not the policy.
        metrics["tools/invalid"] = float(len(invalid_calls) - is_last_call_cut)
        messages = await asyncio.gather(*(self._reply_to_call(call, metrics) for call in turn.calls))
        return Step(tuple(messages), metrics=metrics)

    async def close(self) -> None:
        pass

    async def _reply_to_call(self, call: ToolCall, metrics: dict[str, float]) -> Message:
        text = f"error: {call.error}" if call.error is not None else await self._run_tool(call, metrics)
        shortened_text = cut_in_the_middle(text, self.max_reply_characters)
        metrics["tools/shortened"] += shortened_text != text
        return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": shortened_text}

    async def _run_tool(self, call: ToolCall, metrics: dict[str, float]) -> str:
        """Carry out a tool call and return its result, or its error, as text."""
        function = self._functions[call.name]
        metrics[f"tools/{call.name}/calls"] += 1
        start_time = time.perf_counter()
        try:
            async with self._call_lock(function):
                # Start the time again after the lock: waiting for another call does not count.
                start_time = time.perf_counter()
                types: Mapping[str, TypeAdapter[Any]] = getattr(function, _PARAMETER_TYPES)
                values = {
                    name: types[name].validate_python(value) if name in types else value
                    for name, value in (call.arguments or {}).items()
                }
                result = await asyncio.wait_for(start_call(function, values), self.tool_seconds)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except TimeoutError:
            metrics[f"tools/{call.name}/errors"] += 1
            return f"error: the tool took longer than {self.tool_seconds:g} seconds"
        except EnvironmentUnavailableError:
            raise
        except Exception as error:  # A user's tool may raise anything.
            metrics[f"tools/{call.name}/errors"] += 1
            return f"error: {error}" if isinstance(error, ToolError) else f"error: {type(error).__name__}: {error}"
        finally:
            metrics[f"tools/{call.name}/seconds"] += time.perf_counter() - start_time

    def _call_lock(self, function: Callable[..., Any]) -> contextlib.AbstractAsyncContextManager[Any]:
        return contextlib.nullcontext() if inspect.iscoroutinefunction(function) else self._blocking_call_lock


class ToolError(Exception):
    """Raised by a tool. Its text becomes the reply to the policy."""


def start_call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Awaitable[Any]:
    """Start a function call, and return an awaitable of its result.

    A blocking function runs in a daemon thread, so a hanging call does not keep the process from exiting.
    """
    if inspect.iscoroutinefunction(function):
        return function(**arguments)
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def complete(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not result.done():
            set_outcome(outcome)

    def run_in_thread() -> None:
        try:
            value = function(**arguments)
        except Exception as error:
            setter_and_outcome = (result.set_exception, error)
        else:
            setter_and_outcome = (result.set_result, value)
        with contextlib.suppress(RuntimeError):  # The loop has ended, so nothing awaits the result.
            loop.call_soon_threadsafe(complete, *setter_and_outcome)

    threading.Thread(target=run_in_thread, name=f"{CALL_THREAD}{function.__name__}", daemon=True).start()
    return result


def cut_in_the_middle(text: str, max_characters: int) -> str:
    """Return the text. If it is longer than `max_characters`, a marker replaces its middle."""
    if len(text) <= max_characters:
        return text
    marker = _MARKER.format(len(text) - max_characters)
    num_shown = max(0, max_characters - len(marker))
    return text[: num_shown - num_shown // 2] + marker + text[len(text) - num_shown // 2 :]


def is_shortened(text: str) -> bool:
    return _WRITTEN_MARKER.search(text) is not None
