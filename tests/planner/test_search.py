"""The search over changed recipes judges and skips the right choices, ends in time, and finds fitted values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.planner.search import (
    Choice,
    Fitted,
    Move,
    find_greatest,
    iterate_in_order,
    list_choices,
    search,
    total_cost,
    with_field_values,
)
from tests.planner.memory.conftest import large

__all__ = ["large"]

TP, PP, ROWS = "trainer.tp", "trainer.pp", "trainer.max_tokens_per_microbatch"


@pytest.fixture
def recipe(large: Callable[..., Recipe]) -> Recipe:
    return large("qwen3_14b_dapo_h200")


def values_of(ranking: Any) -> list[dict[str, Any]]:
    return [dict(change.values) for change in ranking.changes]


def test_choices_combine_the_moves_that_are_possible() -> None:
    moves = [
        Move(field=TP, values=({TP: 1}, {TP: 2}), cost=3.0, step=0.5),
        Move(field=PP, values=({PP: 4},), cost=1.0),
        Move(field=ROWS, values=({ROWS: 8},), condition=False),
    ]
    whole = list_choices(moves, is_partial=False)
    assert [(dict(choice.values), choice.cost) for choice in whole] == [
        ({TP: 1, PP: 4}, 4.0),
        ({TP: 2, PP: 4}, 4.5),
    ]
    partial = list_choices(moves, is_partial=True)
    assert [dict(choice.values) for choice in partial] == [
        {PP: 4}, {TP: 1}, {TP: 2}, {TP: 1, PP: 4}, {TP: 2, PP: 4},
    ]  # fmt: skip


def test_the_best_choices_are_returned_by_their_score(recipe: Recipe) -> None:
    choices = [Choice(values={TP: 2}), Choice(values={PP: 2}), Choice(values={TP: 4, PP: 1}), Choice(values={TP: 8})]
    scores = {2: 3.0, 8: 1.0}

    def judge(changed: Recipe, choice: Choice) -> float | None:
        return None if changed.trainer.pp == 2 else scores.get(changed.trainer.tp, 2.0)

    ranking = search(recipe, choices, judge, lambda change: change.outcome, count=2)
    # TP 8 and TP 2 change the same field, so the better one counts.
    assert values_of(ranking) == [{TP: 8}, {TP: 4, PP: 1}]
    assert ranking.num_judged == 4 and ranking.is_complete
    assert ranking.changes[0].recipe.trainer.tp == 8 and ranking.changes[0].overrides == ("trainer.tp=8",)


def test_a_search_ends_at_its_bound_and_at_its_limit(recipe: Recipe) -> None:
    judged: list[int] = []

    def judge(changed: Recipe, choice: Choice) -> int | None:
        judged.append(changed.trainer.tp)
        return changed.trainer.tp if changed.trainer.tp >= 2 else None

    def least(choice: Choice) -> float:
        return choice.cost

    order = [{TP: 1}, {TP: 2}, {TP: 4}]
    first = search(recipe, iterate_in_order(order), judge, lambda change: change.choice.cost, bound=least)
    assert values_of(first) == [{TP: 2}] and judged == [1, 2] and first.is_complete
    limited = search(recipe, iterate_in_order(order), judge, lambda change: change.choice.cost, max_judged=1)
    assert values_of(limited) == [] and not limited.is_complete


def test_values_are_found_with_the_changes_made_before(recipe: Recipe) -> None:
    found: list[tuple[int, int]] = []

    def rows(changed: Recipe) -> int | None:
        found.append((changed.trainer.tp, changed.trainer.pp))
        return None if changed.trainer.tp == 8 else 100 * changed.trainer.tp

    move = Move(field=ROWS, values=({ROWS: Fitted(rows), TP: 4},), cost=1.0, shrinks=True)
    impossible = Choice(values={ROWS: Fitted(rows), TP: 8})
    choices = [*list_choices([move], is_partial=True), impossible]
    present = recipe.trainer.max_tokens_per_microbatch
    ranking = search(recipe, choices, lambda changed, _: changed.trainer.max_tokens_per_microbatch, lambda _: 0.0)
    assert values_of(ranking) == [{ROWS: 400, TP: 4}] and found == [(4, recipe.trainer.pp), (8, recipe.trainer.pp)]
    assert total_cost(recipe, ranking.changes[0]) == pytest.approx(1 + 4 * (1 - 400 / present))


def test_skipped_choices_are_not_judged(recipe: Recipe) -> None:
    choices = [Choice(values={TP: 2}), Choice(values={TP: 4, PP: 2})]
    ranking = search(
        recipe, choices, lambda *_: True, lambda _: 0.0, count=9, skips=lambda choice, accepted: bool(accepted)
    )
    assert values_of(ranking) == [{TP: 2}] and ranking.num_judged == 1


@pytest.mark.parametrize(("limit", "expected"), [(0, None), (3, 3), (7, 7), (99, 10)])
def test_the_greatest_number_that_fits(limit: int, expected: int | None) -> None:
    assert find_greatest(lambda number: number <= limit, low=3, high=10) == expected
    assert find_greatest(lambda number: True, low=4, high=3) is None


def test_a_changed_recipe_leaves_the_other_one_as_it_is(recipe: Recipe) -> None:
    before = recipe.trainer.tp
    changed = with_field_values(recipe, {TP: 16, "rollout.tp": 8})
    assert (changed.trainer.tp, changed.rollout.tp, recipe.trainer.tp) == (16, 8, before)
