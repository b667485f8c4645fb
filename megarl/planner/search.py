"""The search over changed recipes, used for remedies, defaults, cache sizes and layouts.

A `Move` changes a recipe field: it has alternatives, their cost, and a condition. `list_choices` combines moves.
`search` judges the choices and returns the best ones by score.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from megarl.config import Recipe
from megarl.config.reading.override_text import short_override
from megarl.config.schema import value_at

_SHRINK_COST = 4.0
"""Cost of shrinking a number (KV cache, row length) to 0. A smaller reduction costs less, in proportion."""


class Fitted(NamedTuple):
    """Placeholder for a value that depends on all other changes of a choice."""

    find: Callable[[Recipe], Any | None]
    """Returns the value for the recipe with the other changes. None: no value fits, so the choice is impossible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A change of one recipe field, and of the fields that must change together with this one."""

    field: str
    values: Sequence[Mapping[str, Any]]
    """Alternatives, cheapest first: each has new values by field, or `Fitted` in place of a value."""
    cost: float = 0.0
    """Cost of the first alternative, without unit: costs order the choices of one search."""
    step: float = 0.0
    """Additional cost per later alternative."""
    shrinks: bool = False
    """Whether the new value is a smaller number. The cost grows with the reduction."""
    condition: bool = True
    """Whether the move is possible and has an effect in this recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Changes of several recipe fields that are made together: one of the possible values for each move."""

    values: Mapping[str, Any]
    cost: float = 0.0
    """Cost, without that of shrinking numbers."""
    shrinking: tuple[str, ...] = ()
    """Fields whose value becomes a smaller number."""

    @property
    def key(self) -> frozenset[str]:
        """The changed fields. If choices have equal keys, a search returns only the best."""
        return frozenset(self.values)


class _Choice(Protocol):
    """Interface of a choice: the changed fields, and a key. Only the best of choices with equal keys counts."""

    @property
    def values(self) -> Mapping[str, Any]: ...
    @property
    def key(self) -> Hashable: ...


ChoiceT = TypeVar("ChoiceT", bound=_Choice)
OutcomeT = TypeVar("OutcomeT")


@dataclass(frozen=True, slots=True)
class Change(Generic[ChoiceT, OutcomeT]):
    """An accepted choice, with the changed recipe and the result of `judge` for it."""

    choice: ChoiceT
    values: Mapping[str, Any]
    """New values by field, with the values found by `Fitted`."""
    recipe: Recipe
    outcome: OutcomeT

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(short_override(field, value) for field, value in self.values.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking(Generic[ChoiceT, OutcomeT]):
    """Result of a search."""

    changes: tuple[Change[ChoiceT, OutcomeT], ...]
    """The best accepted choices, best first."""
    num_judged: int
    is_complete: bool
    """Whether no better choice exists. False: the search stopped after `max_judged` choices."""


def list_choices(moves: Sequence[Move], *, is_partial: bool) -> list[Choice]:
    """Return all combinations of the moves whose condition holds, fewest fields first.

    `is_partial`: moves may be left out, but not all. Otherwise each move takes one of its alternatives.
    """
    possible_moves = [move for move in moves if move.condition and move.values]
    # Rank -1: the move is left out.
    alternatives_of_moves = [[*([-1] if is_partial else []), *range(len(move.values))] for move in possible_moves]
    choices = [
        _combine_moves([(move, rank) for move, rank in zip(possible_moves, combination, strict=True) if rank >= 0])
        for combination in product(*alternatives_of_moves)
    ]
    choices = [choice for choice in choices if choice.values]
    return sorted(choices, key=lambda choice: len(choice.values)) if is_partial else choices


def _combine_moves(moves_and_ranks: Sequence[tuple[Move, int]]) -> Choice:
    """Return the choice that takes from each move the alternative of this rank (0: the cheapest)."""
    values: dict[str, Any] = {}
    for move, rank in moves_and_ranks:
        values |= move.values[rank]
    return Choice(
        values=values,
        cost=sum(move.cost + move.step * rank for move, rank in moves_and_ranks),
        shrinking=tuple(move.field for move, _ in moves_and_ranks if move.shrinks),
    )


def search(
    recipe: Recipe,
    choices: Iterable[ChoiceT],
    judge: Callable[[Recipe, ChoiceT], OutcomeT | None],
    score: Callable[[Change[ChoiceT, OutcomeT]], Any],
    *,
    count: int = 1,
    bound: Callable[[ChoiceT], Any] | None = None,
    skips: Callable[[ChoiceT, Sequence[ChoiceT]], bool] | None = None,
    max_judged: int | None = None,
) -> Ranking[ChoiceT, OutcomeT]:
    """Return the `count` accepted choices with the smallest scores. `judge` returns None to refuse a choice.

    `bound` returns a lower bound of the scores of a choice and of all later ones: with it the search ends early.
    `skips` decides from the accepted choices whether to skip a choice. At most `max_judged` choices are judged.
    """
    best_by_key: dict[Hashable, tuple[Any, Change[ChoiceT, OutcomeT]]] = {}
    num_judged, is_complete = 0, True
    worst_scores: list[Any] = []
    for choice in choices:
        least_score = None if bound is None else bound(choice)
        # The bound holds for all later choices too: none of them can beat the `count` accepted choices.
        if least_score is not None and worst_scores and least_score >= worst_scores[0]:
            break
        if skips is not None and skips(choice, [change.choice for _, change in best_by_key.values()]):
            continue
        if least_score is not None and choice.key in best_by_key and best_by_key[choice.key][0] <= least_score:
            continue
        if num_judged == max_judged:
            is_complete = False
            break
        num_judged += 1
        change = _judge(recipe, choice, judge)
        if change is None:
            continue
        choice_score = score(change)
        if choice.key not in best_by_key or choice_score < best_by_key[choice.key][0]:
            best_by_key[choice.key] = choice_score, change
            worst_scores = sorted(choice_score for choice_score, _ in best_by_key.values())[count - 1 : count]
    ranked_changes = sorted(best_by_key.values(), key=lambda scored: scored[0])[:count]
    return Ranking(
        changes=tuple(change for _, change in ranked_changes), num_judged=num_judged, is_complete=is_complete
    )


def _judge(
    recipe: Recipe, choice: ChoiceT, judge: Callable[[Recipe, ChoiceT], OutcomeT | None]
) -> Change[ChoiceT, OutcomeT] | None:
    """Return the change that a choice makes. None: one of its values cannot be found, or `judge` refuses it."""
    values = dict(choice.values)
    fitted_values = {field: value for field, value in values.items() if isinstance(value, Fitted)}
    fixed_values = {field: value for field, value in values.items() if field not in fitted_values}
    changed_recipe = with_field_values(recipe, fixed_values)
    for field, placeholder in fitted_values.items():
        if (value := placeholder.find(changed_recipe)) is None:
            return None
        values[field] = value
        changed_recipe = with_field_values(changed_recipe, {field: value})
    outcome = judge(changed_recipe, choice)
    return None if outcome is None else Change(choice, values, changed_recipe, outcome)


def total_cost(recipe: Recipe, change: Change[Choice, Any]) -> float:
    """Return a change's cost, plus the cost of shrinking numbers."""
    losses = (1 - change.values[field] / value_at(recipe, field) for field in change.choice.shrinking)
    return change.choice.cost + sum(_SHRINK_COST * loss for loss in losses)


def with_field_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return a copy of the recipe with new values, keyed by dotted field name."""
    # One copy per section: a search of layouts makes thousands of recipes.
    sections: dict[str, dict[str, Any]] = {}
    for field, value in values.items():
        section, _, name = field.partition(".")
        sections.setdefault(section, {})[name] = value
    copies = {
        section: getattr(recipe, section).model_copy(update=section_values)
        for section, section_values in sections.items()
    }
    return recipe.model_copy(update=copies)


def find_greatest(fits: Callable[[int], bool], *, low: int, high: int) -> int | None:
    """Return the greatest number from `low` to `high` that `fits`, or None. All below a fitting one must fit."""
    if low > high or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def iterate_in_order(choices: Iterable[Mapping[str, Any]]) -> Iterator[Choice]:
    """Yield choices in this order: a choice's cost is its position."""
    for position, values in enumerate(choices):
        yield Choice(values=values, cost=float(position))
