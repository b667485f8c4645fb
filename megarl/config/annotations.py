"""Annotations of recipe fields: conditions of their effect, library settings that they decide, untried values.

They stand in `Annotated`, after the field's type:

    ranks: Annotated[PositiveInt | None, OnlyIf(SEPARATE)] = None

Three texts are generated from them: errors about fields without effect, errors about refused settings of vLLM and
Megatron-Core, and notices about values untried on a GPU.
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
    """Condition for a recipe field to have an effect, for example `rollout.placement` separate.

    It depends on the recipe fields `fields`. `remedy` says how a user can meet it.
    """

    fields: tuple[str, ...]
    remedy: str
    holds: Callable[[Recipe], bool]
    example: str = ""
    """Command-line overrides that meet the condition, for MIGRATION.md: `rollout.placement=separate`."""
    is_alternative: bool = False
    """Whether two fields are two ways to write one setting, like warmup_steps and warmup_ratio. An override of one on
    the command line then removes the recipe file's value of the other.
    """

    def state(self, recipe: Recipe) -> str:
        """Return the deciding fields with their values for an error: `under loop=sft`, `without reward.model`."""
        values = {field: value_at(recipe, field) for field in self.fields}
        absent_fields = [field for field, value in values.items() if value is None or value == {}]
        texts = {name: ", ".join(value) if isinstance(value, dict) else value for name, value in values.items()}
        present_texts = [f"{field}={texts[field]}" for field in values if field not in absent_fields]
        state_texts = ["under " + " and ".join(present_texts)] if present_texts else []
        state_texts += ["without " + " or ".join(absent_fields)] if absent_fields else []
        return " ".join(state_texts)


@dataclass(frozen=True, slots=True, init=False)
class OnlyIf:
    """Conditions for the annotated field, or all fields of the annotated section, to have an effect. All must hold.

    A field inherits the conditions of its section; its own condition on the same fields replaces an inherited one. Some
    sections occur at several places of the recipe. For them, an item may be a function from the section's dotted name
    to the condition.
    """

    conditions: tuple[Condition | Callable[[str], Condition], ...]

    def __init__(self, *conditions: Condition | Callable[[str], Condition]) -> None:
        object.__setattr__(self, "conditions", conditions)


@dataclass(frozen=True, slots=True)
class UntriedOnGpu(DescriptionNote):
    """Marks a field with values that have never run on a GPU. tests/gpu/README.md lists the runs on GPUs.

    The field's description names these values. A start on a GPU gives a notice if the field is not at its default.
    """

    values: str
    """Untried values in words, for example `flex`."""
    tried: bool | None = None
    """Value to compare with if the default depends on the GPU's memory. None: the field's default."""

    def __str__(self) -> str:
        return f"Untried on a GPU: {self.values}."


@dataclass(frozen=True, slots=True)
class KeywordOf:
    """Marks a field as keyword argument of a formula (loss or advantage estimator) selected by another field.

    The field has an effect only if a formula is selected and has this keyword.
    """

    formula: str
    """Recipe field that selects the formula, for example algorithm.advantage."""
    name: str | None = None
    """Name of the keyword argument. None: the name of the marked field."""


@dataclass(frozen=True, slots=True)
class Decides:
    """Settings of vLLM and Megatron-Core decided by the annotated field, so users cannot set them directly.

    Several names are separated by blanks.
    """

    vllm: str = ""
    """Names of vLLM's EngineArgs fields."""
    megatron: str = ""
    """Names of fields of Megatron-Core's TransformerConfig."""
    experts: str = ""
    """Like `megatron`, for mixture-of-experts models only."""
    recompute: str = ""
    """Like `megatron`, but users may set these fields if `trainer.recompute` is `none`."""
    fp8: str = ""
    """Like `megatron`, but users may set these fields if `trainer.fp8` is `none`."""
