"""Base class of all recipe sections."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A part of the recipe: immutable; unknown keys are errors."""

    # extra: a misspelt key must be an error, not ignored. allow_inf_nan: NaN passes no comparison with a limit.
    # protected_namespaces: some versions of pydantic warn about names like reward.model_weight (prefix model_).
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for numbers: pydantic would read 1 and 0."""
        items = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(item, bool) for item in items) and not _takes_bool(
            cls.model_fields[info.field_name or ""].annotation
        ):
            raise PydanticCustomError("boolean", "is true or false, but this field takes neither")
        return value


def _takes_bool(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(map(_takes_bool, get_args(annotation)))
