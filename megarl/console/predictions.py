"""Printed predictions for a recipe: its sizes, memory, reshards and layouts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megarl.console.lines import nodes_text, print_lines, size_text

if TYPE_CHECKING:
    from rich.table import Table

    from megarl.config import Recipe
    from megarl.config.parallel import ParallelConfig
    from megarl.planner.layouts.results import SearchResult
    from megarl.planner.memory.memory_table import MemoryTable
    from megarl.terminal import Console

_MOST_REASONS = 8
"""Maximum number of printed reasons against layouts, the most frequent first."""


def print_sizes(recipe: Recipe, parallel: ParallelConfig, records: dict[str, int], dropped: Mapping[str, int]) -> None:
    """Print the sizes of a recipe's run, the recognised data formats, and the training settings.

    `records` are record counts by data source, `dropped` the records left out as too long.
    """
    from rich.table import Table

    from megarl.datasets.counts import recognised_formats
    from megarl.preflight import overview, warn_of_shortened_warmups, warn_of_uncorrected_staleness
    from megarl.preflight.algorithm.learning import find_unusual_learning_rate
    from megarl.terminal import Console

    text_by_heading = {
        "model": f"{recipe.model.path}, {recipe.model.dtype}",
        "ranks": _ranks_text(recipe, parallel),
        "nodes": f"{nodes_text(recipe)}, launcher {recipe.cluster.launcher}{_slow_groups_text(recipe, parallel)}",
        "data": ", ".join(f"{name} {count}" for name, count in records.items()),
        "format": "; ".join(dict.fromkeys(recognised_formats(recipe).values())) or "made by the environment",
        "steps": f"{recipe.train.steps}, {_epochs_text(recipe, records)} epochs",
        **_step_texts(recipe, parallel),
        "microbatch": f"at most {recipe.trainer.max_tokens_per_microbatch} tokens",
        **overview(recipe),
        "run folder": f"{recipe.runs_folder}/{recipe.name}",
    }
    if dropped:
        text_by_heading["left out"] = ", ".join(f"{count} too long from {source}" for source, count in dropped.items())
    unusual_rate = find_unusual_learning_rate(recipe)
    if warnings := [
        *warn_of_shortened_warmups(recipe),
        *warn_of_uncorrected_staleness(recipe),
        *([unusual_rate.text] if unusual_rate else []),
    ]:
        text_by_heading["warning"] = "; ".join(warnings)
    table = Table(title=f"{recipe.name} ({recipe.loop})", show_header=False, title_justify="left")
    for heading, text in text_by_heading.items():
        table.add_row(heading, text)
    Console(soft_wrap=True, highlight=False).print(table)


def _slow_groups_text(recipe: Recipe, parallel: ParallelConfig) -> str:
    """Return a warning about tensor-parallel groups of trainer or engines with ranks on several nodes; empty: none."""
    trainers, engines = recipe.cluster, recipe.cluster.groups.engines or recipe.cluster
    sizes = (
        ("trainer.tp", parallel.tp, trainers.nodes, trainers.ranks_per_node),
        ("rollout.tp", parallel.rollout_tp, engines.nodes, engines.ranks_per_node),
    )
    # A tensor-parallel group crosses nodes if a node's ranks are not a multiple of its size.
    crossing = [f"{field} {tp}" for field, tp, nodes, node_ranks in sizes if nodes > 1 and node_ranks % tp]
    return f"; tensor-parallel groups cross nodes, which is slow: {', '.join(crossing)}" if crossing else ""


def _step_texts(recipe: Recipe, parallel: ParallelConfig) -> dict[str, str]:
    """Return the numbers of sequences and updates of a step, in words, by heading."""
    settings = recipe.train
    num_sequences = settings.prompts_per_step
    updates, epochs = 1, 1
    if recipe.is_on_policy:
        num_sequences *= settings.samples_per_prompt
        updates, epochs = settings.updates_per_step, settings.epochs_per_step
    passes = f" ({epochs} passes of {updates})" if epochs > 1 else ""
    return {
        "sequences": f"{num_sequences} a step, {num_sequences // updates} an update, "
        f"{num_sequences // updates // parallel.dp} an update and data-parallel rank",
        "updates": f"{epochs * updates} a step{passes}, {settings.steps * epochs * updates} in all",
    }


def _epochs_text(recipe: Recipe, records: Mapping[str, int]) -> str:
    """Return how many epochs of the training data a run takes; in a mixture, those of each source."""
    num_drawn = recipe.train.steps * recipe.train.prompts_per_step
    if not recipe.mixture:
        return f"{num_drawn / records['train']:.2f}"
    total_weight = sum(source.weight for source in recipe.sources)
    shares = {source.name: num_drawn * source.weight / total_weight for source in recipe.sources}
    return ", ".join(f"{name} {share / records[f'{name} train']:.2f}" for name, share in shares.items())


def _ranks_text(recipe: Recipe, parallel: ParallelConfig) -> str:
    return str(parallel) if recipe.has_engine else parallel.trainer_text


def print_plan(
    recipe: Recipe, parallel: ParallelConfig, reshard_forecast: dict[str, Any] | None, *, is_assumed: bool
) -> None:
    """Print the bytes moved by a reshard, and its time on a GPU. `is_assumed`: the kind of GPU is unknown.

    `reshard_forecast` None: the run has no engines, so only the ranks are printed.
    """
    from rich.table import Table

    from megarl.terminal import Console

    console = Console(soft_wrap=True, highlight=False)
    console.print(f"ranks: {_ranks_text(recipe, parallel)}; nodes: {nodes_text(recipe)}")
    if reshard_forecast is None:
        console.print(f"no reshard: loop {recipe.loop} has no engine here")
        return
    reshard, orders = reshard_forecast["reshard"], reshard_forecast["rank_orders"]

    def mean_and_max(bytes_over_ranks: dict[str, float]) -> list[str]:
        return [size_text(bytes_over_ranks[key]) for key in ("mean", "max")]

    suffix = " (LoRA adapter)" if recipe.sends_adapter else ""
    table = Table(
        title=f"{recipe.name}: reshard of {size_text(reshard_forecast['model_bytes'])}{suffix}", title_justify="left"
    )
    for heading in ("each rank", "mean", "max", "if full tensors were gathered, mean"):
        table.add_column(heading, justify="left" if heading.startswith("each") else "right")
    for link, name in (("local", "from itself"), ("same_node", "from its node"), ("other_node", "from other nodes")):
        gathered = reshard["gathered_bytes"].get(link)
        gathered_mean = size_text(gathered["mean"]) if gathered else ""
        table.add_row(name, *mean_and_max(reshard["received_bytes"][link]), gathered_mean)
    # No plan can receive less than the bytes that a rank lacks.
    table.add_row("least from others", *mean_and_max(reshard["lower_bound_bytes"]))
    table.add_row("staged at once", *mean_and_max(reshard["staging_bytes"]))
    # The times are lower bounds for one kind of GPU, so its name is printed.
    gpu = reshard_forecast["gpu"].upper() + " (assumed)" * is_assumed
    console.print(table)
    console.print(
        f"bytes moved / minimum: {reshard['ratio_to_lower_bound']:.2f}; {reshard['buckets']} buckets, "
        f"{reshard['messages']} messages, {reshard['copies']['mean']:.0f} copies per rank; computing the plan took "
        f"{reshard_forecast['plan_seconds']:.2f} s per rank"
    )
    console.print(
        f"limits of {gpu}: with its bandwidths, a reshard takes at least {reshard['seconds'] * 1e3:.1f} ms (network "
        f"{reshard['wire_seconds'] * 1e3:.1f} ms, GPU memory {reshard['memory_seconds'] * 1e3:.1f} ms); gathering full "
        f"tensors on each rank would take at least {reshard['gathered_seconds'] * 1e3:.1f} ms"
    )
    _print_rank_orders(console, reshard, orders)


def _print_rank_orders(console: Console, reshard: dict[str, Any], orders: dict[str, Any]) -> None:
    """Print how much more other orders of the ranks receive than the recipe's order."""
    for name, order in orders.items():
        bytes_from_node, bytes_from_other_nodes = (
            order["received_bytes"][link]["mean"] - reshard["received_bytes"][link]["mean"]
            for link in ("same_node", "other_node")
        )
        console.print(
            f"with the rank order {name}: {size_text(bytes_from_node + bytes_from_other_nodes, '+')} received "
            f"from other ranks, {size_text(bytes_from_other_nodes, '+')} of it from other nodes, "
            f"{order['seconds'] * 1e3:.1f} ms"
        )


