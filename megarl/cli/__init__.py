"""The command `megarl`. Commands import heavy modules inside their functions, so that `--help` is fast."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from megarl import faults
from megarl.cli import convert, data, sandbox, slurm
from megarl.cli.arguments import CommandGroup, Overrides, RecipeCommand, recipe_file
from megarl.cli.checking import with_notices_shown
from megarl.cli.evaluate import evaluate
from megarl.cli.export import export
from megarl.cli.fields import schema, show_config
from megarl.cli.plan import plan
from megarl.cli.quickstart import MakeCommand, make, quickstart
from megarl.cli.reading import metrics, report, samples, watch
from megarl.cli.recipes import recipes
from megarl.cli.removed import add_removed_commands
from megarl.cli.replay import replay
from megarl.cli.resize import resize
from megarl.cli.train import TrainCommand, fork_run, train
from megarl.console.lines import print_error
from megarl.console.surveys import print_findings
from megarl.terminal import guard_logging, printable
from megarl.types import ConfigError, MegarlError

app = typer.Typer(
    name="megarl",
    cls=CommandGroup,
    help="Reinforcement learning for large language models: Megatron-Core trainers and vLLM engines in one process.",
    no_args_is_help=True,
    # Brackets in help texts are literal, and help needs no rich.
    rich_markup_mode=None,
    # `main` prints tracebacks itself, without escape sequences.
    pretty_exceptions_enable=False,
)
for group in (sandbox, data, slurm, convert):
    app.add_typer(group.app)
add_removed_commands(app)
app.command()(recipes)
app.command(cls=RecipeCommand)(quickstart)
app.command(cls=MakeCommand)(make)
app.command()(export)
app.command(cls=RecipeCommand)(replay)
app.command(cls=RecipeCommand)(resize)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"megarl {version('megarl')}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version of megarl, then exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    faults.arm_driver()


app.command(cls=TrainCommand)(train)
app.command("fork", cls=RecipeCommand)(fork_run)
app.command("eval", cls=RecipeCommand)(evaluate)
app.command(cls=RecipeCommand)(plan)
app.command(cls=RecipeCommand)(show_config)
app.command()(schema)


@app.command(cls=RecipeCommand)
def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="YAML file of a recipe, or a name that `megarl recipes` lists: also examine all nodes of its "
            "launcher, and the network between them.",
            callback=recipe_file,
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for use by programs.")] = False,
) -> None:
    """Show whether this machine's libraries and devices fit together, and which of them megarl will use."""
    from megarl.cluster.doctor import differences, examine, examine_nodes
    from megarl.config.recipe import error_page, load
    from megarl.preflight import planned_host_bytes
    from megarl.preflight.sizes import machines

    # Without a recipe only this machine is examined, so no ranks start.
    if recipe is None:
        examinations, notices = {"here": examine()}, []
    else:
        loaded = with_notices_shown(load(recipe, overrides or ()))
        if wrong := [*machines(loaded)]:
            raise ConfigError(error_page(f"recipe {loaded.name}", wrong))
        examinations, notices = asyncio.run(examine_nodes(loaded, planned_host_bytes(loaded)))
    rows = differences(examinations)
    if as_json:
        print(json.dumps({"nodes": list(examinations), "notices": notices, "findings": [[n, *f] for n, f in rows]}))
    else:
        print_findings(rows, notices, with_nodes=len(examinations) > 1)
    if any(finding.state == "bad" for _, finding in rows):
        raise typer.Exit(ConfigError.exit_code)


for reader in (report, watch, metrics, samples):
    app.command()(reader)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command. An expected error prints one message and sets its exit code.

    Any other error prints a traceback and sets exit code 70.
    """
    if not sys.warnoptions:
        # Deprecations of other libraries are not the user's to fix, and they would hide real messages.
        warnings.simplefilter("ignore")
    # Libraries log texts of data and models, and these must not send escape sequences.
    guard_logging()
    try:
        app(arguments)
    except MegarlError as error:
        print_error(error)
        _leave(error.exit_code)
    except Exception as error:
        # A full disk surfaces as an OSError of any library, so it is recognised here and not where it happens.
        from megarl.files.atomic import disk_full

        if (full := disk_full(error)) is not None:
            print_error(full)
            _leave(full.exit_code)
        with contextlib.suppress(OSError):
            print(printable(traceback.format_exc()), end="", file=sys.stderr)
        _leave(MegarlError.exit_code)


def _leave(code: int) -> NoReturn:
    """End the process with this exit code, even if its output cannot be written (full disk, closed terminal)."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # Python flushes again at exit. A second failure would replace the exit code by 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
