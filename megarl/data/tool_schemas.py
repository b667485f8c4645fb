"""The tools that a policy may call, as chat templates take them, and their JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

ToolSchema = Mapping[str, Any]
"""A tool as chat templates take it: {"type": "function", "function": {"name", "description", "parameters"}}."""


def check_tools(tools: Sequence[ToolSchema]) -> None:
    """Raise ValueError for a tool without a name or with parameters that are no JSON schema, and for a name twice."""
    from jsonschema import Draft202012Validator, SchemaError

    names: set[str] = set()
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise ValueError(f'a tool is {tool!r:.80}; give {{"type": "function", "function": {{"name": ...}}}}')
        if name in names:
            raise ValueError(f"two tools have the name {name!r}; give each its own")
        names.add(name)
        try:
            Draft202012Validator.check_schema(dict(parameters_of(tool)))
        except SchemaError as error:
            raise ValueError(f"the parameters of tool {name!r} are no JSON schema: {error.message}") from error


def parameters_of(tool: ToolSchema) -> Mapping[str, Any]:
    """The JSON schema of a tool's arguments; of one that names none, that of any object."""
    return tool["function"].get("parameters") or {"type": "object"}


def tool_named(name: str, tools: Sequence[ToolSchema]) -> ToolSchema | None:
    """The tool of that name; None where there is none."""
    return next((tool for tool in tools if tool["function"]["name"] == name), None)


def properties(name: str, tools: Sequence[ToolSchema]) -> Mapping[str, Any]:
    """The schemas of a tool's arguments by their names; none of an unknown tool."""
    tool = tool_named(name, tools)
    return parameters_of(tool).get("properties", {}) if tool else {}


def fault_of(arguments: Mapping[str, Any], tool: ToolSchema) -> str | None:
    """A message on what does not fit the tool's JSON schema; None: all does."""
    from jsonschema.exceptions import best_match

    error = best_match(_validator(json.dumps(parameters_of(tool), sort_keys=True)).iter_errors(arguments))
    if error is None:
        return None
    place = ".".join(str(part) for part in error.absolute_path)
    return f"argument {place}: {error.message:.200}" if place else f"arguments: {error.message:.200}"


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    return Draft202012Validator(json.loads(schema), registry=Registry())  # nothing is fetched for a $ref
