"""Annotations of recipe fields: when a field has an effect, library settings that it decides, untried values.

They stand in `Annotated`, after the field's type:

    ranks: Annotated[PositiveInt | None, OnlyIf(SEPARATE)] = None

Errors about fields without effect, refused settings of vLLM and Megatron-Core, and notes about values that have not run
on a GPU are made from them. Names of fields in other programs are in `megarl.config.hints.foreign`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.config.schema import DescriptionNote, value_at

if TYPE_CHECKING:
    from megarl.config import Recipe


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition under which a recipe field has an effect, for example `rollout.placement` being separate.

    `fields` are the names of the fields that decide it. `remedy` says how a user can fulfil it.
    """

    fields: tuple[str, ...]
    remedy: str
    holds: Callable[[Recipe], bool]
    example: str = ""
    """Command-line overrides fulfilling the condition, for example `rollout.placement=separate`. The generated page
    MIGRATION.md shows them."""
    is_alternative: bool = False
    """True if the annotated and the deciding field are two ways to write one setting, for example warmup_steps and
    warmup_fraction. A command-line override of one then removes the recipe file's value of the other."""

    def state(self, recipe: Recipe) -> str:
        """Return the deciding fields with their values, for an error message: `under loop=sft`, `without
        reward.model`."""
        values = {field: value_at(recipe, field) for field in self.fields}
        absent = [field for field, value in values.items() if value is None or value == {}]
        texts = {name: ", ".join(value) if isinstance(value, dict) else value for name, value in values.items()}
        present = [f"{field}={texts[field]}" for field in values if field not in absent]
        parts = ["under " + " and ".join(present)] if present else []
        parts += ["without " + " or ".join(absent)] if absent else []
        return " ".join(parts)


@dataclass(frozen=True, slots=True, init=False)
class OnlyIf:
    """Conditions under which the annotated field, or every field of the annotated section, has an effect. All must
    hold.

    A field inside a section inherits the section's conditions. If the field has its own condition on the same deciding
    field, it replaces the inherited one. An item may be a function from the section's dotted name to the condition, for
    sections used at several places of the recipe.
    """

    conditions: tuple[Condition | Callable[[str], Condition], ...]

    def __init__(self, *conditions: Condition | Callable[[str], Condition]) -> None:
        object.__setattr__(self, "conditions", conditions)


@dataclass(frozen=True, slots=True)
class UntriedOnGpu(DescriptionNote):
    """Values of the annotated field that have not run on a GPU. tests/gpu/README.md lists the runs on GPUs.

    The field's description says so, and so does a start on a GPU with such a value, which is any but the default.
    """

    values: str
    """The values in words, for example `flex`."""

    def __str__(self) -> str:
        return f"Untried on a GPU: {self.values}."


@dataclass(frozen=True, slots=True)
class KeywordOf:
    """The annotated field is a keyword argument of a formula (a loss, an advantage estimator), chosen by another field.

    It has an effect only if the other field has one, and if the chosen formula takes the keyword.
    """

    formula: str
    """Name of the recipe field that selects the formula, for example algorithm.advantage."""
    name: str | None = None
    """Name of the formula's keyword argument. Default: the recipe field's own name."""


@dataclass(frozen=True, slots=True)
class Decides:
    """Settings of vLLM and Megatron-Core determined by the annotated recipe field. Users must set the recipe field
    instead.

    A text has several names separated by blanks.
    """

    vllm: str = ""
    """Names of the fields of vLLM's EngineArgs set by this recipe field."""
    megatron: str = ""
    """Names of the fields of Megatron-Core's TransformerConfig set by this recipe field."""
    experts: str = ""
    """Names of the fields of Megatron-Core's TransformerConfig set by this recipe field for mixture-of-experts models
    only."""
    # With `none` users may set these through trainer.megatron.
    recompute: str = ""
    """Names of the fields of Megatron-Core's TransformerConfig set by this recipe field, unless `trainer.recompute` is
    `none`."""
    fp8: str = ""
    """Names of the fields of Megatron-Core's TransformerConfig set by this recipe field, unless `trainer.fp8` is
    `none`."""
