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
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from megarl.cli import convert, data, kubernetes, sandbox, slurm
from megarl.cli.arguments import CommandGroup, Overrides, RecipeCommand, RecipePath
from megarl.cli.checking import with_notices_shown
from megarl.cli.export import export
from megarl.cli.layouts import (
    LengthsOption,
    MeanTokensOption,
    MostOption,
    SearchOption,
    StalenessOption,
    refuse_search_options,
    search_layouts,
)
from megarl.cli.recipes import recipes
from megarl.cli.training import TrainCommand, fork_run, train
from megarl.console import print_error, print_findings, print_lines, print_memory, print_plan
from megarl.terminal import Terminal, guard_logging, printable
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
for group in (sandbox, data, slurm, kubernetes, convert):
    app.add_typer(group.app)
app.command()(recipes)
app.command()(export)
app.command(cls=TrainCommand)(train)
app.command("fork", cls=RecipeCommand)(fork_run)


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
    pass


@app.command("eval", cls=RecipeCommand)
def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL_OR_RUN", help="Folder of a Hugging Face model, or of a run.")],
    recipe: Annotated[
        Path,
        typer.Argument(metavar="RECIPE", help="YAML file of a recipe with data.validation, or the folder of a run."),
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

    prepared = prepare(model, recipe, overrides or (), options=chosen, sets=of_set or (), out=out, is_best=best)
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
    search: SearchOption = False,
    most: MostOption = 10,
    lengths: LengthsOption = None,
    mean_tokens: MeanTokensOption = None,
    max_staleness: StalenessOption = None,
) -> None:
    """Predict memory by phase, whether it fits, and the bytes moved by a reshard. Reads config.json and starts nothing.

    Exit code 2: it does not fit, or no layout of --search does. Models named by recipes in launch/recipes need no
    download.
    """
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
        with_memory_defaults,
    )
    from megarl.reshard.cost_model import forecast

    loaded = with_notices_shown(load(recipe, overrides or ()))
    shape, layout = check_plan(loaded)
    as_written, loaded = loaded, with_memory_defaults(loaded)
    memory = table_of(loaded, layout)
    found, kind = verdict_of(loaded, layout, memory), gpu_kind(loaded)
    if not as_json:
        print_memory(loaded, memory)
        if loaded is not as_written:
            print_lines(list(memory_defaults(as_written, loaded)))
    layout = aligned(loaded, shape, layout)
    counted = forecast(
        shape,
        layout,
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
        head["notices"] = [*not_downloaded(loaded), *small_cache(loaded, layout, memory), *slower_layout(loaded)]
        print(json.dumps({**head, "memory": memory.as_json(), **counted}))
    else:
        print_plan(loaded, layout, counted, is_assumed=kind is None)
        print_lines(
            [
                *not_downloaded(loaded),
                *(f"warning: {text}" for text in (*small_cache(loaded, layout, memory), *slower_layout(loaded))),
                *found.lines,
            ]
        )
    # None: the GPUs' memory is unknown, and nothing is refused then.
    if found.fits is False:
        raise typer.Exit(ConfigError.exit_code)


def _print_fields(is_asked: bool) -> None:
    if is_asked:
        from megarl.config.field_table import fields_markdown

        print(fields_markdown(), end="")
        raise typer.Exit


def _print_migration(is_asked: bool) -> None:
    if is_asked:
        from megarl.config.migration import migration_page

        print(migration_page(), end="")
        raise typer.Exit


@app.command(cls=RecipeCommand)
def show_config(
    recipe: RecipePath,
    overrides: Overrides = None,
    # Both pages are eager, so that they need no recipe.
    markdown: Annotated[
        bool,
        typer.Option(
            "--markdown",
            help="Print the reference of all recipe fields as Markdown, then exit. Needs no RECIPE.",
            is_eager=True,
            callback=_print_fields,
        ),
    ] = False,
    migration: Annotated[
        bool,
        typer.Option(
            "--migration",
            help="Print a table of other training programs' options and the recipe fields for them as "
            "Markdown, then exit. Needs no RECIPE.",
            is_eager=True,
            callback=_print_migration,
        ),
    ] = False,
) -> None:
    """Print a recipe in full: each field with its description."""
    from megarl.config.recipe import load, to_yaml
    from megarl.preflight import with_memory_defaults

    loaded = with_notices_shown(load(recipe, overrides or ()))
    print(to_yaml(with_memory_defaults(loaded), comments=True), end="")


@app.command()
def schema() -> None:
    """Print the JSON Schema (draft 2020-12) of recipe files, for completion and checks in an editor."""
    from megarl.config.json_schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=1, ensure_ascii=False))


