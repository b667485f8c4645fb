"""The command `megarl`. Heavy modules are imported inside the commands, so that help and config errors come at once."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, Annotated

import typer

from megarl.types import MegarlError

if TYPE_CHECKING:
    from megarl.config import Recipe
    from megarl.parallel_layout import ParallelLayout

app = typer.Typer(
    name="megarl",
    help="Reinforcement learning for large language models: Megatron-Core trainers and vLLM engines in one process.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help="YAML file of the recipe.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.FIELD=VALUE", help="Values on top of the file's.", show_default=False),
]


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, print the sizes, stop.")] = False,
) -> None:
    """Check a recipe, its model and its data; then train."""
    from megarl.preflight import check, count_records
    from megarl.recipe import load

    sys.path.append(os.getcwd())  # Where `reward.functions` may find a module of the user's own.
    loaded = load(recipe, overrides or ())
    layout = check(loaded)
    _print_sizes(loaded, layout, count_records(loaded))
    if not dry_run:
        from megarl.loops.run import run

        run(loaded, layout)


@app.command()
def show_config(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Print a recipe in full: each field and its meaning."""
    from megarl.recipe import load, to_yaml

    print(to_yaml(load(recipe, overrides or ()), comments=True), end="")


def main() -> None:
    """The console script: one message and an exit code for a foreseen error, a traceback and 70 for any other."""
    try:
        app()
    except MegarlError as error:
        _print_error(str(error))
        sys.exit(error.exit_code)
    except Exception:
        traceback.print_exc()
        sys.exit(MegarlError.exit_code)


def _print_error(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True, highlight=False).print(Text("error: ", style="bold red") + Text(message))


def _print_sizes(recipe: Recipe, layout: ParallelLayout, records: dict[str, int]) -> None:
    """What the recipe comes to, in numbers nobody should have to work out."""
    from rich.console import Console
    from rich.table import Table

    settings = recipe.train
    per_step = settings.prompts_per_step * (settings.samples_per_prompt if recipe.loop == "rl" else 1)
    updates = settings.updates_per_step if recipe.loop == "rl" else 1
    rows = {
        "model": f"{recipe.model.path}, {recipe.model.dtype}",
        "ranks": f"{layout.world_size}: trainer tp {layout.tp} * pp {layout.pp} * dp {layout.dp}, "
        f"vLLM tp {layout.rollout_tp} * {layout.num_replicas} replicas",
        "data": ", ".join(f"{name} {count}" for name, count in records.items()),
        "steps": f"{settings.steps}, {settings.steps * settings.prompts_per_step / records['train']:.2f} epochs",
        "sequences": f"{per_step} a step, {per_step // updates} an update, "
        f"{per_step // updates // layout.dp} an update and data-parallel rank",
        "updates": f"{updates} a step, {settings.steps * updates} in all",
        "microbatch": f"at most {recipe.trainer.max_tokens_per_microbatch} tokens",
        "run folder": f"{recipe.runs_folder}/{recipe.name}",
    }
    table = Table(title=f"{recipe.name} ({recipe.loop})", show_header=False, title_justify="left")
    for row in rows.items():
        table.add_row(*row)
    Console(soft_wrap=True, highlight=False).print(table)
