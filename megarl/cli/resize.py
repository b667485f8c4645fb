"""`megarl resize`: changes the parallel sizes of a running run. `megarl plan --to`: the bytes that this would move."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from megarl.cli.arguments import Overrides
from megarl.console.lines import print_lines, size_text
from megarl.types import ConfigError

FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="SIZES",
        help="With --to: sizes before the change, as overrides in quotes. Default: the recipe's. --to changes them.",
        show_default=False,
    ),
]
ToOption = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="SIZES",
        help="Instead of the plan of a run, count the bytes that ranks would exchange if megarl resize changed the "
        "run to these sizes. SIZES are overrides in quotes: --to 'cluster.nodes=1 trainer.tp=4'.",
        show_default=False,
    ),
]
"""Options of `megarl plan` for a change of the parallel sizes."""


def resize(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a running run (runs/NAME).")],
    overrides: Overrides = None,
) -> None:
    """Change the number of ranks and the parallel sizes of a run while it runs, after its current step.

    Overrides give the new sizes, for example cluster.ranks_per_node=4 trainer.tp=2. Weights and optimizer state move in
    memory; processes needed by the new sizes stay. The command returns at once. The run prints a warning when it
    changes, or why it cannot; then it continues unchanged.
    """
    from megarl.config.recipe import load_of_run
    from megarl.loops.ranks.resizing import FIELDS, change_sizes, request_resize
    from megarl.tracking.run_record import RunRecord

    if not overrides:
        raise ConfigError(f"megarl resize: give the new sizes as overrides; it can change {', '.join(FIELDS)}")
    state = RunRecord.open_of_this_version(run).status.get("state")
    if state != "running":
        raise ConfigError(f"{run}: the run is not running (status.json: {state}); start it with megarl train")
    recipe_of_run = load_of_run(run)
    values = _read_sizes(run / "config.yaml", (), overrides, is_of_run=True)
    # Checks the sizes against config.yaml. The run checks them again: after a loss of ranks its sizes differ.
    parallel = change_sizes(recipe_of_run, values).parallel
    request_resize(run, values)
    print_lines([f"{run}: changes to {parallel} after its current step"])


def _read_sizes(
    recipe: Path | str, earlier_overrides: Sequence[str], overrides: Sequence[str], *, is_of_run: bool = False
) -> dict[str, Any]:
    """Return the sizes in overrides, by field. Raises ConfigError for fields that a resize cannot change.

    `is_of_run`: `recipe` is the config.yaml of a run, perhaps written by an earlier version.
    """
    from megarl.config.recipe import load
    from megarl.loops.ranks.resizing import refuse_other_fields

    names = [text.partition("=")[0] for text in overrides]
    refuse_other_fields(names)
    resized_recipe = load(recipe, [*earlier_overrides, *overrides], is_of_run=is_of_run)
    return {name: attrgetter(name)(resized_recipe) for name in names}


def plan_resize(recipe: Path | str, overrides: Sequence[str], before: str, after: str, *, as_json: bool) -> None:
    """Print the approximate bytes that ranks exchange when a run of the recipe changes its sizes from `before` to
    `after`.
    """
    from megarl.config.recipe import load
    from megarl.loops.models import trained_shape
    from megarl.loops.ranks.resizing import with_sizes
    from megarl.planner.sizes import align_parallel
    from megarl.preflight import check_plan
    from megarl.reshard.forecast.resize import StateSettings, forecast_resize

    # Load the recipe before and after the change.
    first_overrides = [*overrides, *before.split()]
    old_recipe = load(recipe, first_overrides)
    if old_recipe.lora.rank or old_recipe.has_critic:
        raise ConfigError(
            "--to: the forecast of bytes covers a policy only; leave --to out for recipes with lora or a critic"
        )
    if old_recipe.optimizer.name != "adam":
        raise ConfigError(
            "--to: the forecast of bytes covers Adam's state only; leave --to out with "
            f"optimizer.name={old_recipe.optimizer.name}"
        )
    new_recipe = with_sizes(old_recipe, _read_sizes(recipe, first_overrides, after.split()))
    # Both recipes have the same model. Their sizes must fit it.
    shape, checked_parallel = check_plan(old_recipe)
    old_parallel = align_parallel(old_recipe, shape, checked_parallel)
    _, checked_parallel = check_plan(new_recipe)
    new_parallel = align_parallel(new_recipe, shape, checked_parallel)
    # Forecast the bytes of weights and optimizer state that change their rank.
    settings = StateSettings(2 if old_recipe.model.dtype == "bfloat16" else 4, old_recipe.trainer.distributed_optimizer)
    ranks_per_node = old_recipe.cluster.ranks_per_node, new_recipe.cluster.ranks_per_node
    forecast = forecast_resize(trained_shape(old_recipe, shape), old_parallel, new_parallel, settings, ranks_per_node)
    if as_json:
        print(json.dumps({"from": str(old_parallel), "to": str(new_parallel), **forecast.as_json()}))
        return
    print_lines(
        [
            f"from {old_parallel}",
            f"to   {new_parallel}",
            f"state: {size_text(forecast.state)} of weights and optimizer, each element counted once",
            f"received from other ranks: about {size_text(forecast.received)} in total, at most "
            f"{size_text(forecast.most_received)} by one rank",
            f"sent by ranks that leave: about {size_text(forecast.handed_over)}",
            f"bytes moved: {forecast.ratio:.2f} times the minimum of {size_text(forecast.minimum)}",
        ]
    )
