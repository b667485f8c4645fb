"""Printed output of the commands: tables of sizes, memory, metrics and data, and the error ending a command."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.terminal import printable
from megarl.types import MegarlError, PeerLostError

if TYPE_CHECKING:
    from megarl.algorithms.estimates import Measure
    from megarl.checkpoint.convert import Conversion
    from megarl.cluster.doctor import Finding
    from megarl.config import Recipe
    from megarl.config.parallel import ParallelConfig
    from megarl.data.survey import Survey
    from megarl.layout_search.results import SearchResult
    from megarl.loops.replaying import Bisection, Effect, StepComparison
    from megarl.memory_plan.memory_table import MemoryTable
    from megarl.report.evaluations import RecordedEvaluation
    from megarl.report.recorded import RecordedRun
    from megarl.rollout.evaluate import EvaluatedSet
    from megarl.sandbox.check import Examination
    from megarl.tracking.draws import Account
    from megarl.tracking.metric_table import Row


_SHOWN_DIFFERENCES = 8
"""Number of differences to print for a replayed step. The first one matters; the others follow from it."""


def print_error(error: MegarlError) -> None:
    """Print the error ending a command. Stacks and logs come first, except for errors in a recipe or its files."""
    from rich.text import Text

    from megarl.terminal import Terminal

    console = Terminal(stderr=True, soft_wrap=True, highlight=False)
    # Notes are stacks and logs of ranks. Other exit codes are mistakes in a recipe or data, and stacks explain nothing.
    if error.exit_code in (MegarlError.exit_code, PeerLostError.exit_code):
        for note in getattr(error, "__notes__", ()):
            console.print(Text(printable(note), style="dim"))
    # The terminal may be gone, or the disk behind stderr full. The exit code must not change because of it.
    with contextlib.suppress(OSError):
        console.print(Text("error: ", style="bold red") + Text(printable(str(error))))


def print_account(account: Account) -> None:
    """Print what became of a run's prompts: a row for each source and epoch."""
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
            epoch.num_open, epoch.missing, len(epoch.repeated),
        ]  # fmt: skip
        table.add_row(printable(epoch.source), *map(str, counts))
    console = Console()
    console.print(table)
    for name in endings:
        console.print(f"{name}: {ENDINGS[name]}", style="dim")
    if account.too_long:
        console.print(f"{account.too_long} records are too long and never drawn", style="dim")


def print_sizes(recipe: Recipe, parallel: ParallelConfig, records: dict[str, int], dropped: Mapping[str, int]) -> None:
    """Print the sizes following from a recipe, the recognised data formats, and the training settings."""
    from rich.table import Table

    from megarl.preflight import overview, recognised_formats, shortened_warmups, uncorrected
    from megarl.preflight.learning import learning_rate_finding
    from megarl.terminal import Console

    settings = recipe.train
    is_sampled = recipe.is_on_policy
    per_step = settings.prompts_per_step * (settings.samples_per_prompt if is_sampled else 1)
    updates, epochs = (settings.updates_per_step, settings.epochs_per_step) if is_sampled else (1, 1)
    passes = f" ({epochs} passes of {updates})" if epochs > 1 else ""
    nodes, size = recipe.cluster.nodes, recipe.cluster.ranks_per_node
    engines = recipe.cluster.groups.engines or recipe.cluster
    parts = (
        ("trainer.tp", parallel.tp, nodes, size),
        ("rollout.tp", parallel.rollout_tp, engines.nodes, engines.ranks_per_node),
    )
    # A tensor-parallel group crosses nodes if a node's ranks are not a multiple of its size.
    spread = [f"{field} {tp}" for field, tp, nodes, size in parts if nodes > 1 and size % tp]
    rows = {
        "model": f"{recipe.model.path}, {recipe.model.dtype}",
        "ranks": str(parallel),
        "nodes": f"{_nodes_named(recipe)}, launcher {recipe.cluster.launcher}"
        + (f"; tensor-parallel groups cross nodes, which is slow: {', '.join(spread)}" if spread else ""),
        "data": ", ".join(f"{name} {count}" for name, count in records.items()),
        "format": "; ".join(dict.fromkeys(recognised_formats(recipe).values())) or "made by the environment",
        "steps": f"{settings.steps}, {_epochs(recipe, records)} epochs",
        "sequences": f"{per_step} a step, {per_step // updates} an update, "
        f"{per_step // updates // parallel.dp} an update and data-parallel rank",
        "updates": f"{epochs * updates} a step{passes}, {settings.steps * epochs * updates} in all",
        "microbatch": f"at most {recipe.trainer.max_tokens_per_microbatch} tokens",
        **overview(recipe),
        "run folder": f"{recipe.runs_folder}/{recipe.name}",
    }
    if dropped:
        rows["left out"] = ", ".join(f"{count} too long from {source}" for source, count in dropped.items())
    unusual = learning_rate_finding(recipe)
    if warnings := [*shortened_warmups(recipe), *uncorrected(recipe), *([unusual.text] if unusual else [])]:
        rows["warning"] = "; ".join(warnings)
    table = Table(title=f"{recipe.name} ({recipe.loop})", show_header=False, title_justify="left")
    for row in rows.items():
        table.add_row(*row)
    Console(soft_wrap=True, highlight=False).print(table)


