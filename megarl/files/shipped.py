"""Files delivered with megarl outside its package: recipes, Slurm scripts, makers of tiny models and data."""

from __future__ import annotations

from pathlib import Path

from megarl.types import ConfigError

SCHEMA = "recipe.schema.json"
"""File with the JSON Schema of recipes, in the folder of the recipes."""
INPUT_COMMANDS = {
    "runs/quickstart_input/experts": "megarl make model --family qwen3_moe --num-layers 2 --out "
    "runs/quickstart_input/experts",
    "runs/quickstart_input": "megarl quickstart",
    "runs/quickstart_sft": "megarl quickstart",
    "runs/quickstart": "megarl quickstart",
    "runs/tiny_code_input/model": "megarl make model --out runs/tiny_code_input/model",
    "runs/tiny_code_input/data": "megarl make code --out runs/tiny_code_input/data",
    "runs/tiny_tools_input/model": "megarl make model --out runs/tiny_tools_input/model --num-layers 2 "
    "--initializer-range 0.08 --tool-words",
    "runs/tiny_tools_input/data": "megarl make tools --out runs/tiny_tools_input/data",
}
"""Commands that make the inputs of the tiny recipes, by folder. If several folders contain a path, the first one
counts.
"""
PACKAGE = Path(__file__).resolve().parents[1]


def home() -> Path:
    """Return the folder with `launch/` and `tools/`: the repository in a clone, the package folder in a wheel.

    The repository has symbolic links `megarl/launch` and `megarl/tools`. A wheel's build follows them, so a wheel has
    copies of these files. Raises ConfigError if neither folder has them.
    """
    for folder in (PACKAGE.parent, PACKAGE):
        if (folder / "launch/recipes").is_dir():
            return folder
    raise ConfigError(f"{PACKAGE / 'launch'}: not found; install megarl's wheel, or use its repository")


def is_clone() -> bool:
    return home() != PACKAGE


def tool(name: str) -> Path:
    """Return a program in `tools/`. A wheel has only those listed in `pyproject.toml`."""
    return home() / "tools" / name


def input_command(path: str | Path) -> str | None:
    """Return the command that makes an input of the tiny recipes, or None."""
    text = Path(path).as_posix()
    return next((command for folder, command in INPUT_COMMANDS.items() if f"{text}/".startswith(f"{folder}/")), None)


def schema() -> Path:
    return home() / "launch/recipes" / SCHEMA


def recipe_file(name: str) -> str:
    """Return the file of the delivered recipe `name`, with or without `.yaml`; else `name`, as if it exists here."""
    delivered_file = recipes().get(name.removesuffix(".yaml"))
    return name if delivered_file is None or Path(name).exists() else str(delivered_file)


def recipes() -> dict[str, Path]:
    """Return the delivered recipes by name, without `.yaml`, sorted."""
    return {path.stem: path for path in sorted((home() / "launch/recipes").glob("*.yaml"))}
