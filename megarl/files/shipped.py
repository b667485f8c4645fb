"""Files delivered with megarl that are not Python: recipes, and scripts for Slurm."""

from __future__ import annotations

from pathlib import Path

from megarl.types import ConfigError

SCHEMA = "recipe.schema.json"
"""Name of the file with the JSON Schema of recipes, in the folder of the recipes."""
PACKAGE = Path(__file__).resolve().parents[1]


def home() -> Path:
    """Return the folder containing `launch/`: the repository in a clone, the package folder in an installed wheel.

    The repository has a symbolic link `megarl/launch` to `launch/`. The build of a wheel follows it, so a wheel has
    copies of these files in its package folder. Raises ConfigError if neither has them.
    """
    for folder in (PACKAGE.parent, PACKAGE):
        if (folder / "launch/recipes").is_dir():
            return folder
    raise ConfigError(f"{PACKAGE / 'launch'}: not found; install megarl's wheel, or use its repository")


def is_clone() -> bool:
    """Return whether megarl runs from its repository."""
    return home() != PACKAGE


def schema() -> Path:
    """Return the file with the JSON Schema of recipes."""
    return home() / "launch/recipes" / SCHEMA


def recipe_file(given: str) -> str:
    """Return the file of a delivered recipe if `given` is its name, with or without `.yaml`. Otherwise return `given`.

    An existing file or folder of that name comes first.
    """
    delivered = recipes().get(given.removesuffix(".yaml"))
    return given if delivered is None or Path(given).exists() else str(delivered)


def recipes() -> dict[str, Path]:
    """Return the delivered recipes by name, without `.yaml`, in alphabetical order."""
    return {path.stem: path for path in sorted((home() / "launch/recipes").glob("*.yaml"))}