def _epochs(recipe: Recipe, records: Mapping[str, int]) -> str:
    """Return how many epochs of the training data a run takes. In a mixture: for each source, by its weight."""
    drawn = recipe.train.steps * recipe.train.prompts_per_step
    if not recipe.mixture:
        return f"{drawn / records['train']:.2f}"
    total = sum(source.weight for source in recipe.sources)
    shares = {source.name: drawn * source.weight / total for source in recipe.sources}
    return ", ".join(f"{name} {share / records[f'{name} train']:.2f}" for name, share in shares.items())


def size_text(num_bytes: float, sign: str = "") -> str:
    """Return a number of bytes in a suitable unit: `470.2 GB`, `81.9 KB`, `0 bytes`. `sign` "+" always shows a sign."""
    # Decimal units, as network and disk sizes are given.
    units = ("bytes", "KB", "MB", "GB", "TB")
    power = sum(abs(num_bytes) >= 1000**power for power in range(1, 5))
    return f"{num_bytes / 1000**power:{sign}.{1 if power else 0}f} {units[power]}"


def print_conversion(done: Conversion) -> None:
    """Print the result of a conversion: the written folder, its size, and the seconds taken."""
    verified = ", verified" if done.is_verified else ""
    kept = f", {done.num_kept} untrained tensors copied" if done.num_kept else ""
    print(
        f"wrote {done.folder}: {done.num_tensors} tensors, {size_text(done.weight_bytes)} "
        f"in {done.seconds:.1f} s{verified}{kept}"
    )


def print_report(page: Path, num_bytes: int, found: Sequence[RecordedRun] | Sequence[RecordedEvaluation]) -> None:
    """Print the summary and the path of an HTML page about runs or evaluations."""
    from megarl.report.evaluations import RecordedEvaluation

    evaluations = [one for one in found if isinstance(one, RecordedEvaluation)]
    for number, evaluation in enumerate(evaluations):
        for line in _accuracies(evaluation, evaluations[0] if number else None):
            print(printable(line))
    names = [one.name if isinstance(one, RecordedEvaluation) else _run_text(one) for one in found]
    print(printable(f"wrote {page}: {size_text(num_bytes)}; {', '.join(names)}. Open it in a browser."))


def _run_text(run: RecordedRun) -> str:
    """Return a run's name, state and step, and its parent if it is a fork."""
    parent = f", fork of {run.parent}" if run.parent else ""
    return f"{run.name} ({run.state}, step {run.step}{parent})"


def _accuracies(evaluation: RecordedEvaluation, first: RecordedEvaluation | None) -> Iterator[str]:
    """Yield one line per validation set with 95 % intervals: accuracy, or mean reward if answers have no verdict, and
    its difference from the first evaluation.
    """
    from megarl.report.evaluations import differences

    compared = {} if first is None else {of_set.name: of_set for of_set in differences(first, evaluation)}
    for name, measures in evaluation.measures.items():
        measure = "accuracy" if "accuracy" in measures else "reward/mean"
        line = f"{evaluation.name}: {name} "
        line += f"{measure} {measure_text(measure, measures[measure])}" if measure in measures else "not measured"
        if (of_set := compared.get(name)) is not None and of_set.difference is not None:
            points = " points" if of_set.measure == "accuracy" else f" {of_set.measure}"
            line += (
                f"; {measure_text(of_set.measure, of_set.difference, signed=True)}{points} on {of_set.problems} "
                f"problems of both, {of_set.gained} gained, {of_set.lost} lost"
            )
        if of_set is not None and of_set.left_out:
            line += f"; {of_set.left_out} problems are not in both and left out"
        yield line


