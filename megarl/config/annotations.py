"""Annotations of recipe fields: conditions of their effect, library settings that they decide, untried values.

They stand in `Annotated`, after the field's type:

    ranks: Annotated[PositiveInt | None, OnlyIf(SEPARATE)] = None

Three texts are generated from them: errors about fields without effect, errors about refused settings of vLLM and
Megatron-Core, and notes about values that have not run on a GPU. `megarl.config.hints.foreign` has the names of fields
in other programs.
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
    """Condition for a recipe field to have an effect, for example that `rollout.placement` is separate.

    It depends on the recipe fields `fields`. `remedy` says how a user can fulfil it.
    """

    fields: tuple[str, ...]
    remedy: str
    holds: Callable[[Recipe], bool]
    example: str = ""
    """Command-line overrides that fulfil the condition: `rollout.placement=separate`. The generated page MIGRATION.md
    shows them."""
    is_alternative: bool = False
    """Whether both fields are two ways to write one setting, as warmup_steps and warmup_ratio. A command-line override
    of one then removes the recipe file's value of the other.
    """

    def state(self, recipe: Recipe) -> str:
        """Return the deciding fields with their values for an error: `under loop=sft`, `without reward.model`."""
        values = {field: value_at(recipe, field) for field in self.fields}
        absent = [field for field, value in values.items() if value is None or value == {}]
        texts = {name: ", ".join(value) if isinstance(value, dict) else value for name, value in values.items()}
        present = [f"{field}={texts[field]}" for field in values if field not in absent]
        parts = ["under " + " and ".join(present)] if present else []
        parts += ["without " + " or ".join(absent)] if absent else []
        return " ".join(parts)


@dataclass(frozen=True, slots=True, init=False)
class OnlyIf:
    """Conditions for the annotated field, or all fields of the annotated section, to have an effect. All must hold.

    A field inherits the conditions of its section. Its own condition on the same deciding field replaces the inherited
    one. If a section occurs at several places of the recipe, an item may be a function from its dotted name to the
    condition.
    """

    conditions: tuple[Condition | Callable[[str], Condition], ...]

    def __init__(self, *conditions: Condition | Callable[[str], Condition]) -> None:
        object.__setattr__(self, "conditions", conditions)


@dataclass(frozen=True, slots=True)
class UntriedOnGpu(DescriptionNote):
    """Marks a field with values that have never run on a GPU. tests/gpu/README.md lists the runs on GPUs.

    The field's description names these values. A start on a GPU gives a notice if the field differs from its default.
    """

    values: str
    """The values in words, for example `flex`."""

    def __str__(self) -> str:
        return f"Untried on a GPU: {self.values}."


@dataclass(frozen=True, slots=True)
class KeywordOf:
    """Marks a field as keyword argument of a formula (loss or advantage estimator), selected by another field.

    The field has an effect only if the selecting field has one and the formula takes the keyword.
    """

    formula: str
    """Name of the recipe field that selects the formula, for example algorithm.advantage."""
    name: str | None = None
    """Name of the formula's keyword argument. Default: the recipe field's own name."""


@dataclass(frozen=True, slots=True)
class Decides:
    """Settings of vLLM and Megatron-Core decided by the annotated field. Users must not set them directly.

    Several names are separated by blanks.
    """

    vllm: str = ""
    """Names of vLLM's EngineArgs fields."""
    megatron: str = ""
    """Names of fields of Megatron-Core's TransformerConfig."""
    experts: str = ""
    """Like `megatron`, for mixture-of-experts models only."""
    # With `none` users may set these through trainer.megatron.
    recompute: str = ""
    """Like `megatron`, unless `trainer.recompute` is `none`."""
    fp8: str = ""
    """Like `megatron`, unless `trainer.fp8` is `none`."""
