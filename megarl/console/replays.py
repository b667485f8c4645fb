"""Printed results of `megarl replay`: comparisons with records, the effect of a change, the bisection of two runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.console.lines import print_lines

if TYPE_CHECKING:
    from megarl.loops.commands.bisection import Bisection
    from megarl.loops.commands.replaying import Effect, StepComparison

_SHOWN_DIFFERENCES = 8
"""Maximum number of printed differences of a replayed step. Later differences follow from the first."""


def comparison_lines(comparisons: Sequence[StepComparison]) -> list[str]:
    """Return a line per replayed step: equal to its record, or different, followed by its first differences."""
    lines = []
    for comparison in comparisons:
        if not comparison.differences:
            agreement = "bit-equal to" if comparison.is_same_layout else "within 1e-5 (state tensors 1e-4) of"
            lines.append(f"step {comparison.step}: {agreement} its record ({comparison.num_tokens} tokens)")
            continue
        lines.append(f"step {comparison.step}: differs from its record, first in {comparison.differences[0].tensor}")
        lines += [f"  {difference}" for difference in comparison.differences[:_SHOWN_DIFFERENCES]]
        if (num_hidden := len(comparison.differences) - _SHOWN_DIFFERENCES) > 0:
            lines.append(f"  and {num_hidden} more")
    return lines


def print_effect(effect: Effect, changes: Sequence[str]) -> None:
    """Print the effect of a change on a replayed step: metrics of its updates, and a table of its samples."""
    from rich.table import Table

    from megarl.loops.commands.replaying import EFFECT_COLUMNS
    from megarl.terminal import Console

    print_lines([f"changed for this step: {', '.join(changes)}"])
    print_lines([f"  {name}: {before:.6g} -> {now:.6g}" for name, (before, now) in effect.metrics.items()])
    rows = [
        (
            str(sample.prompt),
            str(sample.attempt),
            *(f"{pair[0]:.4g} -> {pair[1]:.4g}" for pair in (sample.reward, sample.advantage)),
            f"{sample.logprob[0]:.5g} {sample.logprob[1] - sample.logprob[0]:+.2g}",
            str(sample.largest_token),
        )
        for sample in effect.samples
    ]
    console = Console(highlight=False, markup=False)
    # Tabs without a terminal, so that cut and awk can read the table. rich would expand them.
    if not console.is_terminal:
        print("\n".join("\t".join(row) for row in (EFFECT_COLUMNS, *rows)))
        return
    table = Table(*EFFECT_COLUMNS, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def print_bisection(bisection: Bisection, runs: tuple[Path, Path]) -> None:
    """Print the first recorded step in which two runs differ, with its first differences."""
    names = f"{runs[0]} and {runs[1]}"
    read = f"{bisection.num_read} of each run's records were read"
    if bisection.step is None:
        print_lines([f"{names}: equal up to step {bisection.last_step}, the last recorded one of both ({read})"])
        return
    differences = [f"  {difference}" for difference in bisection.differences[:_SHOWN_DIFFERENCES]]
    print_lines(
        [f"{names}: differ first in step {bisection.step}, in {bisection.differences[0].tensor} ({read})", *differences]
    )
    if len(samples := bisection.differences[0].samples):
        options = f"--run {runs[0]} --step {bisection.step} --sample {samples[0]}"
        print_lines(
            [
                "  the operator: make this table with both installations, from a source checkout, and compare the "
                f"checksums: tools/check.py exact_operators {options}"
            ]
        )
