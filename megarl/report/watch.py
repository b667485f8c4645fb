"""Dashboard of a run in a terminal: state, progress, metrics, times, warnings and samples, until the run ends."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from megarl.report.sample_text import shortened_text
from megarl.report.watched import WatchedRun
from megarl.terminal import printable
from megarl.tracking.display import prints_blocks, sparkline
from megarl.tracking.health import heldout_metrics
from megarl.tracking.step_table import StepTable, left_text, short_number
from megarl.types import MegarlError, StorageError

_METRICS = (
    "distillation/divergence", "reward/mean", "reward/accuracy", "preference/accuracy", "train/loss",
    "rollout/completion_tokens/mean", "rollout/truncated", "kl/reference", "logprob_gap/mean", "train/entropy",
    "train/grad_norm", "perf/tokens_per_second_per_rank", "perf/rollout_tokens_per_second_per_rank", "perf/mfu",
    "time/step_seconds",
)  # fmt: skip
"""Metrics with a line of the dashboard, if logged. Accuracies of validation sets follow."""
_GRAPH_STEPS = 32
"""Number of newest steps in a metric's graph."""
_BAR_CHARACTERS = 24
_SAMPLE_CHARACTERS = 240
"""Maximum characters shown of a prompt, and of a completion."""
_NUM_WARNINGS = 3
_STYLES = {"running": "green", "starting": "cyan", "done": "bold green", "stopped": "yellow", "unknown": "yellow"}
"""Colours of a run's states. All other states are errors, in red."""


def watch(
    path: Path,
    console: Console,
    *,
    interval_seconds: float,
    is_once: bool = False,
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """Show a run's dashboard until the run ends, and return the run's exit code. With `is_once`: show it once.

    A terminal shows a dashboard, renewed after each `sleep(interval_seconds)`. Other output gets a line per step.
    Raises ConfigError if the folder is not a run, StorageError if `is_once` and its files are unreadable.
    """
    run = WatchedRun(path)
    new_steps = run.refresh()
    if is_once:
        if run.trouble:
            raise StorageError(run.trouble)
        console.print(dashboard(run, console))
        return 0
    # A terminal: redraw the dashboard until the run ends.
    if console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False) as live:
            live.update(dashboard(run, console, most_lines=console.height - 1), refresh=True)
            while not run.is_over:
                sleep(interval_seconds)
                run.refresh()
                live.update(dashboard(run, console, most_lines=console.height - 1), refresh=True)
    else:
        # Other output, such as a file: a line per step, and a line whenever the driver falls silent or continues.
        table = StepTable()
        _print_steps(run, new_steps, table, console)
        was_silent = False
        while not run.is_over:
            sleep(interval_seconds)
            _print_steps(run, run.refresh(), table, console)
            if bool(run.silence) != was_silent and not run.is_over:
                was_silent = bool(run.silence)
                console.print(Text(printable(run.silence or "the driver continues"), style="yellow"), soft_wrap=True)
    console.print(Text(printable(end_line(run)), style=_style(run)), soft_wrap=True)
    return MegarlError.exit_code if run.exit_code is None else run.exit_code


def end_line(run: WatchedRun) -> str:
    code = "" if run.exit_code is None else f", exit code {run.exit_code}"
    cause = run.status.get("cause")
    return f"{run.name}: {run.state}, {_step(run)}{code}" + (f": {cause}" if isinstance(cause, str) else "")


def dashboard(run: WatchedRun, console: Console, *, most_lines: int | None = None) -> RenderableType:
    """Return a run's dashboard. Its last parts are left out if it exceeds `most_lines`."""
    parts: list[RenderableType] = []
    lines_left = math.inf if most_lines is None else most_lines
    for part in _make_parts(run, console):
        lines_left -= len(console.render_lines(part, pad=False))
        if lines_left < 0:
            break
        parts.append(part)
    return Group(*parts)


def _make_parts(run: WatchedRun, console: Console) -> Iterator[RenderableType]:
    """Yield the parts of the dashboard, the most important first."""
    yield _make_heading(run)
    if run.steps:
        bar = Table.grid()
        # In a table, because rich's bar has no line end, and a text after it would be cut off.
        bar.add_row(ProgressBar(total=run.steps, completed=min(run.step, run.steps), width=min(console.width, 100)))
        yield bar
    for text in filter(None, (run.trouble, run.silence)):
        yield Text(printable(text), style="yellow")
    for text in _warnings(run):
        yield Text(f"warning: {printable(text)}", style="yellow")
    if run.rows:
        yield _make_metric_table(run, console)
    else:
        yield Text("no step is logged yet", style="dim")
    if seconds := run.phase_seconds():
        yield Rule("seconds a step by phase", style="dim", align="left")
        yield _make_phase_table(seconds, console)
    for sample in reversed(run.samples):
        yield Rule(Text(printable(_describe_sample(sample))), style="dim", align="left")
        yield _shorten_sample(sample)


