"""Printed results of runs: evaluations, reports, metrics, conversions, the account of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.console.lines import size_text
from megarl.terminal import printable

if TYPE_CHECKING:
    from megarl.algorithms.estimates import Measure
    from megarl.checkpoint.convert import Conversion
    from megarl.report.evaluations import RecordedEvaluation
    from megarl.rollout.evaluate import EvaluatedSet
    from megarl.rollout.journal.token_account import TokenAccount
    from megarl.tracking.draws import Account
    from megarl.tracking.metric_table import Row
    from megarl.tracking.run_record import RunRecord


def print_evaluation(evaluated_sets: Sequence[EvaluatedSet], folder: Path) -> None:
    """Print accuracy, rewards and other measures of each validation set and its data sources, with 95 % intervals."""
    from rich.table import Table

    from megarl.terminal import Console

    table = Table(caption="95 % intervals; shares in per cent, rewards as they are", caption_justify="left")
    # Long names of sets fold into several lines. A cut name or measure could be mistaken for another.
    table.add_column("set", overflow="fold")
    table.add_column("problems", no_wrap=True)
    table.add_column("measure", no_wrap=True)
    table.add_column("value (interval)", no_wrap=True, justify="right")

    def add_rows(name: str, count: str, measures: Mapping[str, Measure]) -> None:
        """Add a row per measure. Only the first has the set's name and its number of problems."""
        texts = {} if "accuracy" in measures else {"accuracy": "not judged"}
        texts |= {measure: measure_text(measure, value) for measure, value in measures.items()}
        for number, (measure, text) in enumerate(texts.items()):
            first_cells = [name, count] if number == 0 else ["", ""]
            table.add_row(*first_cells, measure, text)

    for evaluated in evaluated_sets:
        # Trajectories are attempts, so problems are trajectories / n.
        n = evaluated.samples_per_prompt
        count = f"{len(evaluated.trajectories) // n} x {n}, T {evaluated.temperature:g}"
        add_rows(evaluated.name, count, evaluated.measures)
        for name, measures in evaluated.by_data_source.items():
            add_rows(f"  {name}", "", measures)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    console.print(f"wrote {folder}: answers.jsonl, metrics.json")


def measure_text(name: str, measure: Measure, *, signed: bool = False) -> str:
    """Return a measure with its 95 % interval: rewards (`reward/...`) as they are, all others in per cent."""
    sign = "+" if signed else ""
    if name.startswith("reward/"):
        value, low, high = (f"{number:{sign}.4g}" for number in (measure.value, measure.low, measure.high))
    else:
        value, low, high = (f"{100 * number:{sign}.1f}" for number in (measure.value, measure.low, measure.high))
    return f"{value} ({low} to {high})"


def print_report(page: Path, num_bytes: int, entries: Sequence[RunRecord] | Sequence[RecordedEvaluation]) -> None:
    """Print the summary and the path of an HTML page about runs or evaluations."""
    from megarl.report.evaluations import RecordedEvaluation

    evaluations = [entry for entry in entries if isinstance(entry, RecordedEvaluation)]
    for number, evaluation in enumerate(evaluations):
        for line in _accuracy_lines(evaluation, evaluations[0] if number else None):
            print(printable(line))
    names = [entry.name if isinstance(entry, RecordedEvaluation) else _run_text(entry) for entry in entries]
    print(printable(f"wrote {page}: {size_text(num_bytes)}; {', '.join(names)}. Open it in a browser."))


def _run_text(run: RunRecord) -> str:
    origin = f", fork of {run.origin}" if run.origin else ""
    return f"{run.name} ({run.state}, step {run.last_step}{origin})"


