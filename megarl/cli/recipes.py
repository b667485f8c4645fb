"""`megarl recipes`: lists the delivered recipes, or copies some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from megarl.cli.arguments import refuse_idle_options
from megarl.console.lines import print_lines
from megarl.files import shipped
from megarl.files.nearest import nearest
from megarl.types import ConfigError


def recipes(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Recipes to copy. Default: all are listed.", show_default=False),
    ] = None,
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Folder for the copies.")] = Path(),
) -> None:
    """List the delivered recipes with their purpose, or copy the named ones.

    Existing files are never overwritten: the command then copies nothing.
    """
    delivered = shipped.recipes()
    if names:
        print_lines([f"wrote {path}" for path in _copy_recipes(delivered, names, to)])
        return
    refuse_idle_options(context, ["to"], "without NAME; name the recipes to copy")
    for name, path in delivered.items():
        print(f"{name}\n    {_read_purpose(path)}")


def _read_purpose(recipe: Path) -> str:
    """Return the first sentence of the comment at the top of a recipe."""
    lines = takewhile(lambda line: line.startswith("#"), recipe.read_text(encoding="utf-8").splitlines())
    comment = " ".join(
        line.removeprefix("#").strip() for line in lines if not line.startswith("# yaml-language-server")
    )
    return comment.partition(". ")[0].removesuffix(".") + "."


def _copy_recipes(delivered: Mapping[str, Path], names: Sequence[str], folder: Path) -> list[Path]:
    """Copy recipes into a folder and return the new files.

    Raises ConfigError for an unknown name or an existing file, before the first copy.
    """
    stems = [name.removesuffix(".yaml") for name in names]
    for name in stems:
        if name not in delivered:
            hint = (
                f"did you mean {nearest_recipe}?"
                if (nearest_recipe := nearest(name, delivered))
                else "`megarl recipes` lists them"
            )
            raise ConfigError(f"{name}: not a recipe of megarl; {hint}")
    copies = {folder / delivered[name].name: delivered[name] for name in stems}
    for copy in copies:
        if copy.exists():
            raise ConfigError(f"{copy}: exists already; name another folder with --to, or remove the file")
    folder.mkdir(parents=True, exist_ok=True)
    # The first line of each recipe names the schema for editors, in the recipe's folder.
    schema = folder / shipped.SCHEMA
    for copy, original in (copies if schema.exists() else {**copies, schema: shipped.schema()}).items():
        copy.write_bytes(original.read_bytes())
    return list(copies)