def measure_text(name: str, measure: Measure, *, signed: bool = False) -> str:
    """Return a measure with its 95 % interval: a share in per cent, a reward (`reward/...`) as it is."""
    sign = "+" if signed else ""
    if name.startswith("reward/"):
        value, low, high = (f"{number:{sign}.4g}" for number in (measure.value, measure.low, measure.high))
    else:
        value, low, high = (f"{100 * number:{sign}.1f}" for number in (measure.value, measure.low, measure.high))
    return f"{value} ({low} to {high})"


def print_evaluation(evaluated_sets: Sequence[EvaluatedSet], folder: Path) -> None:
    """Print accuracy, rewards and other measures of each validation set and data source, with 95 % intervals."""
    from rich.table import Table

    from megarl.terminal import Console

    table = Table(caption="95 % intervals; shares in per cent, rewards as they are", caption_justify="left")
    # A long name of a set takes several lines, so that no measure is cut: two could begin with the same letters.
    table.add_column("set", overflow="fold")
    table.add_column("problems", no_wrap=True)
    table.add_column("measure", no_wrap=True)
    table.add_column("value (interval)", no_wrap=True, justify="right")

    def add_rows(name: str, count: str, measures: Mapping[str, Measure]) -> None:
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


def print_metrics(rows: Sequence[Row]) -> None:
    """Print the table of metrics. Without a terminal, columns are separated by tabs."""
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


def print_findings(rows: Sequence[tuple[str, Finding]], notices: Sequence[str], *, with_nodes: bool) -> None:
    """Print the findings of `megarl doctor` as a table, then its notices."""
    from rich.table import Table
    from rich.text import Text

    from megarl.terminal import Console

    table = Table(show_header=False)
    styles = {"good": "green", "absent": "dim", "bad": "bold red"}
    for nodes, finding in rows:
        state = Text(finding.state, style=styles[finding.state])
        table.add_row(*([nodes] if with_nodes else []), finding.topic, state, finding.text)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table, *notices, sep="\n")


def print_layers(found: Examination) -> None:
    """Print the isolation layers of this machine, with remedies for missing ones."""
    from rich.table import Table
    from rich.text import Text

    from megarl.sandbox.layers import LAYERS, PURPOSES, REMEDIES
    from megarl.terminal import Console

    table = Table(show_header=False)
    for layer in LAYERS:
        if layer in found.layers.active:
            table.add_row(layer, Text("active", style="green"), PURPOSES[layer])
        else:
            missing = f"{found.layers.fault_of(layer)}; {REMEDIES[layer]}"
            table.add_row(layer, Text("missing", style="bold red"), missing)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table, *found.notes, found.text, sep="\n")


