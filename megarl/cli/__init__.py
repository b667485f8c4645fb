"""The command `megarl`. Commands import heavy modules inside their functions, so that `--help` is fast."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from megarl import faults
from megarl.cli import convert, data, sandbox, slurm
from megarl.cli.arguments import CommandGroup, Overrides, RecipeCommand, RecipePath, recipe_file
from megarl.cli.checking import check_completely, checking, with_notices_shown
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
from megarl.cli.service import service
from megarl.console.lines import print_error, print_lines
from megarl.console.predictions import print_sizes
from megarl.console.surveys import print_findings
from megarl.terminal import Terminal, guard_logging, printable
from megarl.types import ConfigError, MegarlError

if TYPE_CHECKING:
    from megarl.config import Recipe

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
app.command(cls=RecipeCommand)(service)


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


# typer has no options with an optional value, so a bare --resume is rewritten before parsing.
class TrainCommand(RecipeCommand):
    """The command `train`. Its option `--resume` may have a value after an equals sign: `--resume=must`.

    The next argument is never the option's value.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--resume=if-any" if text == "--resume" else text for text in args])


def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the recipe, its model and its data, print the resulting sizes, then exit without training.",
        ),
    ] = False,
    resume: Annotated[
        Literal["if-any", "must"] | None,
        typer.Option(
            "--resume",
            metavar="[=must]",
            help="Continue the run from its newest checkpoint, or start it if there is none. --resume=must: "
            "fail if there is none. RECIPE may be the run's folder.",
            show_default=False,
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Start the run from the beginning. The content of its folder is moved to its subfolder earlier/.",
        ),
    ] = False,
) -> None:
    """Check a recipe, its model and its data, then train."""
    if not dry_run:
        # Printed before the slow imports and checks, which take seconds.
        Terminal(highlight=False, soft_wrap=True).print(
            f"megarl: checking {recipe}, then training", style="dim", markup=False
        )
    from megarl.config.reading.override_text import override_text
    from megarl.platform.imports import disable_collector
    from megarl.tracking.display import Display

    if resume and restart:
        raise ConfigError(
            "--resume and --restart: give one of them; --resume continues the run, --restart starts it from the "
            "beginning"
        )
    path, override_texts = Path(recipe), list(overrides or ())
    is_of_run = path.is_dir()
    if is_of_run:
        _check_run_folder(path, resume, is_restart=restart)
        # The run's folder may have been moved or renamed since its config.yaml was written.
        override_texts = [override_text(name, value) for name, value in _folder_fields(path).items()] + override_texts
        path /= "config.yaml"
    display = Display()
    # Imports create many objects, and garbage collection among them would only take time.
    with disable_collector():
        with checking(display):
            from megarl.datasets.counts import with_steps
            from megarl.planner.defaults import memory_defaults, with_memory_defaults
            from megarl.preflight import check_disk, download_missing, load

            written_recipe = load(path, override_texts, is_start=not dry_run, is_of_run=is_of_run)
            check_disk(written_recipe)
            faults.arm_driver(written_recipe.cluster.world_size)
        # Counting epochs needs the number of records.
        if written_recipe.train.epochs is not None and not dry_run:
            download_missing(written_recipe, display.info)
        with checking(display):
            written_recipe = with_steps(written_recipe)
            resolved_recipe = with_memory_defaults(written_recipe, is_start=not dry_run)
        # Before the data is read: a finished run needs neither data nor model.
        if not dry_run and not restart and not _has_steps_left(resolved_recipe, resume):
            return
        if not dry_run and download_missing(written_recipe, display.info):
            # The model's sizes are known only after the download.
            check_disk(written_recipe)
            resolved_recipe = with_memory_defaults(written_recipe, is_start=True)
        with contextlib.nullcontext() if dry_run else _import_in_background(resolved_recipe):
            parallel, records, dropped, record_digests = check_completely(
                resolved_recipe, display, is_start=not dry_run
            )
            print_sizes(resolved_recipe, parallel, records, dropped)
            if defaults := list(memory_defaults(written_recipe, resolved_recipe)):
                print_lines(defaults)
            if dry_run:
                return
            # Importing torch takes seconds, so show a phase for it.
            with display.phase("loading libraries"), display.live():
                from megarl.loops.run import run
    asyncio.run(
        run(resolved_recipe, parallel, resume=resume, restart=restart, record_digests=record_digests, display=display)
    )