def _make_heading(run: WatchedRun) -> Text:
    words = [Text(printable(run.name), style="bold"), Text(run.state, style=_style(run)), Text(_step(run))]
    if (seconds := run.seconds_left) is not None:
        words.append(Text(f"{left_text(seconds)} left"))
    if (age := run.seconds_since_step) is not None and not run.is_over:
        words.append(Text(f"last step {left_text(age)} ago", style="dim"))
    if run.attempt_number > 1:
        words.append(Text(f"start {run.attempt_number}", style="dim"))
    if run.is_over and run.exit_code is not None:
        words.append(Text(f"exit code {run.exit_code}"))
    return Text("  ").join(words)


def _step(run: WatchedRun) -> str:
    return f"step {run.step}" + (f" of {run.steps}" if run.steps else "")


def _style(run: WatchedRun) -> str:
    return _STYLES.get(run.state, "bold red")


def _warnings(run: WatchedRun) -> list[str]:
    shown = run.notices[-_NUM_WARNINGS:]
    num_hidden = len(run.notices) - len(shown)
    return [*([f"{num_hidden} earlier ones in logs/latest/notices.jsonl"] if num_hidden else []), *shown]


def _make_metric_table(run: WatchedRun, console: Console) -> Table:
    """Return a table of metrics: name, newest value, graph, the graph's smallest and largest value.

    A newest value that is not finite is shown as such; the graph leaves it out.
    """
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("metric", no_wrap=True)
    table.add_column("now", justify="right", no_wrap=True)
    table.add_column(f"last {_GRAPH_STEPS} values", no_wrap=True)
    table.add_column("from", justify="right", no_wrap=True)
    table.add_column("to", justify="right", no_wrap=True)
    for name in (*_METRICS, *heldout_metrics(run.rows.values())):
        values = run.values(name, _GRAPH_STEPS)
        if not values:
            continue
        now = Text(short_number(values[-1]), style="bold" if math.isfinite(values[-1]) else "bold red")
        finite = [value for value in values if math.isfinite(value)]
        graph = sparkline(finite, with_blocks=prints_blocks(console)) if finite else ""
        range_texts = (short_number(min(finite)), short_number(max(finite))) if finite else ("", "")
        table.add_row(Text(printable(name)), now, graph, *range_texts)
    return table


def _make_phase_table(seconds: Mapping[str, float], console: Console) -> Table:
    """Return a table of phases: name, seconds per step, share of the step, and the share as a bar."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    total = sum(seconds.values()) or 1.0
    block = "█" if prints_blocks(console) else "#"
    for phase, value in seconds.items():
        share = value / total
        table.add_row(Text(printable(phase)), f"{value:.2f} s", f"{share:.0%}", block * round(share * _BAR_CHARACTERS))
    return table


def _describe_sample(sample: Mapping[str, Any]) -> str:
    reward = sample.get("reward")
    reward_text = f"reward {reward:.4g}" if isinstance(reward, int | float) else "not scored"
    return f"sample of step {sample['step']}, {sample.get('set', 'train')}, {reward_text}"


def _shorten_sample(sample: Mapping[str, Any]) -> Text:
    """Return a sample's last prompt message and its completion, or its first and last turn, shortened."""
    text = Text()
    prompt = sample.get("prompt")
    last_message = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    content = last_message.get("content") if isinstance(last_message, Mapping) else last_message
    text.append(_short(content), style="dim")
    turns = sample.get("turns")
    if isinstance(turns, list) and turns:
        completions = [turn.get("completion") if isinstance(turn, Mapping) else turn for turn in turns]
        shown_completions = completions if len(completions) < 2 else [completions[0], completions[-1]]
        text.append(f"\n{len(turns)} turns: ", style="dim")
        text.append("\n".join(map(_short, shown_completions)))
    else:
        text.append("\n" + _short(sample.get("completion")))
    return text


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return " ".join(shortened_text(text, _SAMPLE_CHARACTERS).split())


def _print_steps(run: WatchedRun, new_steps: list[int], table: StepTable, console: Console) -> None:
    table.steps = run.steps
    for step in new_steps:
        if "time/step_seconds" in (row := run.rows.get(step, {})):
            for line in table.lines(step, row, run.seconds_left if step == run.step else None):
                console.print(Text(line), soft_wrap=True)
