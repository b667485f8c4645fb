"""Printed examinations of a machine, its sandbox, and data sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.rounding import divide_up

if TYPE_CHECKING:
    from megarl.data.survey import Survey
    from megarl.findings import Finding
    from megarl.sandbox.check import Examination

# A histogram of 12 lines and 40 characters fits a terminal of 80 columns with its numbers.
_BARS = 12
_BAR_WIDTH = 40


def print_findings(rows: Sequence[tuple[str, Finding]], notices: Sequence[str], *, with_nodes: bool) -> None:
    """Print the findings of `megarl doctor` as a table, then its notices."""
    from rich.table import Table
    from rich.text import Text

    from megarl.terminal import Console

    table = Table(show_header=False)
    styles = {"good": "green", "absent": "dim", "bad": "bold red"}
    for nodes, finding in rows:
        state = Text(finding.level, style=styles[finding.level])
        table.add_row(*([nodes] if with_nodes else []), finding.place, state, finding.advice)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table, *notices, sep="\n")


def print_layers(examination: Examination) -> None:
    """Print the isolation layers of this machine, with remedies for missing ones."""
    from rich.table import Table
    from rich.text import Text

    from megarl.sandbox.layers import LAYERS, PURPOSES, REMEDIES
    from megarl.terminal import Console

    table = Table(show_header=False)
    for layer in LAYERS:
        if layer in examination.layers.active:
            table.add_row(layer, Text("active", style="green"), PURPOSES[layer])
        else:
            missing_text = f"{examination.layers.fault_of(layer)}; {REMEDIES[layer]}"
            table.add_row(layer, Text("missing", style="bold red"), missing_text)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table, *examination.notes, examination.text, sep="\n")


def print_survey(survey: Survey, *, unit: str) -> None:
    """Print the survey of a data source. Trained tokens are green; without colours, in double brackets."""
    from rich.text import Text

    from megarl.terminal import Console

    console = Console(soft_wrap=True, highlight=False, markup=False)
    format_text = f", {survey.format.name}" if survey.format else ""
    console.print(
        f"{survey.source}: {survey.num_records} {survey.kind}{format_text}; {survey.num_faults} more have errors"
    )
    for fault in survey.faults:
        console.print(f"  {fault}")
    if survey.num_long:
        console.print(f"too long, so left out (data.overlong: drop): {survey.num_long}")
    if survey.num_different_faults > len(survey.faults):
        console.print(f"  and {survey.num_different_faults - len(survey.faults)} other kinds of errors")
    console.print(f"duplicates: {survey.num_duplicates}{_places_text(survey.duplicates, survey.num_duplicates)}")
    if survey.num_undescribed_calls:
        places = _places_text(survey.undescribed_calls, survey.num_undescribed_calls)
        console.print(
            f"calls to tools that the record neither lists nor names before: {survey.num_undescribed_calls}{places}; "
            "give them in the field tools, or name their field in data.fields.tools"
        )
    for data_set, count in survey.num_overlaps.items():
        console.print(f"prompts also in {data_set}: {count}")
    if survey.overlaps:
        console.print(f"overlap:{_places_text(survey.overlaps, sum(survey.num_overlaps.values()))}")
    for line in _histogram_lines(survey.lengths.tolist(), unit):
        console.print(line)
    if survey.first:
        text = Text()
        for token, is_trained in survey.first:
            # Double brackets remain visible in a file or a pipe.
            plain = f"[[{token}]]" if is_trained and not console.is_terminal else token
            text.append(plain, style="bold green" if is_trained else "dim")
        console.print("first record (trained tokens are green, or in double brackets):")
        console.print(text)


def _places_text(places: Sequence[str], count: int) -> str:
    more = f", and {count - len(places)} more" if count > len(places) else ""
    return f" {', '.join(places)}{more}" if places else ""


def _histogram_lines(lengths: Sequence[int], unit: str) -> list[str]:
    """Return the lines of a histogram with equal bins, and of quantiles for the choice of a length limit."""
    if not lengths:
        return []
    # Equal bins from the shortest to the longest record.
    sorted_lengths = sorted(lengths)
    shortest, longest = sorted_lengths[0], sorted_lengths[-1]
    # Rounded up, so that the last bin includes the largest length.
    bin_width = max(1, divide_up(longest - shortest + 1, by=_BARS))
    counts = [0] * ((longest - shortest) // bin_width + 1)
    for length in sorted_lengths:
        counts[(length - shortest) // bin_width] += 1
    lengths_at = {
        f"{share:.0%}": sorted_lengths[round(share * (len(sorted_lengths) - 1))] for share in (0.5, 0.9, 0.99)
    }
    quantiles = ", ".join(f"{name} at most {length}" for name, length in lengths_at.items())
    mean_length = sum(sorted_lengths) / len(sorted_lengths)
    lines = [f"{unit} of a record: {shortest} to {longest}, mean {mean_length:.1f}; {quantiles}"]
    for bin_index, count in enumerate(counts):
        bar = "#" * divide_up(count * _BAR_WIDTH, by=max(counts))
        bin_start = shortest + bin_index * bin_width
        lines.append(f"  {bin_start:>7} - {min(bin_start + bin_width - 1, longest):<7} {count:>8} {bar}")
    return lines
