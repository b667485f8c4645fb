"""The base of all sections of a recipe."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A part of the recipe: immutable, and a key it does not know is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _not_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """true and false are not the numbers 1 and 0, which pydantic would make of them."""
        given = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(item, bool) for item in given) and not _takes_bool(
            cls.model_fields[info.field_name or ""].annotation
        ):
            raise PydanticCustomError("boolean", "is true or false, which this field does not take")
        return value


def _takes_bool(annotation: Any) -> bool:
    """Whether true and false are among the values of a type."""
    return annotation in (bool, Any) or any(map(_takes_bool, get_args(annotation)))
