"""What a recipe field says about itself besides its type, default and description, as items of `Annotated`.

    tp: Annotated[PositiveInt, OnlyIf(SEPARATE), Foreign("vllm_tp", note="of each engine")] = 1

Everything else about a field is derived from these: fields without effect, answers to other programs' names, and
`launch/recipes/MIGRATION.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config.conditions import Condition


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
    """Name of the keyword argument. Default: the field's."""
