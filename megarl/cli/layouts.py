"""`megarl plan --search`: the fastest layouts of a recipe on its GPUs, by predicted seconds of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megarl.types import ConfigError

if TYPE_CHECKING:
    from megarl.config import Recipe
    from megarl.planner.seconds.lengths import Lengths
    from megarl.preflight.recipe_file import RecipeFile

SearchOption = Annotated[
    bool,
    typer.Option(
        "--search",
        help="Instead, rank all layouts, placements, offloads, recomputations and row lengths by the predicted seconds "
        "of a step. Only layouts that fit are printed, with their overrides of the recipe.",
    ),
]
MostOption = Annotated[int, typer.Option("--most", min=1, help="With --search: number of layouts to print.")]
LengthsOption = Annotated[
    Path | None,
    typer.Option(
        "--lengths",
        metavar="RUN",
        help="With --search: folder of a run whose samples/ give the lengths of completions. Default: a log-normal "
        "distribution.",
        show_default=False,
    ),
]
MeanTokensOption = Annotated[
    int | None,
    typer.Option(
        "--mean-tokens",
        min=1,
        help="With --search: mean tokens of a completion. Default: a quarter of rollout.sampling.max_new_tokens.",
        show_default=False,
    ),
]
StalenessOption = Annotated[
    int | None,
    typer.Option(
        "--max-staleness",
        min=0,
        help="With --search: rollout.max_staleness of separate engines. Default: the recipe's.",
        show_default=False,
    ),
]
"""Options of `megarl plan --search`."""
SEARCH_OPTIONS = ("most", "lengths", "mean_tokens", "max_staleness")
"""Names of the parameters with these options."""


def search_layouts(
    recipe: Recipe,
    file: RecipeFile,
    *,
    count: int,
    run: Path | None,
    mean_tokens: int | None,
    max_staleness: int | None,
    as_json: bool,
) -> None:
    """Search the layouts of a recipe and print them. `file` is the recipe's file, on which overrides are tried.

    `run` is the folder of a run whose samples/ give the lengths of completions. Otherwise `mean_tokens` is their mean.
    `max_staleness` is the limit for separate engines; default: the recipe's. Raises ConfigError if the recipe is not
    searchable, or its GPUs are unknown.
    """
    from megarl.console.predictions import print_layouts
    from megarl.planner.layouts.search import make_layout_search

    result = make_layout_search(recipe, _choose_lengths(recipe, run, mean_tokens), max_staleness, file.refusal).search(
        count
    )
    if as_json:
        print(json.dumps({"recipe": recipe.name, "model": recipe.model.path, **result.as_json()}))
    else:
        print_layouts(recipe, result)
    if not result.layouts:
        raise typer.Exit(ConfigError.exit_code)


def _choose_lengths(recipe: Recipe, run: Path | None, mean_tokens: int | None) -> Lengths:
    """Return the distribution of completion lengths. Raises ConfigError if it is set twice or too long."""
    from megarl.planner.seconds.lengths import assumed_lengths, assumed_prompt_tokens, lengths_of_run, log_normal

    limit, max_prompt_tokens = recipe.rollout.sampling.max_new_tokens, recipe.data.max_prompt_tokens
    prompt_tokens = assumed_prompt_tokens(max_prompt_tokens)
    if run is not None:
        if mean_tokens is not None:
            raise ConfigError(
                "--lengths and --mean-tokens: give one of them; the samples of --lengths already have a mean"
            )
        return lengths_of_run(run, limit=limit, prompt_tokens=prompt_tokens)
    if mean_tokens is not None and mean_tokens > limit:
        raise ConfigError(
            f"--mean-tokens {mean_tokens}: exceeds rollout.sampling.max_new_tokens = {limit}; lower one, or raise the "
            "other"
        )
    if mean_tokens is None:
        return assumed_lengths(limit=limit, max_prompt_tokens=max_prompt_tokens)
    return log_normal(mean=mean_tokens, limit=limit, prompt_tokens=prompt_tokens)