def fork_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run (runs/NAME).")],
    step: Annotated[int, typer.Option(min=1, help="Step of the checkpoint from which the new run starts.")],
    overrides: Overrides = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="An override, like the arguments; may be repeated."),
    ] = None,
    no_start: Annotated[
        bool, typer.Option("--no-start", help="Only make the new run's folder, and print the command that starts it.")
    ] = False,
) -> None:
    """Start a new run from a run's checkpoint, with a changed recipe.

    The new run is RUN_fork_STEP, unless name=NAME is given. Like a resumed run, it continues with the checkpoint's
    weights, optimizer state, step number and position in the data. To begin with the weights alone, use `megarl export
    RUN --step STEP` and set model.path to the result.
    """
    from megarl.loops.commands import forking

    folder = forking.make_fork(run, step, [*(overrides or ()), *(changes or ())])
    print_lines([f"fork of {run} at step {step}: {folder}"])
    if no_start:
        print_lines([f"start it with: megarl train {folder} --resume=must"])
        return
    try:
        train(str(folder), resume="must")
    except BaseException:
        # If the fork is refused before its first start, leave nothing behind.
        if not (folder / "logs").exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _import_in_background(recipe: Recipe) -> contextlib.AbstractContextManager[None]:
    """Import the ranks' libraries in the background within this context: imports take longer than the checks."""
    from megarl.cluster.launchers.run_nodes import importing_early

    return importing_early(recipe.cluster)


def _folder_hint(path: Path) -> str:
    if (path / "config.yaml").exists():
        return f"{path}: is the folder of a run; continue it with: megarl train {path} --resume"
    return f"{path}: is a folder; give the YAML file of a recipe"


def _folder_fields(run_folder: Path) -> dict[str, str]:
    absolute = run_folder.absolute()
    return {"runs_folder": str(absolute.parent), "name": absolute.name}


def _check_run_folder(folder: Path, resume: str | None, *, is_restart: bool) -> None:
    """Raise ConfigError or DataError for a run's folder that this command cannot train.

    Call it before config.yaml is read: fields of another version would be reported as unknown keys.
    """
    from megarl.tracking.run_record import RunRecord, refuse_other_schema

    if not resume and not is_restart:
        raise ConfigError(_folder_hint(folder))
    if resume:
        run_record = RunRecord.read(folder)
        run_record.refuse_newer_version()
        for checkpoint in run_record.checkpoints[:1]:
            refuse_other_schema(checkpoint)


def _has_steps_left(recipe: Recipe, resume: str | None) -> bool:
    """Return whether the run has steps left. For a finished run, print this before anything starts or changes.

    Raises ConfigError if the run folder does not fit the options.
    """
    from megarl.config.recipe import recipe_changes
    from megarl.tracking.run_folder import run_path
    from megarl.tracking.run_record import RunRecord

    run_record = RunRecord.read(run_path(recipe))
    # Without --resume, an existing run must not be continued.
    if resume is None:
        run_record.refuse_new_start()
        return True
    run_record.refuse_newer_version()
    if finished_text := run_record.finished_text(recipe.train.steps):
        print(finished_text)
        recipe_of_run = run_record.recipe()
        for change in recipe_changes(recipe_of_run, recipe) if recipe_of_run else ():
            print(f"the recipe differs from the finished run: {change}")
        return False
    if resume == "must":
        run_record.require_checkpoint()
    return True


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
    from megarl.cluster.checks.doctor import examine, examine_nodes, merge_findings
    from megarl.config.recipe import error_page, load
    from megarl.planner.predictions import planned_host_bytes
    from megarl.preflight.sizes import check_machines

    # Without a recipe only this machine is examined, so no ranks start.
    if recipe is None:
        examinations, notices = {"here": examine()}, []
    else:
        loaded = with_notices_shown(load(recipe, overrides or ()))
        if machine_faults := [*check_machines(loaded)]:
            raise ConfigError(error_page(f"recipe {loaded.name}", machine_faults))
        examinations, notices = asyncio.run(examine_nodes(loaded, planned_host_bytes(loaded)))
    rows = merge_findings(examinations)
    if as_json:
        lines = [[nodes, f.place, f.level, f.advice] for nodes, f in rows]
        print(json.dumps({"nodes": list(examinations), "notices": notices, "findings": lines}))
    else:
        print_findings(rows, notices, with_nodes=len(examinations) > 1)
    if any(finding.level == "bad" for _, finding in rows):
        raise typer.Exit(ConfigError.exit_code)


for reader in (report, watch, metrics, samples):
    app.command()(reader)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command. An expected error prints one message and sets its exit code.

    Any other error prints a traceback and sets exit code 70.
    """
    if not sys.warnoptions:
        # Users cannot fix deprecations inside libraries, and such warnings would hide real messages.
        warnings.simplefilter("ignore")
    # Libraries log texts of data and models. Keep escape sequences out of them.
    guard_logging()
    try:
        app(arguments)
    except MegarlError as error:
        print_error(error)
        _exit_process(error.exit_code)
    except Exception as error:
        # Any library may raise an OSError for a full disk, so recognise it here.
        from megarl.files.atomic import disk_full

        if (full := disk_full(error)) is not None:
            print_error(full)
            _exit_process(full.exit_code)
        with contextlib.suppress(OSError):
            print(printable(traceback.format_exc()), end="", file=sys.stderr)
        _exit_process(MegarlError.exit_code)


def _exit_process(code: int) -> NoReturn:
    """End the process with this exit code, even if its output cannot be written (full disk, closed terminal)."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            # Python flushes again at exit. A second failure would replace the exit code by 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
