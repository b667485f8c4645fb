"""Schemas of the tools that a policy may call, in the form of chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

ToolSchema = Mapping[str, Any]
"""A tool in the form of chat templates: {"type": "function", "function": {"name", "description", "parameters"}}."""


def check_tools(tools: Sequence[ToolSchema]) -> None:
    """Raise ValueError for a tool without a name, for invalid JSON schemas as parameters, and for a repeated name."""
    from jsonschema import Draft202012Validator, SchemaError

    names: set[str] = set()
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise ValueError(
                f'a tool is {tool!r:.80}; it must have the form {{"type": "function", "function": {{"name": ...}}}}'
            )
        if name in names:
            raise ValueError(f"two tools have the name {name!r}; each tool needs a name of its own")
        names.add(name)
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise ValueError(f"the parameters of tool {name!r} are not a JSON schema: they must be an object")
        try:
            Draft202012Validator.check_schema(dict(parameter_schema(tool)))
        except SchemaError as error:
            raise ValueError(f"the parameters of tool {name!r} are not a JSON schema: {error.message}") from error


def parameter_schema(tool: ToolSchema) -> Mapping[str, Any]:
    """Return the JSON schema of a tool's arguments. Without parameters, any object is valid."""
    return tool["function"].get("parameters") or {"type": "object"}


def tool_named(name: str, tools: Sequence[ToolSchema]) -> ToolSchema | None:
    return next((tool for tool in tools if tool["function"]["name"] == name), None)


def argument_schemas(name: str, tools: Sequence[ToolSchema]) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments, by argument name. Empty: an unknown tool."""
    tool = tool_named(name, tools)
    return parameter_schema(tool).get("properties", {}) if tool else {}


def arguments_fault(arguments: Mapping[str, Any], tool: ToolSchema) -> str | None:
    from jsonschema.exceptions import best_match

    error = best_match(_cached_validator(json.dumps(parameter_schema(tool), sort_keys=True)).iter_errors(arguments))
    if error is None:
        return None
    path = ".".join(str(part) for part in error.absolute_path)
    return f"argument {path}: {error.message:.200}" if path else f"arguments: {error.message:.200}"


@lru_cache(maxsize=256)
def _cached_validator(schema: str) -> Any:
    """Return the validator of a JSON schema. As text, the schema is a hashable key of the cache."""
    return schema_validator(json.loads(schema))


def schema_validator(schema: Mapping[str, Any]) -> Any:
    """Return the validator of a JSON schema. A $ref outside of the schema is an error: no file is read."""
    from jsonschema import Draft202012Validator
    from referencing import Registry

    # The empty registry stops the validator from downloading the target of a $ref.
    return Draft202012Validator(schema, registry=Registry())