def print_memory(recipe: Recipe, table: MemoryTable) -> None:
    """Print the predicted GPU memory by phase and by use (weights, gradients, ...), in GiB. Host memory follows a +."""
    from rich.table import Table

    from megarl.planner.memory.node_bytes import node_terms
    from megarl.terminal import Console

    def gib_text(device_bytes: int, host_bytes: int) -> str:
        """Return GPU memory and host memory in GiB; "" for zero bytes. On a CPU all memory is host memory."""
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
        printed.add_row(kind, *(gib_text(use.device_bytes, use.host_bytes) for use in uses))
    printed.add_section()
    printed.add_row("sum", *(gib_text(phase.device_bytes, phase.host_bytes) for phase in table.phases))
    printed.add_row("rank", *(f"{phase.part} {phase.rank}".strip() for phase in table.phases))
    console = Console(soft_wrap=True, highlight=False)
    _print_unwrapped(console, printed)
    parts = node_terms(recipe, table)
    console.print(f"host memory of a node: up to {sum(parts.values()) / 2**30:.0f} GiB, {' and '.join(parts)}")
    if table.cache is not None:
        console.print(str(table.cache))


def print_terms(recipe: Recipe, table: MemoryTable) -> None:
    """Print each term of the predicted memory: its maximum over phases in GiB (host memory after a +), formula, source.

    Then print the parts of a node's host memory.
    """
    from megarl.planner.memory.node_bytes import node_terms
    from megarl.planner.memory.terms import explain_terms

    lines = []
    for term in explain_terms(table):
        sizes = [f"{term.device_bytes / 2**30:.2f}"] * bool(term.device_bytes or not term.host_bytes)
        sizes += [f"{'+' if table.is_gpu else ''}{term.host_bytes / 2**30:.2f}"] * bool(term.host_bytes)
        lines.append(f"{term.kind}: at most {' '.join(sizes)} GiB = {term.formula} (source: {term.source})")
    parts = (f"{name} {size / 2**30:.1f}" for name, size in node_terms(recipe, table).items())
    print_lines([*lines, f"host memory of the fullest node in GiB: {' + '.join(parts)}"])


