"""Commands about recipe fields: `megarl show-config` and `megarl schema`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from megarl.cli.arguments import Overrides, RecipePath
from megarl.cli.checking import with_notices_shown


def _print_fields(is_asked: bool) -> None:
    if is_asked:
        from megarl.config.references.field_table import fields_markdown

        print(fields_markdown(), end="")
        raise typer.Exit


def _print_migration(is_asked: bool) -> None:
    if is_asked:
        from megarl.config.hints.migration import migration_page

        print(migration_page(), end="")
        raise typer.Exit


def show_config(
    recipe: RecipePath,
    overrides: Overrides = None,
    # Both options are eager: they print their page before RECIPE is required.
    markdown: Annotated[
        bool,
        typer.Option(
            "--markdown",
            help="Print the reference of all recipe fields as Markdown, then exit. Needs no RECIPE.",
            is_eager=True,
            callback=_print_fields,
        ),
    ] = False,
    migration: Annotated[
        bool,
        typer.Option(
            "--migration",
            help="Print a table of other training programs' options and the recipe fields for them as "
            "Markdown, then exit. Needs no RECIPE.",
            is_eager=True,
            callback=_print_migration,
        ),
    ] = False,
) -> None:
    """Print a recipe in full: each field with its description."""
    from megarl.config.recipe import load, to_yaml
    from megarl.planner.defaults import with_chunk_tokens, with_memory_defaults

    loaded = with_notices_shown(load(recipe, overrides or ()))
    print(to_yaml(with_chunk_tokens(with_memory_defaults(loaded)), comments=True), end="")


def schema() -> None:
    """Print the JSON Schema (draft 2020-12) of recipe files, for completion and checks in an editor."""
    from megarl.config.references.json_schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=1, ensure_ascii=False))
