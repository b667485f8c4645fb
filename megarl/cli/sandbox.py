"""`megarl sandbox`: shows the sandbox isolation available on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from megarl.cli.arguments import command_group
from megarl.types import ConfigError

app = command_group("sandbox", "Sandbox: isolated execution of programs written by the policy.")


@app.callback()
def _sandbox() -> None:
    pass


@app.command("check")
def check_sandbox(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for use by programs.")] = False,
) -> None:
    """Show which isolation layers this machine supports, and how to get missing ones.

    Exit code 0: all layers are supported, 2: a layer is missing.
    """
    from megarl.console.surveys import print_layers
    from megarl.sandbox.check import examine

    examination = examine()
    if as_json:
        print(json.dumps(examination.as_json()))
    else:
        print_layers(examination)
    if not examination.is_complete:
        raise typer.Exit(ConfigError.exit_code)
