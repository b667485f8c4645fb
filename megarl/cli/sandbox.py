"""`megarl sandbox`: what this machine's sandbox can do."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from megarl.types import ConfigError

app = typer.Typer(
    name="sandbox",
    help="Programs that the policy writes, run where they can do no harm.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def _sandbox() -> None:
    pass


@app.command("check")
def check_sandbox(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")] = False,
) -> None:
    """Show which layers of the sandbox this machine has, and what to do for those that it lacks.

    The exit code is 0 where it has all of them, else 2.
    """
    from megarl.console import print_layers
    from megarl.sandbox.check import examine

    found = examine()
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        print_layers(found)
    if not found.is_complete:
        raise typer.Exit(ConfigError.exit_code)
