"""JSON Schema of recipe files, for editors and for checks outside megarl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from megarl.config.annotations import UntriedOnGpu
from megarl.config.schema import all_fields, annotated_with, description, section_at

_REFERENCE = {
    "title": "Reference",
    "description": "`${section.field}` of the recipe, `${oc.env:NAME}` of the environment, or `???`: an override "
    "must set it.",
    "type": "string",
    "pattern": r"\$\{.+\}|^\?\?\?$",
}
"""JSON Schema of a reference (`${a.b}`) in place of a value."""
_NOTES = ("description", "default", "deprecated")
"""Keys of a property that are for readers. They stay outside its `anyOf`, because editors show only outer ones."""


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a recipe file: sections, fields, types, bounds, defaults, descriptions.

    Checks of several fields are not part of it.
    """
    from megarl.config import Recipe

    schema = Recipe.model_json_schema(schema_generator=_WithoutTitles)
    for name, field in all_fields().items():
        if annotated_with(name, UntriedOnGpu):
            parent, _, field_name = name.rpartition(".")
            section = section_at(parent)
            assert section is not None
            # pydantic's description is the docstring without the notes of annotations.
            schema["$defs"][section.__name__]["properties"][field_name]["description"] = description(field)
    definitions = {name: _allow_references(kind) for name, kind in schema.pop("$defs").items()}
    # data.train is not required: a mixture's source may have it, which JSON Schema cannot express.
    definitions["DataConfig"].pop("required")
    recipe = _allow_references(schema)
    recipe["required"] = [name for name in recipe["required"] if name != "data"]
    head = {"$schema": GenerateJsonSchema.schema_dialect}
    return {**head, **recipe, "$defs": {**definitions, "Reference": _REFERENCE}}


class _WithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        # pydantic's title of `tp` is "Tp". Editors show the description under it.
        return False


def _allow_references(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with a reference (`${a.b}`) accepted in place of each value inside, except sections."""
    new_schema = dict(schema)
    if "properties" in new_schema:
        new_schema["properties"] = {
            name: _allow_reference(inner_schema) for name, inner_schema in new_schema["properties"].items()
        }
    for keyword in ("items", "additionalProperties"):
        if isinstance(new_schema.get(keyword), Mapping):
            new_schema[keyword] = _allow_reference(new_schema[keyword])
    if "prefixItems" in new_schema:
        new_schema["prefixItems"] = [_allow_reference(inner_schema) for inner_schema in new_schema["prefixItems"]]
    if "anyOf" in new_schema:
        new_schema["anyOf"] = [_allow_references(inner_schema) for inner_schema in new_schema["anyOf"]]
    return new_schema


def _allow_reference(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema that accepts what `schema` accepts, and a reference to another field.

    Unchanged: sections, and schemas that accept every text.
    """
    inner_schema = _allow_references(schema)
    notes = {name: inner_schema.pop(name) for name in _NOTES if name in inner_schema}
    branches = inner_schema.get("anyOf", [inner_schema])
    # No alternative for a section: editors would report all errors inside it at the section's own line.
    if "$ref" in inner_schema or any(branch in ({}, {"type": "string"}) for branch in branches):
        return {**notes, **inner_schema}
    return {**notes, "anyOf": [*branches, {"$ref": "#/$defs/Reference"}]}
