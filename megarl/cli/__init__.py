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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from megarl import faults
from megarl.cli import convert, data, kubernetes, sandbox, slurm
from megarl.cli.arguments import CommandGroup, Overrides, RecipeCommand, RecipePath, recipe_file
from megarl.cli.checking import checked, checking, with_notices_shown
from megarl.cli.export import export
from megarl.cli.fields import schema, show_config
from megarl.cli.layouts import (
    LengthsOption,
    MeanTokensOption,
    MostOption,
    SearchOption,
    StalenessOption,
    refuse_search_options,
    search_layouts,
)
from megarl.cli.quickstart import MakeCommand, make, quickstart
from megarl.cli.reading import metrics, report, samples, watch
from megarl.cli.recipes import recipes
from megarl.cli.replay import replay
from megarl.cli.resize import FromOption, ToOption, plan_resize, resize
from megarl.console import (
    print_error,
    print_findings,
    print_lines,
    print_memory,
    print_plan,
    print_sizes,
    print_terms,
)
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
for group in (sandbox, data, slurm, kubernetes, convert):
    app.add_typer(group.app)
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


# typer has no options with an optional value, so a bare --resume is rewritten before parsing.
class _TrainCommand(RecipeCommand):
    """The command `train`, whose option `--resume` may have a value after an equals sign (`--resume=must`).

    The next argument is never the option's value.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--resume=if-any" if text == "--resume" else text for text in args])


@app.command(cls=_TrainCommand)
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
        # Before all other imports: they and the checks take seconds.
        Terminal(highlight=False, soft_wrap=True).print(
            f"megarl: checks and starts {recipe}", style="dim", markup=False
        )
    from megarl.config.override_text import override_text
    from megarl.platform.imports import uncollected
    from megarl.tracking.display import Display
    from megarl.tracking.earlier_run import EarlierRun, refuse_other_schema

    if resume and restart:
        raise ConfigError(
            "--resume and --restart: give one of them; --resume continues the run, --restart starts it from the "
            "beginning"
        )
    path, given = Path(recipe), list(overrides or ())
    is_of_run = path.is_dir()
    if is_of_run:
        if not resume and not restart:
            raise ConfigError(_folder_hint(path))
        if resume:
            # Checked before config.yaml is read: fields of another version would be reported as unknown keys.
            earlier = EarlierRun.read(path)
            earlier.refuse_newer_version()
            for checkpoint in earlier.checkpoints[:1]:
                refuse_other_schema(checkpoint)
        # A run's folder may have been moved or renamed since its config.yaml was written.
        given = [override_text(name, value) for name, value in _place_of(path).items()] + given
        path /= "config.yaml"
    display = Display()
    # Imports create many objects, and collections during them only take time.
    with uncollected():
        with checking(display):
            from megarl.preflight import (
                check_disk,
                download_missing,
                load,
                memory_defaults,
                with_memory_defaults,
                with_steps,
            )

            written = load(path, given, is_start=not dry_run, is_of_run=is_of_run)
            check_disk(written)
            faults.arm_driver(written.cluster.world_size)
        # Epochs are counted in records.
        if written.train.epochs is not None and not dry_run:
            download_missing(written, display.info)
        with checking(display):
            written = with_steps(written)
            loaded = with_memory_defaults(written, is_start=not dry_run)
        # Before the data are read: a finished run needs neither its data nor its model.
        if not dry_run and not restart and not _has_work(loaded, resume):
            return
        if not dry_run and download_missing(written, display.info):
            # The sizes of the model are known now.
            check_disk(written)
            loaded = with_memory_defaults(written, is_start=True)
        with contextlib.nullcontext() if dry_run else _ranks_importing(loaded):
            parallel, records, dropped, kept_records = checked(loaded, display, is_start=not dry_run)
            print_sizes(loaded, parallel, records, dropped)
            if defaults := list(memory_defaults(written, loaded)):
                print_lines(defaults)
            if dry_run:
                return
            # torch takes seconds to import, so the terminal shows a phase for it.
            with display.phase("loading libraries"), display.live():
                from megarl.loops.run import run
    asyncio.run(run(loaded, parallel, resume=resume, restart=restart, kept=kept_records, display=display))


@app.command("fork", cls=RecipeCommand)
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

    The new run is RUN_fork_STEP, unless name=NAME is given. It continues with the checkpoint's weights, optimizer
    state, step number and position in the data, as a resumed run does. To begin with the weights alone, use `megarl
    export RUN --step STEP` and set model.path to the result.
    """
    from megarl.loops import forking

    folder = forking.make_fork(run, step, [*(overrides or ()), *(changes or ())])
    print_lines([f"fork of {run} at step {step}: {folder}"])
    if no_start:
        print_lines([f"start it with: megarl train {folder} --resume=must"])
        return
    try:
        train(str(folder), resume="must")
    except BaseException:
        # A fork refused before its first start leaves nothing.
        if not (folder / "logs").exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _ranks_importing(recipe: Recipe) -> contextlib.AbstractContextManager[None]:
    """Return a context with an import of the ranks' libraries in the background. It takes longer than the checks."""
    from megarl.cluster.launchers import importing_early

    return importing_early(recipe.cluster)