@app.command(cls=RecipeCommand)
def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="YAML file of a recipe: also examine all nodes of its launcher, and the network between them.",
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


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN [RUN2 ...]", help="Folders of runs (runs/NAME), or of evaluations."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="HTML file to write. Default: report.html in the run's folder; for several runs in the "
            "current folder.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write one HTML page about a run, or several side by side: curves, times, samples, errors. Needs no network.

    For evaluations: accuracies, differences from the first one with confidence intervals, changed answers.
    """
    from megarl.console import print_report
    from megarl.report.page import write_report

    print_report(*write_report(runs, out))


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run (runs/NAME), also of another machine's.")],
    once: Annotated[bool, typer.Option("--once", help="Print the dashboard once, then exit with code 0.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at the run's files.")] = 2.0,
) -> None:
    """Show a running run: progress, curves, times, warnings, samples. Ends with the run, and with its exit code.

    Only files of the run's folder are read. If the output is not a terminal, each step gets a line.
    """
    from megarl.report.watch import watch

    try:
        code = watch(run, Terminal(highlight=False), interval_seconds=interval, is_once=once)
    # Ctrl-C ends the command and not the run, so its code is not the run's.
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)


@app.command()
def metrics(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[TEXT]",
            help="Print only metrics whose name contains TEXT, or the row that describes the logged metric TEXT.",
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for use by programs.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown page with one table per group of metrics.")
    ] = False,
) -> None:
    """Print the table of all metrics: name, unit, meaning. With --json it also has the module that computes each
    metric."""
    from megarl.console import print_metrics
    from megarl.tracking.metric_table import find, metrics_markdown, rows

    found = [row for row in rows() if name in row.name]
    if not found and (row := find(name)) is not None:
        found = [row]
    if not found:
        raise ConfigError(f"{name}: no metric has this text in its name; `megarl metrics` prints all names")
    if as_json:
        print(json.dumps({row.name: {"unit": row.unit, "meaning": row.meaning, "module": row.module} for row in found}))
    elif as_markdown:
        print(metrics_markdown(found), end="")
    else:
        print_metrics(found)


@app.command()
def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run (runs/NAME), or of an evaluation.")],
    step: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of the step whose samples are shown. Default: the newest.", show_default=False
        ),
    ] = None,
    order: Annotated[
        Literal["file", "best", "worst"],
        typer.Option("--sort", help="Order of the samples: file (as recorded), best or worst (by reward)."),
    ] = "file",
    of_set: Annotated[
        str | None,
        typer.Option("--set", help="Name of a validation set, or `train` for training samples.", show_default=False),
    ] = None,
    search: Annotated[
        str, typer.Option(help="Show only samples that contain this text. Without --step: of all steps.")
    ] = "",
    limit: Annotated[
        int, typer.Option(min=1, help="Maximum number of samples printed if the output is not a terminal.")
    ] = 10,
) -> None:
    """Show samples of a run, or answers of an evaluation: one at a time on a terminal, otherwise all."""
    from megarl.report.browse import Selection, browse

    # Browsing asks for keys, so both ends must be a terminal. Piped output is printed up to the limit.
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    console = Terminal(highlight=False, soft_wrap=True, markup=False)
    browse(run, Selection(step, order, of_set, search), console, limit=limit, ask=input if is_terminal else None)


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