def _accuracy_lines(evaluation: RecordedEvaluation, first_evaluation: RecordedEvaluation | None) -> Iterator[str]:
    """Yield each set's accuracy, or else mean reward, with its interval and its change since the first evaluation."""
    from megarl.report.evaluations import differences

    comparisons = (
        {}
        if first_evaluation is None
        else {comparison.name: comparison for comparison in differences(first_evaluation, evaluation)}
    )
    for name, measures in evaluation.measures.items():
        measure = "accuracy" if "accuracy" in measures else "reward/mean"
        line = f"{evaluation.name}: {name} "
        line += f"{measure} {measure_text(measure, measures[measure])}" if measure in measures else "not measured"
        if (comparison := comparisons.get(name)) is not None and comparison.difference is not None:
            points = " points" if comparison.measure == "accuracy" else f" {comparison.measure}"
            line += (
                f"; {measure_text(comparison.measure, comparison.difference, signed=True)}{points} on "
                f"{comparison.problems} problems of both, {comparison.gained} gained, {comparison.lost} "
                "lost"
            )
        if comparison is not None and comparison.left_out:
            line += f"; {comparison.left_out} problems are not in both and left out"
        yield line


def print_metrics(rows: Sequence[Row]) -> None:
    from rich.table import Table

    from megarl.terminal import Console

    # Tabs without a terminal, so that cut and awk can read the table. rich would expand them.
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        for row in rows:
            print(row.name, row.unit, row.meaning, sep="\t")
        return
    table = Table(title="words in capitals are placeholders", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("metric", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    table.add_column("meaning")
    for row in rows:
        table.add_row(row.name, row.unit, row.meaning)
    console.print(table)


def print_account(account: Account) -> None:
    """Print what became of a run's prompts, one row per source and epoch."""
    from rich.table import Table

    from megarl.terminal import Console
    from megarl.tracking.draws import ENDINGS

    # Without borders ten columns fit in 80 characters.
    table = Table(title=f"prompts up to step {account.last_step}", box=None)
    endings = [name for name in ENDINGS if any(epoch.endings[name] for epoch in account.epochs)]
    for name in ("source", "epoch", "prompts", "drawn", "skipped", *endings, "open", "never", "repeated"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for epoch in account.epochs:
        counts = [
            epoch.number, epoch.size, epoch.draws.total(), epoch.skipped, *(epoch.endings[name] for name in endings),
            epoch.num_open, epoch.missing, len(epoch.repeated_prompts),
        ]  # fmt: skip
        table.add_row(printable(epoch.source), *map(str, counts))
    console = Console()
    console.print(table)
    for name in endings:
        console.print(f"{name}: {ENDINGS[name]}", style="dim")
    if account.too_long:
        console.print(f"{account.too_long} records are too long and never drawn", style="dim")


def print_token_account(account: TokenAccount) -> None:
    """Print how many sampled tokens of agents' attempts were trained, not trained, lost, or still wait."""
    from rich.table import Table

    from megarl.terminal import Console

    table = Table(title="tokens of agents' attempts", box=None)
    counts = {
        "sampled": account.sampled,
        "trained": account.num_trained,
        "untrained": account.num_untrained,
        "lost": account.lost,
        "waiting": account.waiting,
    }
    for name in counts:
        table.add_column(name, justify="right")
    table.add_row(*map(str, counts.values()))
    console = Console()
    console.print(table)
    console.print(
        "untrained: without a loss or with a skipped update, undelivered, aborted, or dropped",
        style="dim",
    )
    console.print("lost: of tries that a kill ended, or of steps that a resumed run undid", style="dim")
    if account.unreported_calls:
        console.print(
            f"{account.unreported_calls} calls may have sampled tokens that are not recorded: they are still running, "
            "or were when their driver was killed or their engine was lost",
            style="dim",
        )


def print_conversion(conversion: Conversion) -> None:
    verified = ", verified" if conversion.is_verified else ""
    untrained = f", {conversion.num_kept} untrained tensors copied" if conversion.num_kept else ""
    print(
        f"wrote {conversion.folder}: {conversion.num_tensors} tensors, {size_text(conversion.weight_bytes)} "
        f"in {conversion.seconds:.1f} s{verified}{untrained}"
    )
