"""`megarl replay`: executes a recorded step again, or finds the first difference of two runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from megarl.cli.arguments import Overrides
from megarl.console.lines import print_lines
from megarl.console.replays import comparison_lines, print_bisection, print_effect
from megarl.console.results import print_report
from megarl.types import ConfigError, MegarlError


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run (runs/NAME) with train.record.")],
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(min=1, help="Step to execute again.", show_default=False)] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.FIELD=VALUE",
            help="Change a recipe field (algorithm.*, reward.*) for this step only, and print the effect on each "
            "sample. May be repeated.",
        ),
    ] = None,
    second_run: Annotated[
        Path | None,
        typer.Option(
            "--bisect",
            metavar="RUN",
            help="Find the first recorded step in which both runs differ. Starts no ranks.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        bool, typer.Option("--html", help="Also write the results into the run's report.html, part Replays.")
    ] = False,
) -> None:
    """Execute a recorded step again and compare it with its record: log-probs, advantages, loss, gradients, weights.

    Needs a run with train.record; train.record=all adds the optimizer's state. Nothing is sampled: the trainer starts
    from the newest checkpoint before the step and uses the recorded trajectories. In the run's parallel layout all
    values must be bit-equal. Runs in float32 can be replayed in another layout, for example with trainer.tp=2: values
    may then differ by 1e-5, relative to the larger of 1 and the value, and weights by 1e-4 of their norm. Exit code 70:
    a difference is larger.
    """
    if second_run is not None:
        # The search starts no ranks, so only its module is imported.
        from megarl.loops.commands import bisection

        if step is not None or changes or overrides or html:
            raise ConfigError("--bisect: compares two runs' records; leave out --step, --set, --html and overrides")
        print_bisection(bisection.bisect(run, second_run), (run, second_run))
        return
    if step is None:
        raise ConfigError("--step: is required; give the number of a recorded step, or compare runs with --bisect")
    from megarl.loops.commands import replaying

    prepared = replaying.prepare(run, step, overrides or (), changes or ())
    comparisons, effect = asyncio.run(replaying.replay(prepared, lambda text: print_lines([text])))
    lines = comparison_lines(comparisons)
    print_lines(lines)
    if effect is not None:
        print_effect(effect, prepared.changes)
    if html:
        from megarl.report.page import write_report
        from megarl.report.replays import write_replay

        if effect is None:
            write_replay(run, step, lines)
        else:
            write_replay(
                run, step, lines, prepared.changes, effect.metrics, [sample.row() for sample in effect.samples]
            )
        print_report(*write_report([run]))
    if failed_comparisons := [comparison for comparison in comparisons if comparison.differences]:
        raise MegarlError(
            f"{run}: step {failed_comparisons[0].step} differs from its record, first in "
            f"{failed_comparisons[0].differences[0]}"
        )
