"""Delivered files: the tiny recipes, and the commands that make their inputs."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from megarl.cli.quickstart import MAKERS
from megarl.data.sources.rows import data_files
from megarl.files.model_folder import missing_folder_message
from megarl.files.shipped import INPUT_COMMANDS, input_command, recipes, tool
from megarl.types import DataError

TINY = {name: path for name, path in recipes().items() if name.startswith(("tiny_", "quickstart"))}


def paths_in(value: object) -> set[str]:
    """Return all texts below runs/ in a recipe."""
    if isinstance(value, dict):
        return {path for inside in value.values() for path in paths_in(inside)}
    return {value} if isinstance(value, str) and value.startswith("runs/") else set()


@pytest.mark.parametrize("name", TINY)
def test_each_input_of_a_tiny_recipe_has_a_command_or_a_recipe(name: str) -> None:
    paths = paths_in(yaml.safe_load(TINY[name].read_text()))
    without = {path for path in paths if input_command(path) is None}
    # What another delivered recipe exports: runs/NAME/hf.
    assert paths and {path for path in without if Path(path).parts[1] not in TINY} == set()


def test_commands_are_those_of_makers_and_of_the_recipes_comments() -> None:
    comments = " ".join(
        line.removeprefix("#").strip()
        for path in TINY.values()
        for line in path.read_text().splitlines()
        if line.startswith("#")
    )
    for folder, command in INPUT_COMMANDS.items():
        if command == "megarl quickstart":
            continue
        program, verb, maker, *options = shlex.split(command)
        assert (program, verb) == ("megarl", "make") and tool(MAKERS[maker][0]).is_file()
        assert options[options.index("--out") + 1] == folder
        assert command in comments.replace(";", " "), command


def test_an_error_about_a_missing_input_has_its_command() -> None:
    assert "megarl make model --family qwen3_moe" in missing_folder_message(Path("runs/quickstart_input/experts"))
    assert missing_folder_message(Path("runs/quickstart_sft/hf")).endswith(": megarl quickstart")
    assert input_command("runs/quickstart_other/hf") is None
    with pytest.raises(DataError, match="this command makes it: megarl make code --out runs/tiny_code_input/data"):
        data_files("runs/tiny_code_input/data/train.jsonl")
