"""`megarl quickstart` trains a tiny model from nothing; `megarl make` makes the models and data of the tiny recipes."""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from megarl.cli.arguments import Overrides
from megarl.files import shipped
from megarl.platform.commands import run_in_foreground
from megarl.types import ConfigError

MAKERS = {
    "model": ("make_tiny_model.py", "tiny model of any family, with random weights"),
    "arithmetic": (
        "make_dataset.py",
        "problems of arithmetic, for the quickstart, or of another reasoning-gym task",
    ),
    "code": ("make_code_data.py", "programming problems with tests, for tiny_code"),
    "tools": ("make_tool_data.py", "products that need the calculator, for tiny_tools_sft and tiny_tools"),
    "plays": ("make_play_data.py", "games and searches of a weak player"),
}
"""Delivered programs by name: the file in `tools/`, and its product."""
_INPUT = "runs/quickstart_input"
_RUNS = ("quickstart_sft", "quickstart")


class MakeCommand(TyperCommand):
    """The command `make`. It passes all options after NAME on to the program, even `--help`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_for_program = bool(args) and not args[0].startswith("-")
        # click would read the program's `--help` as its own. Nothing after `--` is an option of this command.
        return super().parse_args(ctx, [args[0], "--", *args[1:]] if is_for_program else args)


def make(
    name: Annotated[str, typer.Argument(metavar="NAME", help="; ".join(f"{n}: {m[1]}" for n, m in MAKERS.items()))],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPTIONS]", help="Options of NAME; `megarl make NAME --help` lists them."),
    ] = None,
) -> None:
    """Make a tiny model or small data for the tiny recipes."""
    if name not in MAKERS:
        raise ConfigError(f"megarl make {name}: no such maker; choose one of {', '.join(MAKERS)}")
    sys.argv = [f"megarl make {name}", *(options or ())]
    runpy.run_path(str(shipped.tool(MAKERS[name][0])), run_name="__main__")


def quickstart(overrides: Overrides = None) -> None:
    """Make a tiny model and arithmetic problems, train by SFT, then by GRPO, and show the result.

    Takes two to four minutes on two CPU cores, and writes to runs/ of the current folder. Overrides apply to both runs.
    """
    if find_spec("reasoning_gym") is None:
        remedy = "launch/setup.sh reasoning-gym" if shipped.is_clone() else "pip install 'megarl[reasoning-gym]'"
        raise ConfigError(
            f"the package reasoning-gym is missing; it makes the arithmetic problems; install it: {remedy}"
        )
    recipes = shipped.recipes()
    for name in _RUNS:
        _move_aside(Path("runs") / name)
    megarl = (sys.executable, "-m", "megarl")
    model_options = ("--num-layers", "2", "--initializer-range", "0.08")
    for command in (
        (*megarl, "make", "model", "--out", f"{_INPUT}/model", *model_options),
        (*megarl, "make", "arithmetic", "--out", f"{_INPUT}/data"),
        *((*megarl, "train", str(recipes[name]), *(overrides or ())) for name in _RUNS),
        (sys.executable, str(shipped.tool("quickstart_report.py"))),
    ):
        _run(command)


def _move_aside(run_folder: Path) -> None:
    if run_folder.exists():
        earlier = run_folder.parent / "earlier"
        earlier.mkdir(exist_ok=True)
        run_folder.rename(earlier / f"{run_folder.name}-{time.strftime('%Y%m%d-%H%M%S')}")


def _run(command: Sequence[str]) -> None:
    if code := run_in_foreground(command):
        raise typer.Exit(code)
