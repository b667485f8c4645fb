"""Tools and tool calls of data records, converted to the form that chat templates expect.

Data sets write both in several forms. Tools are a list or JSON text, each in OpenAI's form or flat. The arguments of a
call are an object or JSON text. Missing calls are null or an empty list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.data.tools.schemas import ToolSchema, check_tools
from megarl.files.strict_json import MEDIUM, parse, shown

_CALLS_FORM = '[{"function": {"name": "...", "arguments": {...}}}]'
_SCHEMA_KEYS_ELSEWHERE = ("input_schema", "inputSchema")
"""Keys of a tool's JSON schema in other programs: Anthropic's API, and the Model Context Protocol."""
_NULL_KEYS = ("default", "const")
"""Keys of a JSON schema for which null is a value."""
_VALUE_KEYS = (*_NULL_KEYS, "enum", "examples")
"""Keys of a JSON schema holding values rather than schemas."""


def with_standard_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its tool calls as {"function": {"name", "arguments"}}, arguments as an object.

    `tool_calls` of null or [] are removed: exports of `datasets` have them in every message. The list and each call may
    be JSON text. Raises ValueError, without the message's place, for unreadable calls.
    """
    if "tool_calls" not in message:
        return message
    try:
        calls = _parse_if_text(message["tool_calls"])
        calls = [_parse_if_text(call) for call in calls] if isinstance(calls, list) else calls
    except ValueError as error:
        raise ValueError(f"has tool_calls {shown(message['tool_calls'])}: {error}; give {_CALLS_FORM}") from error
    if calls is None or calls == []:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    if message.get("role") != "assistant":
        raise ValueError(f"has tool_calls {shown(calls)}; only messages of the role assistant may call tools")
    if not isinstance(calls, list):
        raise ValueError(f"has tool_calls {shown(calls)}; give a list of calls: {_CALLS_FORM}")
    return {**message, "tool_calls": [_standardize_call(call, call_index) for call_index, call in enumerate(calls)]}


def _standardize_call(call: Any, call_index: int) -> Mapping[str, Any]:
    location = f"has tool_calls[{call_index}]"
    is_flat = isinstance(call, Mapping) and "function" not in call and "arguments" in call
    function = call if is_flat else call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{location} {shown(call)}; give a list of calls: {_CALLS_FORM}")
    try:
        arguments = _read_arguments(function.get("arguments"))
    except ValueError as error:
        raise ValueError(
            f"{location} with arguments {shown(function.get('arguments'))}: {error}; give an object, {{}} for a call "
            "without arguments"
        ) from error
    if is_flat:
        other_keys = {name: value for name, value in call.items() if name not in ("name", "arguments")}
        return {"type": "function", **other_keys, "function": {"name": function["name"], "arguments": arguments}}
    return {**call, "function": {**function, "arguments": arguments}}


def _read_arguments(value: Any) -> Mapping[str, Any]:
    """Return a call's arguments, an object or its JSON text. Raises ValueError for other values."""
    if value is None:
        raise ValueError("the arguments are missing")
    if isinstance(value, str):
        # OpenAI's own form. Templates would quote the text once more, as a JSON string.
        value = _parse_json(value)
    if not isinstance(value, Mapping):
        raise ValueError("the arguments are not an object")
    return value


def standard_tools(value: Any) -> tuple[ToolSchema, ...]:
    """Return a record's tools, each as {"type": "function", "function": {...}}.

    `value` is the record's field: a list of tools, the same list as JSON text, or null or empty text for no tools. Each
    tool may itself be JSON text, or have the flat form {"name", "parameters"}. Null entries of a tool are dropped:
    exports in columns give all tools the same keys. Raises ValueError for unreadable values, and the errors of
    `check_tools`.
    """
    if isinstance(value, str):
        value = _parse_json(value) if value.strip() else None
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError("not a list of JSON schemas")
    parsed = (_parse_json(tool) if isinstance(tool, str) else tool for tool in value)
    tools = tuple(_standardize_tool(_without_nulls(tool)) for tool in parsed)
    check_tools(tools)
    return tools


def _without_nulls(value: Any) -> Any:
    """Return a tool, or a part of its schema, without nulls, except nulls that are values of the schema."""
    if isinstance(value, Mapping):
        return {
            name: item if name in _VALUE_KEYS else _without_nulls(item)
            for name, item in value.items()
            if item is not None or name in _NULL_KEYS
        }
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _standardize_tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or "function" in tool or "name" not in tool:
        return tool
    if foreign_key := next((key for key in _SCHEMA_KEYS_ELSEWHERE if key in tool), None):
        raise ValueError(f"the tool {tool['name']!r:.80} has {foreign_key!r}; rename this key to 'parameters'")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _parse_if_text(value: Any) -> Any:
    return _parse_json(value) if isinstance(value, str) else value


def _parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError for broken text, repeated keys, NaN and deep nesting."""
    try:
        return parse(text.encode(), MEDIUM)
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from None