def print_plan(recipe: Recipe, parallel: ParallelConfig, counted: dict[str, Any], *, is_assumed: bool) -> None:
    """Print how many bytes a reshard moves, and its time on a GPU. `is_assumed`: the kind of GPU is unknown."""
    from rich.table import Table

    from megarl.terminal import Console

    reshard, orders = counted["reshard"], counted["rank_orders"]

    def size(over_ranks: dict[str, float]) -> list[str]:
        return [size_text(over_ranks[key]) for key in ("mean", "max")]

    what = " (LoRA adapter)" if recipe.sends_adapter else ""
    table = Table(title=f"{recipe.name}: reshard of {size_text(counted['model_bytes'])}{what}", title_justify="left")
    for heading in ("each rank", "mean", "max", "if full tensors were gathered, mean"):
        table.add_column(heading, justify="left" if heading.startswith("each") else "right")
    for link, name in (("local", "from itself"), ("same_node", "from its node"), ("other_node", "from other nodes")):
        gathered = reshard["gathered_bytes"].get(link)
        table.add_row(name, *size(reshard["received_bytes"][link]), size(gathered)[0] if gathered else "")
    # The lower bound is what a rank lacks: no plan can receive less.
    table.add_row("least from others", *size(reshard["lower_bound_bytes"]))
    table.add_row("staged at once", *size(reshard["staging_bytes"]))
    console = Console(soft_wrap=True, highlight=False)
    # The times are lower bounds given by the hardware, so the kind of GPU must be visible.
    gpu = counted["gpu"].upper() + " (assumed)" * is_assumed
    console.print(f"ranks: {parallel}; nodes: {_nodes_named(recipe)}")
    console.print(table)
    console.print(
        f"bytes moved / minimum: {reshard['ratio_to_lower_bound']:.2f}; {reshard['buckets']} buckets, "
        f"{reshard['messages']} messages, {reshard['copies']['mean']:.0f} copies per rank; computing the plan took "
        f"{counted['plan_seconds']:.2f} s per rank"
    )
    console.print(
        f"limits of {gpu}: with its bandwidths, a reshard takes at least {reshard['seconds'] * 1e3:.1f} ms (network "
        f"{reshard['wire_seconds'] * 1e3:.1f} ms, GPU memory {reshard['memory_seconds'] * 1e3:.1f} ms); gathering full "
        f"tensors on each rank would take at least {reshard['gathered_seconds'] * 1e3:.1f} ms"
    )
    for name, other in orders.items():
        links = ("same_node", "other_node")
        more = [other["received_bytes"][k]["mean"] - reshard["received_bytes"][k]["mean"] for k in links]
        console.print(
            f"with the rank order {name}: {size_text(sum(more), '+')} received from other ranks, "
            f"{size_text(more[1], '+')} of it from other nodes, {other['seconds'] * 1e3:.1f} ms"
        )


def comparison_lines(found: Sequence[StepComparison]) -> list[str]:
    """Return a line per replayed step: equal to its record, or its first differences in lines of their own."""
    lines = []
    for one in found:
        if not one.differences:
            agreement = "bit-equal to" if one.is_same_layout else "within 1e-5 (state tensors 1e-4) of"
            lines.append(f"step {one.step}: {agreement} its record ({one.num_tokens} tokens)")
            continue
        lines.append(f"step {one.step}: differs from its record, first in {one.differences[0].tensor}")
        lines += [f"  {difference}" for difference in one.differences[:_SHOWN_DIFFERENCES]]
        if (hidden := len(one.differences) - _SHOWN_DIFFERENCES) > 0:
            lines.append(f"  and {hidden} more")
    return lines


