"""Files delivered with megarl that are not Python: recipes, and scripts for Slurm."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def home() -> Path:
    """Return the folder containing `launch/`: the repository in a clone, the package folder in an installed wheel.

    The repository has a symbolic link `megarl/launch` to `launch/`. The build of a wheel follows it, so a wheel has
    copies of these files in its package folder.
    """
    return PACKAGE.parent if (PACKAGE.parent / "launch/recipes").is_dir() else PACKAGE


def is_clone() -> bool:
    """Return whether megarl runs from its repository."""
    return home() != PACKAGE


def recipes() -> dict[str, Path]:
    """Return the delivered recipes by name, without `.yaml`, in alphabetical order."""
    return {path.stem: path for path in sorted((home() / "launch/recipes").glob("*.yaml"))}