def _folder_hint(path: Path) -> str:
    if (path / "config.yaml").exists():
        return f"{path}: is the folder of a run; continue it with: megarl train {path} --resume"
    return f"{path}: is a folder; give the YAML file of a recipe"


def _place_of(run_folder: Path) -> dict[str, str]:
    """Return the recipe fields giving a run folder's place, for a message."""
    absolute = run_folder.absolute()
    return {"runs_folder": str(absolute.parent), "name": absolute.name}


def _has_work(recipe: Recipe, resume: str | None) -> bool:
    """Return whether the run has steps left. For a finished run, print a message before anything starts or changes.

    Raises ConfigError if the run folder does not fit the options.
    """
    from megarl.config.recipe import recipe_changes
    from megarl.tracking.earlier_run import EarlierRun
    from megarl.tracking.run_folder import run_path

    earlier = EarlierRun.read(run_path(recipe))
    if resume is None:
        earlier.refuse_new_start()
        return True
    earlier.refuse_newer_version()
    if finished := earlier.finished_text(recipe.train.steps):
        print(finished)
        as_it_was_run = earlier.recipe()
        for change in recipe_changes(as_it_was_run, recipe) if as_it_was_run else ():
            print(f"the recipe differs from the finished run: {change}")
        return False
    if resume == "must":
        earlier.require_checkpoint()
    return True


@app.command("eval", cls=RecipeCommand)
def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL_OR_RUN", help="Folder of a Hugging Face model, or of a run.")],
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="YAML file of a recipe with data.validation, a name that `megarl recipes` lists, or the folder of a "
            "run.",
            callback=recipe_file,
        ),
    ],
    overrides: Overrides = None,
    n: Annotated[
        int | None,
        typer.Option("--n", min=1, help="Number of attempts per problem, instead of evaluation.samples_per_prompt."),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            "--k",
            metavar="K,K...",
            help="Values of k for pass@k and majority@k, for example 1,4. Instead of evaluation.k.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Sampling temperature, 0: greedy. Instead of evaluation.sampling.temperature."),
    ] = None,
    of_set: Annotated[
        list[str] | None,
        typer.Option("--set", help="Name of a validation set to evaluate; may be repeated. Default: all sets."),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Evaluate the run's best model (hf_best) instead of its last one.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results. Default: a new folder in evaluations/.", show_default=False),
    ] = None,
) -> None:
    """Evaluate a model on a recipe's validation sets: accuracy, pass@k, majority@k, all answers. No trainer starts."""
    options: dict[str, Any] = {"samples_per_prompt": n, "k": k and _numbers(k), "sampling.temperature": temperature}
    chosen = {name: value for name, value in options.items() if value is not None}
    from megarl.console import print_evaluation
    from megarl.loops.evaluation import prepare, run

    prepared = prepare(model, Path(recipe), overrides or (), options=chosen, sets=of_set or (), out=out, is_best=best)
    with_notices_shown(prepared.recipe)
    print_evaluation(asyncio.run(run(prepared)), prepared.folder)


