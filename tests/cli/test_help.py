"""The help of each command shows whole descriptions at 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from megarl.cli import app


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands and groups, each with the words that start it."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        # A removed command has no help: it is an error with any argument.
        if not command.hidden:
            yield from commands(command, (*path, name))


COMMANDS = dict(commands(get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_cuts_no_description(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    command = COMMANDS[path]
    texts = [command.help, *(parameter.help for parameter in command.params if getattr(parameter, "help", None))]
    # A group shows the first sentence of each command.
    texts += [
        text.help.partition("\n\n")[0].partition(". ")[0]
        for text in getattr(command, "commands", {}).values()
        if not text.hidden
    ]
    # Lines may break at any blank.
    shown = "".join(done.stdout.split())
    assert [text for text in texts if "".join(text.split()) not in shown] == []
