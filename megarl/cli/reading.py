"""Commands that read runs: `megarl report`, `watch`, `metrics` and `samples`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from megarl.cli.arguments import refuse_idle_options
from megarl.terminal import Terminal
from megarl.types import ConfigError, DataError


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

    For evaluations: accuracies, differences from the first evaluation with confidence intervals, changed answers.
    """
    from megarl.console.results import print_report
    from megarl.report.page import write_report

    print_report(*write_report(runs, out))


def watch(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run (runs/NAME), also of another machine's.")],
    once: Annotated[bool, typer.Option("--once", help="Print the dashboard once, then exit with code 0.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at the run's files.")] = 2.0,
) -> None:
    """Show a running run: progress, curves, times, warnings, samples. Ends with the run, and with its exit code.

    Reads only files of the run's folder. If the output is not a terminal, each step gets a line.
    """
    if once:
        refuse_idle_options(context, ["interval"], "with --once; leave one of both out")
    from megarl.report.watch import watch

    try:
        code = watch(run, Terminal(highlight=False), interval_seconds=interval, is_once=once)
    # Ctrl-C ends this command, not the run.
    except KeyboardInterrupt:
        code = 130
    raise typer.Exit(code)


def metrics(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="[TEXT]",
            help="Print only metrics whose name contains TEXT. For a logged name, print the row that describes it.",
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for use by programs.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown page with one table per group of metrics.")
    ] = False,
) -> None:
    """Print the table of all metrics: name, unit, meaning. With --json it also has the module that computes each
    metric."""
    if as_json:
        refuse_idle_options(context, ["as_markdown"], "with --json; leave one of both out")
    from megarl.console.results import print_metrics
    from megarl.tracking.metric_table import find_row, metrics_markdown, rows
    from megarl.tracking.renamed_metrics import current_name

    matches = [row for row in rows() if name in row.name]
    # An old run's metric is described by its current name.
    if not matches and (row := find_row(current_name(name))) is not None:
        matches = [row]
    if not matches:
        raise ConfigError(f"{name}: no metric has this text in its name; `megarl metrics` prints all names")
    if as_json:
        print(
            json.dumps({row.name: {"unit": row.unit, "meaning": row.meaning, "module": row.module} for row in matches})
        )
    elif as_markdown:
        print(metrics_markdown(matches), end="")
    else:
        print_metrics(matches)


def samples(
    context: typer.Context,
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
    is_account: Annotated[
        bool,
        typer.Option(
            "--account",
            help="Instead: by epoch, how many prompts were drawn, trained on, dropped and why. With agents also their "
            "sampled tokens: trained, untrained, lost. Exit code 65 if one is missing or counted twice.",
        ),
    ] = False,
) -> None:
    """Show samples of a run, or answers of an evaluation: one at a time on a terminal, otherwise all."""
    if is_account:
        refuse_idle_options(
            context,
            ["step", "order", "of_set", "search", "limit"],
            "with --account, which covers the whole run; leave this out",
        )
        from megarl.console.results import print_account, print_token_account
        from megarl.rollout.journal.state import account_tokens
        from megarl.tracking.draws import account
        from megarl.tracking.run_record import refuse_other_folders

        refuse_other_folders(run)
        prompts = account(run)
        print_account(prompts)
        if prompts.faults:
            raise DataError(f"{run}: not every prompt is accounted for: {'; '.join(prompts.faults[:8])}")
        tokens = account_tokens(run)
        if tokens is not None:
            print_token_account(tokens)
            if tokens.faults:
                raise DataError(f"{run}: not every sampled token is accounted for: {'; '.join(tokens.faults[:8])}")
        return
    from megarl.report.browse import Selection, browse

    # Browsing reads keys, so input and output must be a terminal. Piped output is printed up to the limit.
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    console = Terminal(highlight=False, soft_wrap=True, markup=False)
    browse(run, Selection(step, order, of_set, search), console, limit=limit, ask=input if is_terminal else None)
