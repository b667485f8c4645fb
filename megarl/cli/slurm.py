"""`megarl slurm`: runs a recipe as a Slurm batch job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from megarl.cli.arguments import Overrides, RecipeCommand, RecipePath, command_group
from megarl.cli.checking import check_completely

app = command_group("slurm", "Run a recipe as a Slurm batch job.")


SbatchOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--sbatch",
        help="Further option of sbatch, for example --sbatch=--partition=gpu. May be repeated.",
        show_default=False,
    ),
]


@app.command(cls=RecipeCommand)
def render(recipe: RecipePath, overrides: Overrides = None, option: SbatchOptions = None) -> None:
    """Print the Slurm batch script of a recipe."""
    print(_batch_script(recipe, overrides or (), option or ()), end="")


@app.command(cls=RecipeCommand)
def submit(recipe: RecipePath, overrides: Overrides = None, option: SbatchOptions = None) -> None:
    """Check a recipe as a dry run does, let sbatch test the batch script, then submit it."""
    from megarl.cluster.launchers.sbatch import check_options, require_sbatch, submit

    check_options(option or ())
    # Before the checks, which take half a minute.
    require_sbatch()
    from megarl.datasets.counts import with_steps
    from megarl.planner.defaults import with_memory_defaults
    from megarl.preflight import load
    from megarl.tracking.display import Display

    override_texts = list(overrides or ())
    # Load twice: first to read the launcher, then with the launcher set by the batch script.
    loaded = load(recipe, override_texts, is_start=False)
    # The batch script sets the launcher to slurm, unless the recipe uses ray. The checks need the same launcher.
    launcher_override = [] if loaded.cluster.launcher == "ray" else ["cluster.launcher=slurm"]
    check_completely(
        with_memory_defaults(with_steps(load(recipe, [*override_texts, *launcher_override]))), Display(), is_start=False
    )
    print(submit(_batch_script(recipe, override_texts, ()), option or ()))


def _batch_script(recipe: str, overrides: Sequence[str], options: Sequence[str]) -> str:
    from megarl.cluster.launchers.sbatch import render
    from megarl.config.recipe import load

    return render(load(recipe, overrides), arguments=[recipe, *overrides], options=options)
