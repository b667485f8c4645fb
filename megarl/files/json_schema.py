"""Validation of JSON values by a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def schema_validator(schema: Mapping[str, Any]) -> Any:
    """Return the validator of a JSON schema. It never reads another file: a $ref outside of the schema is an error."""
    from jsonschema import Draft202012Validator
    from referencing import Registry

    # The empty registry stops the validator from downloading the target of a $ref.
    return Draft202012Validator(schema, registry=Registry())
