"""`megarl eval`: evaluates a model on the validation sets of a recipe."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from megarl.cli.arguments import Overrides, recipe_file
from megarl.cli.checking import with_notices_shown
from megarl.types import ConfigError


def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL_OR_RUN", help="Folder of a Hugging Face model, or of a run.")],
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="YAML file of a recipe with data.validation, a name that `megarl recipes` lists, or the folder of a "
            "run.",
            callback=recipe_file,
        ),
    ],
    overrides: Overrides = None,
    n: Annotated[
        int | None,
        typer.Option("--n", min=1, help="Number of attempts per problem, instead of evaluation.samples_per_prompt."),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            "--k",
            metavar="K,K...",
            help="Values of k for pass@k and majority@k, for example 1,4. Instead of evaluation.k.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Sampling temperature, 0: greedy. Instead of evaluation.sampling.temperature."),
    ] = None,
    of_set: Annotated[
        list[str] | None,
        typer.Option("--set", help="Name of a validation set to evaluate; may be repeated. Default: all sets."),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Evaluate the run's best model (hf_best) instead of its last one.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results. Default: a new folder in evaluations/.", show_default=False),
    ] = None,
) -> None:
    """Evaluate a model on a recipe's validation sets: accuracy, pass@k, majority@k, all answers. No trainer starts."""
    options: dict[str, Any] = {
        "samples_per_prompt": n,
        "k": k and _parse_numbers(k),
        "sampling.temperature": temperature,
    }
    settings = {name: value for name, value in options.items() if value is not None}
    from megarl.console.results import print_evaluation
    from megarl.loops.commands.evaluation import prepare, run

    prepared = prepare(model, Path(recipe), overrides or (), options=settings, sets=of_set or (), out=out, is_best=best)
    with_notices_shown(prepared.recipe)
    print_evaluation(asyncio.run(run(prepared)), prepared.folder)


def _parse_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--k {text}: not a list of whole numbers; write for example 1,4,16") from None