def _numbers(text: str) -> list[int]:
    """Return the numbers in the option `--k`. Raises ConfigError if one is not a whole number."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--k {text}: not a list of whole numbers; write for example 1,4,16") from None


@app.command(cls=RecipeCommand)
def plan(
    context: typer.Context,
    recipe: RecipePath,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for use by programs.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also print the formula and the source of each term of the memory.")
    ] = False,
    search: SearchOption = False,
    most: MostOption = 10,
    lengths: LengthsOption = None,
    mean_tokens: MeanTokensOption = None,
    max_staleness: StalenessOption = None,
    before: FromOption = None,
    after: ToOption = None,
) -> None:
    """Predict memory by phase, whether it fits, and the bytes moved by a reshard. Reads config.json and starts nothing.

    Exit code 2: it does not fit, or no layout of --search does. Models named by recipes in launch/recipes need no
    download.
    """
    if before is not None and after is None:
        raise ConfigError("--from: does nothing without --to; add it, or leave this out")
    if after is not None:
        plan_resize(recipe, overrides or (), before or "", after, as_json=as_json)
        return
    if search:
        from megarl.config.recipe import load
        from megarl.layout_search.overrides import RecipeFile

        search_layouts(
            with_notices_shown(load(recipe, overrides or ())),
            RecipeFile(recipe, tuple(overrides or ())),
            most=most,
            run=lengths,
            mean_tokens=mean_tokens,
            max_staleness=max_staleness,
            as_json=as_json,
        )
        return
    refuse_search_options(context)
    from megarl.config.recipe import load
    from megarl.memory_plan.terms import explain_terms
    from megarl.preflight import (
        aligned,
        check_plan,
        gpu_kind,
        memory_defaults,
        not_downloaded,
        slower_layout,
        small_cache,
        table_of,
        verdict_of,
        with_chunk_tokens,
        with_memory_defaults,
    )
    from megarl.reshard.forecast.cost_model import forecast

    loaded = with_notices_shown(load(recipe, overrides or ()))
    shape, parallel = check_plan(loaded)
    as_written, loaded = loaded, with_memory_defaults(loaded)
    memory = table_of(loaded, parallel)
    found, kind = verdict_of(loaded, parallel, memory), gpu_kind(loaded)
    if not as_json:
        print_memory(loaded, memory)
        if explain:
            print_terms(loaded, memory)
        if defaults := list(memory_defaults(as_written, with_chunk_tokens(loaded))):
            print_lines(defaults)
    parallel = aligned(loaded, shape, parallel)
    counted = forecast(
        shape,
        parallel,
        ranks_per_node=loaded.cluster.ranks_per_node,
        engine_ranks_per_node=engines.ranks_per_node if (engines := loaded.cluster.groups.engines) else None,
        itemsize=2 if loaded.model.dtype == "bfloat16" else 4,
        bucket_bytes=loaded.weights.bucket_mib << 20,
        # Without a known kind the times are for an H200, and the output says "assumed".
        gpu=kind or "h200",
        adapter=loaded.lora if loaded.sends_adapter else None,
    )
    if as_json:
        head = {"recipe": loaded.name, "model": loaded.model.path, **found.as_json()}
        head["kv_cache_gib"] = loaded.rollout.kv_cache_gib if memory.cache else None
        head["notices"] = [*not_downloaded(loaded), *small_cache(loaded, parallel, memory), *slower_layout(loaded)]
        if explain:
            head["terms"] = [asdict(term) for term in explain_terms(memory)]
        print(json.dumps({**head, "memory": memory.as_json(), **counted}))
    else:
        print_plan(loaded, parallel, counted, is_assumed=kind is None)
        print_lines(
            [
                *not_downloaded(loaded),
                *(f"warning: {text}" for text in (*small_cache(loaded, parallel, memory), *slower_layout(loaded))),
                *found.lines,
            ]
        )
    # None: the GPUs' memory is unknown, and nothing is refused then.
    if found.fits is False:
        raise typer.Exit(ConfigError.exit_code)


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
        found, notices = {"here": examine()}, []
    else:
        loaded = with_notices_shown(load(recipe, overrides or ()))
        if wrong := [*machines(loaded)]:
            raise ConfigError(error_page(f"recipe {loaded.name}", wrong))
        found, notices = asyncio.run(examine_nodes(loaded, planned_host_bytes(loaded)))
    rows = differences(found)
    if as_json:
        print(json.dumps({"nodes": list(found), "notices": notices, "findings": [[n, *f] for n, f in rows]}))
    else:
        print_findings(rows, notices, with_nodes=len(found) > 1)
    if any(finding.state == "bad" for _, finding in rows):
        raise typer.Exit(ConfigError.exit_code)


for reader in (report, watch, metrics, samples):
    app.command()(reader)


@app.command()
def serve(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="Folder of a run, or of a Hugging Face model.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on. An address other than loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0: any free port.")] = 8000,
    token_variable: Annotated[
        str,
        typer.Option(
            help="Name of an environment variable with a token. If the variable is set, clients must send its value."
        ),
    ] = "MEGARL_SERVE_TOKEN",
    tp: Annotated[int, typer.Option(min=1, help="Number of tensor-parallel ranks of the engine.")] = 1,
    kv_cache_gib: Annotated[float, typer.Option(min=0.01, help="Size of the KV cache of one rank in GiB.")] = 1.0,
    metrics: Annotated[
        bool,
        typer.Option("--metrics", help="Serve /metrics (Prometheus) and /health too, for clients with the token."),
    ] = False,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="LoRA adapter, a PEFT folder. Requests choose it by their field `model`. May be given several times.",
        ),
    ] = None,
) -> None:
    """Serve a trained model with OpenAI's API, until SIGINT or SIGTERM arrives."""
    from megarl.config import RolloutConfig
    from megarl.config.rollout import LOOPBACK, MIN_TOKEN_CHARACTERS, EndpointConfig
    from megarl.serving.local_model import serve

    # From the environment: an argument would be visible in the list of processes.
    token = os.environ.get(token_variable) or None
    if host not in LOOPBACK and len(token or "") < MIN_TOKEN_CHARACTERS:
        raise ConfigError(
            f"--host {host}: not a loopback address, so clients need a token; set {token_variable} to one of at least "
            f"{MIN_TOKEN_CHARACTERS} characters"
        )
    config = EndpointConfig(host=host, port=port, token=token, metrics=metrics)
    asyncio.run(serve(path, config, RolloutConfig(tp=tp, kv_cache_gib=kv_cache_gib), print, adapter or ()))


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
