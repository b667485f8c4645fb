"""Each command that takes a recipe accepts the names that `megarl recipes` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megarl.cli import app
from megarl.config.recipe import load
from megarl.files import shipped
from megarl.types import ConfigError
from tests.cli.test_help import COMMANDS

ARGUMENTS = [
    pytest.param(command, parameter, id=" ".join(path))
    for path, command in COMMANDS.items()
    for parameter in command.params
    if "RECIPE" in (parameter.metavar or "")
]


def test_all_commands_with_a_recipe_are_known() -> None:
    """A new one with another metavar would not be covered below."""
    covered = {str(argument.id) for argument in ARGUMENTS}
    named = {" ".join(path) for path, command in COMMANDS.items() if any(p.name == "recipe" for p in command.params)}
    assert covered == named
    assert {"train", "plan", "eval", "show-config", "doctor", "data check", "slurm submit"} <= covered


@pytest.mark.parametrize(("command", "parameter"), ARGUMENTS)
def test_a_command_takes_a_delivered_recipe_by_name(
    command: Any, parameter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    context = command.context_class(command)
    delivered = str(shipped.recipes()["tiny_rl"])
    for name in ("tiny_rl", "tiny_rl.yaml"):
        assert parameter.process_value(context, name) == delivered
    (tmp_path / "tiny_rl.yaml").touch()
    assert parameter.process_value(context, "tiny_rl.yaml") == "tiny_rl.yaml"
    assert parameter.process_value(context, "tiny_rl") == delivered
    assert parameter.process_value(context, "other.yaml") == "other.yaml"


def test_a_name_works_from_the_command_line() -> None:
    done = CliRunner().invoke(app, ["slurm", "render", "tiny_rl"])
    assert done.exit_code == 0, done.output
    assert f"set -- {shipped.recipes()['tiny_rl']}" in done.stdout


def test_a_name_with_a_typing_error_is_corrected() -> None:
    with pytest.raises(ConfigError, match="`megarl recipes` lists; did you mean tiny_rl"):
        load("tiny_rll")
    with pytest.raises(ConfigError, match=r"`megarl recipes` lists\."):
        load("elsewhere/tiny_rll")
