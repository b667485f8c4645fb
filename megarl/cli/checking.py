"""Checks of a recipe before a command starts or submits a run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config import Recipe
    from megarl.config.parallel import ParallelConfig
    from megarl.datasets.counts import RecordDigests
    from megarl.datasets.reading import Dropped
    from megarl.tracking.display import Display


@contextlib.contextmanager
def checking(display: Display) -> Iterator[None]:
    """Show on the terminal, within this context, that a recipe is being checked."""
    with display.phase("checking the recipe"), display.live():
        yield


def check_completely(
    recipe: Recipe, display: Display, *, is_start: bool
) -> tuple[ParallelConfig, dict[str, int], Dropped, RecordDigests]:
    """Check a recipe completely and print its warnings.

    Returns the parallel layout, the records per data source, the records left out as too long, and digests of the
    others. `is_start`: see `preflight.check`.
    """
    from megarl.datasets.counts import count_records
    from megarl.datasets.reward_trials import check_rewards
    from megarl.preflight import check, list_resource_warnings
    from megarl.terminal import Terminal

    # Printed before the checks: the notices may explain an error of a check.
    with_notices_shown(recipe)
    dropped: Dropped = Counter()
    digests: RecordDigests = {}
    with checking(display):
        parallel = check(recipe, is_start=is_start)
        records = count_records(recipe, dropped, digests)
        check_rewards(recipe, is_start=is_start)
    # Warnings go to stderr, so that stdout has only the command's result. A recipe's texts are not Rich markup.
    console = Terminal(stderr=True, soft_wrap=True, highlight=False, markup=False)
    for text in list_resource_warnings(recipe, parallel):
        console.print(f"warning: {text}", style="yellow")
    return parallel, records, dropped, digests


def with_notices_shown(recipe: Recipe) -> Recipe:
    """Print the notices about ignored values of the recipe file, and return the recipe."""
    from megarl.terminal import Terminal

    console = Terminal(stderr=True, soft_wrap=True, highlight=False, markup=False)
    for text in recipe.notices:
        console.print(f"notice: {text}", style="yellow")
    return recipe