def print_layouts(recipe: Recipe, result: SearchResult) -> None:
    """Print the layouts of a search: seconds by phase, GiB of the fullest GPU, overrides, and refused choices."""
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
    for number, layout in enumerate(result.layouts, start=1):
        seconds = (f"{getattr(layout.seconds, phase):.1f}" for phase in phases)
        gib = f"{max(layout.gib.values()):.0f}"
        table.add_row(str(number), layout.trainer_text, layout.engine_text, *seconds, gib, layout.limit)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    _print_unwrapped(console, table)
    for number, layout in enumerate(result.layouts, start=1):
        console.print(f"{number}: {shlex.join(layout.overrides) or 'as in the recipe'}")
    for reason, count in list(result.refused.items())[:_MOST_REASONS]:
        console.print(f"refused {count:,} times: {reason}")
    console.print(
        f"{result.num_candidates:,} layouts ranked, memory of {result.num_planned:,} planned in "
        f"{result.search_seconds:.1f} s{'' if result.is_complete else '; the ranking is not complete'}; lengths: "
        f"{result.lengths}; median error of the cost model on held-out published steps: {result.held_out_error:.0%}"
    )


def _print_unwrapped(console: Console, table: Table) -> None:
    """Print a table. If the output is not a terminal, widen the console so that rows do not wrap."""
    if not console.is_terminal:
        # Without a terminal rich assumes 80 columns and would break the rows. Files and pipes have no width.
        console.width = max(
            console.width, console.measure(table, options=console.options.update(max_width=500)).maximum
        )
    console.print(table)
