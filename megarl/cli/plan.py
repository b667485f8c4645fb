"""`megarl plan`: predicts memory and reshards of a recipe, or searches its layouts."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megarl.cli.arguments import Overrides, RecipePath, refuse_idle_options
from megarl.cli.checking import with_notices_shown
from megarl.cli.layouts import (
    SEARCH_OPTIONS,
    LengthsOption,
    MeanTokensOption,
    MostOption,
    SearchOption,
    StalenessOption,
    search_layouts,
)
from megarl.cli.resize import FromOption, ToOption, plan_resize
from megarl.console.lines import print_lines
from megarl.console.predictions import print_memory, print_plan, print_terms
from megarl.types import ConfigError

if TYPE_CHECKING:
    from megarl.config import Recipe
    from megarl.config.parallel import ParallelConfig
    from megarl.families.shape import ModelShape


def plan(
    context: typer.Context,
    recipe: RecipePath,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for use by programs.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also print the formula and the source of each term of the memory.")
    ] = False,
    search: SearchOption = False,
    most: MostOption = 10,
    lengths: LengthsOption = None,
    mean_tokens: MeanTokensOption = None,
    max_staleness: StalenessOption = None,
    before: FromOption = None,
    after: ToOption = None,
) -> None:
    """Predict memory by phase, whether it fits, and the bytes moved by a reshard. Reads config.json and starts nothing.

    Exit code 2: it does not fit, or --search finds no layout that fits. Models of the recipes in launch/recipes need no
    download.
    """
    if after is None:
        refuse_idle_options(context, ["before"], "without --to; add it, or leave this out")
    else:
        refuse_idle_options(
            context, ["search", *SEARCH_OPTIONS, "explain"], "with --to, which plans one resize; leave this out"
        )
        plan_resize(recipe, overrides or (), before or "", after, as_json=as_json)
        return
    if search:
        refuse_idle_options(context, ["explain"], "with --search; leave this out, and explain one layout at a time")
        from megarl.config.recipe import load
        from megarl.preflight.recipe_file import RecipeFile

        search_layouts(
            with_notices_shown(load(recipe, overrides or ())),
            RecipeFile(recipe, tuple(overrides or ())),
            count=most,
            run=lengths,
            mean_tokens=mean_tokens,
            max_staleness=max_staleness,
            as_json=as_json,
        )
        return
    refuse_idle_options(context, SEARCH_OPTIONS, "without --search; add it, or leave this out")
    from megarl.config.recipe import load
    from megarl.planner.defaults import memory_defaults, with_chunk_tokens, with_memory_defaults
    from megarl.planner.gpus_of_run import gpu_kind
    from megarl.planner.memory.terms import explain_terms
    from megarl.planner.predictions import not_downloaded, table_of
    from megarl.planner.sizes import align_parallel
    from megarl.planner.verdict import verdict_of
    from megarl.preflight import check_plan, warn_of_slower_layout, warn_of_small_cache

    loaded = with_notices_shown(load(recipe, overrides or ()))
    shape, parallel = check_plan(loaded)
    recipe_without_defaults, loaded = loaded, with_memory_defaults(loaded)
    memory = table_of(loaded, parallel)
    verdict, kind = verdict_of(loaded, parallel, memory), gpu_kind(loaded)
    if not as_json:
        print_lines(verdict.lines)
        print_memory(loaded, memory)
        if explain:
            print_terms(loaded, memory)
        if defaults := list(memory_defaults(recipe_without_defaults, with_chunk_tokens(loaded))):
            print_lines(defaults)
    parallel = align_parallel(loaded, shape, parallel)
    # Without engines, no reshard takes place.
    reshard_forecast = _forecast_reshard(loaded, shape, parallel, kind) if loaded.has_engine else None
    notices = list(not_downloaded(loaded))
    warnings = [*warn_of_small_cache(loaded, parallel, memory), *warn_of_slower_layout(loaded)]
    if as_json:
        plan_values = {"recipe": loaded.name, "model": loaded.model.path, **verdict.as_json()}
        plan_values["kv_cache_gib"] = loaded.rollout.kv_cache_gib if memory.cache else None
        plan_values["notices"] = [*notices, *warnings]
        if explain:
            plan_values["terms"] = [asdict(term) for term in explain_terms(memory)]
        print(json.dumps({**plan_values, "memory": memory.as_json(), **(reshard_forecast or {"reshard": None})}))
    else:
        print_plan(loaded, parallel, reshard_forecast, is_assumed=kind is None)
        print_lines([*notices, *(f"warning: {text}" for text in warnings)])
    # None: the GPUs' memory is unknown, and nothing is refused then.
    if verdict.fits is False:
        raise typer.Exit(ConfigError.exit_code)


def _forecast_reshard(
    recipe: Recipe, shape: ModelShape, parallel: ParallelConfig, gpu_kind: str | None
) -> dict[str, Any]:
    """Return the bytes and the time of a reshard. `gpu_kind` None: the times are for an H200."""
    from megarl.reshard.forecast.cost_model import forecast

    return forecast(
        shape,
        parallel,
        ranks_per_node=recipe.cluster.ranks_per_node,
        engine_ranks_per_node=engines.ranks_per_node if (engines := recipe.cluster.groups.engines) else None,
        itemsize=2 if recipe.model.dtype == "bfloat16" else 4,
        bucket_bytes=recipe.weights.bucket_mib << 20,
        gpu=gpu_kind or "h200",
        adapter=recipe.lora if recipe.sends_adapter else None,
    )
