"""Arguments that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help="YAML file of the recipe.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.FIELD=VALUE", help="Values on top of the file's.", show_default=False),
]
