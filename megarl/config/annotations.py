"""Annotations of recipe fields: condition of an effect, formula keyword, names in other programs.

They are items of `Annotated`, next to the type:

    tp: Annotated[PositiveInt, OnlyIf(SEPARATE), Foreign("vllm_tp", note="of each engine")] = 1

Errors about fields without effect, answers to other programs' names and `launch/recipes/MIGRATION.md` derive from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.config.schema import value_at

if TYPE_CHECKING:
    from megarl.config import Recipe


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition for a recipe field to have an effect. `fields` decide it; `remedy` says how to meet it."""

    fields: tuple[str, ...]
    remedy: str
    holds: Callable[[Recipe], bool]
    example: str = ""
    """Overrides meeting the condition, for the migration page."""
    is_alternative: bool = False
    """Both fields express the same setting: an override of one replaces the other in the file."""

    def state(self, recipe: Recipe) -> str:
        """Return the deciding fields and values in words: `under loop=sft`, `without reward.model`."""
        values = {field: value_at(recipe, field) for field in self.fields}
        absent = [field for field, value in values.items() if value is None or value == {}]
        shown = {name: ", ".join(value) if isinstance(value, dict) else value for name, value in values.items()}
        present = [f"{field}={shown[field]}" for field in values if field not in absent]
        parts = ["under " + " and ".join(present)] if present else []
        parts += ["without " + " or ".join(absent)] if absent else []
        return " ".join(parts)


@dataclass(frozen=True, slots=True, init=False)
class OnlyIf:
    """Conditions for the field, or for all fields of the section, to have an effect. All must hold.

    An inner field inherits its sections' conditions. Its own condition on a deciding field replaces an inherited one on
    the same field. An item may be a function of the section's dotted name, for sections used at several places.
    """

    conditions: tuple[Condition | Callable[[str], Condition], ...]

    def __init__(self, *conditions: Condition | Callable[[str], Condition]) -> None:
        object.__setattr__(self, "conditions", conditions)


@dataclass(frozen=True, slots=True)
class KeywordOf:
    """The field is a keyword argument of the formula chosen by another field.

    It has an effect if that field has one, and if the formula takes the keyword.
    """

    formula: str
    """Recipe field choosing the formula, for example algorithm.advantage."""
    name: str | None = None
    """Name of the formula's keyword argument. Default: the recipe field's own name."""


@dataclass(frozen=True, slots=True)
class Decides:
    """Settings of libraries that follow from the field. Users cannot set them. Names are separated by blanks."""

    vllm: str = ""
    """Fields of vLLM's EngineArgs."""
    megatron: str = ""
    """Fields of Megatron-Core's TransformerConfig."""
    experts: str = ""
    """Fields of the TransformerConfig of a mixture of experts."""
    # With `none` users may set these through trainer.megatron.
    recompute: str = ""
    """Fields of the TransformerConfig if `trainer.recompute` is not `none`."""
    fp8: str = ""
    """Fields of the TransformerConfig if `trainer.fp8` is not `none`."""


@dataclass(frozen=True, slots=True, init=False)
class Foreign:
    """Options of other training programs with the meaning of the field, and its own former names.

    Names in a text are separated by blanks. Case, dashes and underscores make no difference.
    """

    names: tuple[str, ...]
    """Names, matched from their end: `rollout.n` also matches `actor_rollout_ref.rollout.n`."""
    options: dict[str, tuple[str, ...]]
    """Options by program, written as there. Each has a row in the migration page. It is also a name, unless its last
    part is the field's own name."""
    note: str
    """Difference in meaning, for errors and for the page. For an option without a field: the reason."""
    remark: str
    """Text for the page only. It does not keep an error from suggesting the option's value."""
    example: str
    """Value of the field on the page, or overrides `field=value ...`. Default: the field's default."""
    also: tuple[str, ...]
    """Further fields with the meaning of the options."""
    inside: str
    """Name of the meant field inside the annotated section, for sections used at several places."""
    short: tuple[str, ...]
    """Short forms without a section, for example `tbs`. They are ambiguous as ends of longer names."""

    def __init__(
        self,
        *names: str,
        note: str = "",
        remark: str = "",
        example: str = "",
        also: str = "",
        inside: str = "",
        short: str = "",
        **options: str,
    ) -> None:
        values = {"note": note, "remark": remark, "example": example, "inside": inside}
        values |= {"names": tuple(" ".join(names).split()), "also": tuple(also.split()), "short": tuple(short.split())}
        values |= {"options": {program: tuple(text.split()) for program, text in options.items()}}
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True, init=False)
class ForeignValues:
    """Other programs' spellings of the field's values. `rl="grpo ppo"`: their grpo and ppo mean rl here.

    Spellings are in lower case with underscores.
    """

    own_value: dict[str, str]

    def __init__(self, **values: str) -> None:
        pairs = {foreign: own for own, texts in values.items() for foreign in texts.split()}
        object.__setattr__(self, "own_value", pairs)