def print_effect(effect: Effect, changes: Sequence[str]) -> None:
    """Print the effect of a change on a replayed step: metrics of its updates, and a table of its samples."""
    from rich.table import Table

    from megarl.loops.replaying import EFFECT_COLUMNS
    from megarl.terminal import Console

    print_lines([f"changed for this step: {', '.join(changes)}"])
    print_lines([f"  {name}: {before:.6g} -> {now:.6g}" for name, (before, now) in effect.metrics.items()])
    rows = [
        (
            str(one.prompt),
            str(one.attempt),
            *(f"{pair[0]:.4g} -> {pair[1]:.4g}" for pair in (one.reward, one.advantage)),
            f"{one.logprob[0]:.5g} {one.logprob[1] - one.logprob[0]:+.2g}",
            str(one.largest_token),
        )
        for one in effect.samples
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


def print_bisection(found: Bisection, runs: tuple[Path, Path]) -> None:
    """Print the first recorded step in which two runs differ, with its first differences."""
    names = f"{runs[0]} and {runs[1]}"
    read = f"{found.num_read} of each run's records were read"
    if found.step is None:
        print_lines([f"{names}: equal up to step {found.last_step}, the last recorded one of both ({read})"])
        return
    shown = [f"  {difference}" for difference in found.differences[:_SHOWN_DIFFERENCES]]
    print_lines([f"{names}: differ first in step {found.step}, in {found.differences[0].tensor} ({read})", *shown])
    if len(samples := found.differences[0].samples):
        print_lines(
            [
                "  the operator: make this table with both installations, from a source checkout, and compare the "
                f"checksums: tools/check.py exact_operators --run {runs[0]} --step {found.step} --sample {samples[0]}"
            ]
        )


def print_lines(lines: Sequence[str]) -> None:
    """Print lines unchanged, without wrapping long ones."""
    from megarl.terminal import Console

    Console(soft_wrap=True, highlight=False, markup=False).print("\n".join(lines))


def _nodes_named(recipe: Recipe) -> str:
    """Return the nodes of a run and the ranks on each, in words."""
    cluster, engines = recipe.cluster, recipe.cluster.groups.engines
    own = f"{cluster.nodes} of {cluster.ranks_per_node} ranks"
    return own if engines is None else f"{own}, {engines.nodes} of {engines.ranks_per_node} for engines"


def print_memory(recipe: Recipe, table: MemoryTable) -> None:
    """Print the predicted GPU memory by phase and by use (weights, gradients, ...), in GiB. Host memory follows a +."""
    from rich.table import Table

    from megarl.memory_plan.node_bytes import node_terms
    from megarl.terminal import Console

    def shown(device_bytes: int, host_bytes: int) -> str:
        host = f"{'+' if table.is_gpu else ''}{host_bytes / 2**30:.1f}" if host_bytes else ""
        device = f"{device_bytes / 2**30:.1f}" if device_bytes else ""
        return f"{device} {host}".strip()

    title = (
        f"{recipe.name}: GiB a {'GPU, + host memory a rank' if table.is_gpu else 'rank'}, fullest rank of each phase"
    )
    printed = Table(title=title, title_justify="left")
    printed.add_column("")
    for phase in table.phases:
        printed.add_column(phase.name, justify="right")
    for kind in table.kinds:
        uses = [phase.use(kind) for phase in table.phases]
        printed.add_row(kind, *(shown(use.device_bytes, use.host_bytes) for use in uses))
    printed.add_section()
    printed.add_row("sum", *(shown(phase.device_bytes, phase.host_bytes) for phase in table.phases))
    printed.add_row("rank", *(f"{phase.part} {phase.rank}".strip() for phase in table.phases))
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        # Without a terminal rich assumes 80 columns and would break the rows. Files and pipes have no width.
        console.width = max(
            console.width, console.measure(printed, options=console.options.update(max_width=500)).maximum
        )
    console.print(printed)
    parts = node_terms(recipe, table)
    console.print(f"host memory of a node: up to {sum(parts.values()) / 2**30:.0f} GiB, {' and '.join(parts)}")
    if table.cache is not None:
        console.print(str(table.cache))


def print_terms(recipe: Recipe, table: MemoryTable) -> None:
    """Print each term of the predicted memory: most GiB in a phase (host memory after a +), formula, source. Then the
    parts of a node's host memory."""
    from megarl.memory_plan.node_bytes import node_terms
    from megarl.memory_plan.terms import explain_terms

    lines = []
    for term in explain_terms(table):
        sizes = [f"{term.device_bytes / 2**30:.2f}"] * bool(term.device_bytes or not term.host_bytes)
        sizes += [f"{'+' if table.is_gpu else ''}{term.host_bytes / 2**30:.2f}"] * bool(term.host_bytes)
        lines.append(f"{term.kind}: at most {' '.join(sizes)} GiB = {term.formula} (source: {term.source})")
    parts = (f"{name} {size / 2**30:.1f}" for name, size in node_terms(recipe, table).items())
    print_lines([*lines, f"host memory of the fullest node in GiB: {' + '.join(parts)}"])


def print_layouts(recipe: Recipe, result: SearchResult) -> None:
    """Print the layouts found by a search: seconds by phase, GiB of the fullest GPU, overrides, and refused choices."""
    from rich.table import Table

    from megarl.terminal import Console

    table = Table(title=f"{recipe.name}: predicted seconds of a step, fastest layouts first", title_justify="left")
    table.add_column("")
    table.add_column("trainer")
    table.add_column("engines")
    phases = ("step", "rollout", "logprobs", "train", "reshard", "offload", "other")
    for heading in (*phases, "GiB"):
        table.add_column(heading, justify="right")
    table.add_column("most time")
    for number, found in enumerate(result.layouts, start=1):
        seconds = (f"{getattr(found.seconds, phase):.1f}" for phase in phases)
        gib = f"{max(found.gib.values()):.0f}"
        table.add_row(str(number), found.trainer_text, found.engine_text, *seconds, gib, found.limit)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(
            console.width, console.measure(table, options=console.options.update(max_width=500)).maximum
        )
    console.print(table)
    for number, found in enumerate(result.layouts, start=1):
        console.print(f"{number}: {shlex.join(found.overrides) or 'as in the recipe'}")
    for reason, count in list(result.refused.items())[:_MOST_REASONS]:
        console.print(f"refused {count:,} times: {reason}")
    console.print(
        f"{result.num_candidates:,} layouts ranked, memory of {result.num_planned:,} planned in "
        f"{result.search_seconds:.1f} s{'' if result.is_complete else '; the ranking is not complete'}; lengths: "
        f"{result.lengths}; median error of the cost model on held-out published steps: {result.held_out_error:.0%}"
    )


# A histogram of 12 lines and 40 characters fits a terminal of 80 columns with its numbers.
_BARS = 12
_BAR_WIDTH = 40
_MOST_REASONS = 8
"""Most frequent reasons against layouts that are printed."""


def print_survey(found: Survey, *, unit: str) -> None:
    """Print the survey of a data source. Trained tokens are green, or without colours in double brackets."""
    from rich.text import Text

    from megarl.terminal import Console

    console = Console(soft_wrap=True, highlight=False, markup=False)
    taken_for = f", {found.format.name}" if found.format else ""
    console.print(f"{found.source}: {found.num_records} {found.kind}{taken_for}; {found.num_faults} more have errors")
    for fault in found.faults:
        console.print(f"  {fault}")
    if found.num_long:
        console.print(f"too long, so left out (data.overlong: drop): {found.num_long}")
    if found.num_different_faults > len(found.faults):
        console.print(f"  and {found.num_different_faults - len(found.faults)} other kinds of errors")
    console.print(f"duplicates: {found.num_duplicates}{_list(found.duplicates, found.num_duplicates)}")
    for other, count in found.num_overlaps.items():
        console.print(f"prompts also in {other}: {count}")
    if found.overlaps:
        console.print(f"overlap:{_list(found.overlaps, sum(found.num_overlaps.values()))}")
    for line in _histogram(found.lengths.tolist(), unit):
        console.print(line)
    if found.first:
        shown = Text()
        for token, is_trained in found.first:
            # Double brackets remain visible in a file or a pipe.
            plain = f"[[{token}]]" if is_trained and not console.is_terminal else token
            shown.append(plain, style="bold green" if is_trained else "dim")
        console.print("first record (trained tokens are green, or in double brackets):")
        console.print(shown)


def _list(places: Sequence[str], count: int) -> str:
    more = f", and {count - len(places)} more" if count > len(places) else ""
    return f" {', '.join(places)}{more}" if places else ""


def _histogram(lengths: Sequence[int], unit: str) -> list[str]:
    """Return the lines of a histogram with equal bins, and of quantiles that help to choose a length limit."""
    if not lengths:
        return []
    ordered = sorted(lengths)
    least, most = ordered[0], ordered[-1]
    # -(-a // b) rounds up, so that the last bin includes the largest length.
    width = max(1, -(-(most - least + 1) // _BARS))
    counts = [0] * ((most - least) // width + 1)
    for length in ordered:
        counts[(length - least) // width] += 1
    at = {f"{share:.0%}": ordered[round(share * (len(ordered) - 1))] for share in (0.5, 0.9, 0.99)}
    quantiles = ", ".join(f"{name} at most {length}" for name, length in at.items())
    lines = [f"{unit} of a record: {least} to {most}, mean {sum(ordered) / len(ordered):.1f}; {quantiles}"]
    for place, count in enumerate(counts):
        bar = "#" * -(-count * _BAR_WIDTH // max(counts))
        start = least + place * width
        lines.append(f"  {start:>7} - {min(start + width - 1, most):<7} {count:>8} {bar}")
    return lines
