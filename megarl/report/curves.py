"""Curves of a run's metrics, reduced to a bounded number of points. Important metrics come first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Rows = Sequence[tuple[int, Mapping[str, float]]]
"""Steps in order: step number, and metrics by name. NaN: the value was not finite."""

MOST_POINTS = 400
"""Maximum number of points in a curve."""
FEWEST_POINTS = 40
"""Number of points in a curve on a page with very many curves."""
_VALUES_OF_PAGE = 160_000
"""Maximum number of points in all curves of a page: about 1.2 MB."""
_NUM_COLUMNS = 160
"""Number of columns in the chart of times by phase."""

_LENGTH = "rollout/completion_tokens/mean"


class Chart(NamedTuple):
    """An important chart: its title, its meaning, and regular expressions for its metrics.

    The first expression with a match counts; each match has its own chart. `spread` is a metric with half the width of
    a band around the curve. `upper` is a metric drawn as a thin line.
    """

    title: str
    meaning: str
    metrics: tuple[str, ...]
    spread: str | None = None
    upper: str | None = None


CHARTS = (
    Chart("Reward", "mean of a step's samples; the band is one standard deviation", ("reward/mean",), "reward/std"),
    Chart("Held-out accuracy", "share of right answers", (r"val/[^/]+/accuracy", r"preference/accuracy")),
    Chart("Held-out reward", "mean over problems", (r"val/[^/]+/reward/mean",)),
    Chart("Held-out loss", "nats per token of the answer", (r"val/[^/]+/loss",)),
    Chart("Accuracy in training", "share of right answers among a step's samples", ("reward/accuracy",)),
    Chart("Length", "tokens of a completion, mean", (_LENGTH,), upper="rollout/completion_tokens/max"),
    Chart("Truncated", "share of completions at the length limit", ("rollout/truncated",)),
    Chart("Divergence from the teacher", "nats per token", ("distillation/divergence", "distillation/reverse_kl")),
    Chart("KL to the reference", "nats per token", ("kl/reference",)),
    Chart("KL of the update", "between old and new policy, nats per token", ("kl/update", "train/kl")),
    Chart("Entropy", "of the policy, nats per token", ("train/entropy",)),
    Chart("Log-prob gap", "|trainer - engine| with the same weights, nats; mean, thin line: largest",
          ("logprob_gap/mean",), upper="logprob_gap/max"),
    Chart("Tokens per second", "per rank, over the whole step",
          ("perf/tokens_per_second_per_rank", "derived/tokens_per_second")),
    Chart("Utilisation", "share of the device's peak reached by the trainer's passes", ("perf/mfu",)),
    Chart("Loss", "of training", ("train/loss",)),
    Chart("Gradient norm", "before clipping", ("train/grad_norm",)),
    Chart("Clipped", "share of tokens with a clipped ratio", ("train/clip_fraction",)),
    Chart("Groups without signal", "share of groups with equal rewards only", ("reward/zero_variance_groups",)),
    Chart("Staleness", "weight versions from a sample's oldest token to its update", ("staleness/mean",),
          upper="staleness/max"),
    Chart("Turns", "completions of an attempt", ("rollout/turns/mean",), upper="rollout/turns/max"),
    Chart("Step time", "seconds, without the first step", ("derived/later_step_seconds",)),
    Chart("Seconds against the plan", "measured over planned seconds of a step", ("plan/seconds_ratio",)),
    Chart("Memory against the plan", "measured over planned memory, of the fullest phase", ("plan/memory_ratio",)),
)  # fmt: skip
"""Important charts, the most informative first. A chart without data, or with an uninformative curve, is left out."""

_QUIET = {"Truncated": 0.0, "Staleness": 0.0, "Turns": 1.0, "Clipped": 0.0}
"""Uninformative values, by chart title. A chart with only this value is left out."""

GROUPS = ("reward", "val", "rollout", "environment", "tools", "train", "kl", "distillation", "logprob_gap",
          "importance", "critic", "staleness", "partial", "curriculum", "perf", "time", "memory",
          "plan", "reshard")  # fmt: skip
"""Groups of metrics in the order of the page. Other groups follow by name."""

FAULTS = re.compile(
    r"(val/.+/reward_|reward/)(errors|timeouts|lost_processes)|rollout/errors/.+|rollout/restarted|train/(update_skipped|gap_exceeded)"
    r"|critic/update_skipped|environment/(.+/)?process_killed|tools/.+/errors|tools/invalid|fault/.+"
    r"|rollout/(aborted|slow_replicas|lost_requests)"
)
"""Metrics that count errors. The page shows their sums over a run."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Groups of consecutive steps, each drawn as one point. Bin `i` has rows `edges[i]` to `edges[i + 1]`."""

    edges: tuple[int, ...]

    @classmethod
    def of(cls, num_rows: int, max_bins: int) -> Bins:
        count = min(num_rows, max_bins)
        return cls(tuple(num_rows * number // count for number in range(count + 1)) if count else (0,))

    def parts(self, values: Sequence[float]) -> Iterator[Sequence[float]]:
        for start, end in zip(self.edges, self.edges[1:], strict=False):
            yield values[start:end]


def with_derived(rows: Rows) -> list[tuple[int, dict[str, float]]]:
    """Return the steps with two computed metrics: `derived/later_step_seconds` and `derived/tokens_per_second`.

    The first omits the first training step, because the start of ranks and engines would dwarf all differences. The
    second is trained tokens / seconds, if no throughput was measured.
    """
    has_speed = any(name == "perf/tokens_per_second_per_rank" for _, row in rows for name in row)
    # Step 0 is the evaluation before training.
    first_step = min((step for step, _ in rows if step > 0), default=0)
    has_later_steps = any(step > first_step for step, _ in rows)
    derived_rows = []
    for step, row in rows:
        derived: dict[str, float] = {}
        tokens, seconds = row.get("train/tokens"), row.get("time/step_seconds")
        if seconds is not None and (step > first_step or not has_later_steps):
            derived["derived/later_step_seconds"] = seconds
        if tokens and seconds and not has_speed:
            derived["derived/tokens_per_second"] = tokens / seconds
        derived_rows.append((step, {**row, **derived}))
    return derived_rows


def metric_names(rows: Rows) -> list[str]:
    names: set[str] = set()
    for _, row in rows:
        names |= row.keys()
    return sorted(names, key=lambda name: (_group_order(name), name))


def choose_charts(runs: Sequence[Rows]) -> list[dict[str, Any]]:
    """Return the page's charts, each with its metric: the first of `CHARTS` expressions that matches."""
    names = sorted({name for rows in runs for name in metric_names(rows)})
    charts = []
    for chart in CHARTS:
        matching_names = [[name for name in names if re.fullmatch(pattern, name)] for pattern in chart.metrics]
        # Use only the first expression with a match. Later ones replace it if it has none.
        for name in next(filter(None, matching_names), []):
            if chart.title in _QUIET and _is_always(runs, name, _QUIET[chart.title]):
                continue
            # Only charts of several metrics need the metric's name in their title.
            is_one_of_several = len(next(filter(None, matching_names))) > 1
            title = f"{chart.title}: {_shorten_name(name)}" if is_one_of_several else chart.title
            charts.append(
                {"title": title, "meaning": chart.meaning, "metric": name, "spread": chart.spread, "upper": chart.upper}
            )
    return charts


def series(rows: Rows, most_points: int) -> dict[str, Any]:
    """Return a run's curves as JSON values. Neighbouring steps share a bin, so that there are at most `most_points`.

    `x` has the last step of each bin, `seconds` the training time up to it. `of` has each metric's `y`: the mean of the
    finite values in each bin, or None. A metric with values in few bins lists only these, with the bins' indices in
    `i`. `is_thinned`: a bin has more than one step. Then important metrics also have each bin's extremes, `low` and
    `high`.
    """
    bins = Bins.of(len(rows), most_points)
    is_thinned = len(rows) > most_points
    steps = [step for step, _ in rows]
    elapsed: list[float] = []
    total = 0.0
    for _, row in rows:
        seconds = row.get("time/step_seconds", 0.0)
        # One NaN would make all later times NaN.
        total += 0.0 if math.isnan(seconds) else seconds
        elapsed.append(total)
    # Ranges triple a curve's size, so give them only to important metrics of long runs.
    with_range = {chart["metric"] for chart in choose_charts([rows])} if is_thinned else set()
    curves_by_metric = {}
    for name in metric_names(rows):
        values = [row.get(name, math.nan) for _, row in rows]
        curves_by_metric[name] = _make_curve(bins, values, with_range=name in with_range)
    return {
        "x": [part[-1] for part in bins.parts(steps)],
        "seconds": [round_for_page(part[-1]) for part in bins.parts(elapsed)],
        "of": curves_by_metric,
        "is_thinned": is_thinned,
    }


def average_over_seeds(runs: Sequence[Rows], most_points: int) -> dict[str, Any]:
    """Return the mean curves of runs that differ only in their seed, in the form of `series`.

    Each point is the mean over the runs with this step. `low` and `high` are one standard deviation below and above.
    `final` has each metric's mean, deviation (None: one run has it) and number of runs at the last step.
    """
    by_step: dict[int, dict[str, list[float]]] = {}
    last_values: list[dict[str, float]] = []
    for rows in runs:
        last_values.append({name: value for _, row in rows for name, value in row.items() if not math.isnan(value)})
        for step, row in rows:
            for name, value in row.items():
                if not math.isnan(value):
                    by_step.setdefault(step, {}).setdefault(name, []).append(value)
    steps = sorted(by_step)
    # Runs may have logged different steps, so a mean covers only the runs with the step.
    means = [(step, {name: _mean_and_deviation(values)[0] for name, values in by_step[step].items()}) for step in steps]
    mean_series = series(means, most_points)
    bins = Bins.of(len(means), most_points)
    for name, curve in mean_series["of"].items():
        for bound, sign in (("low", -1), ("high", 1)):
            edges = [_band_edge(by_step[step].get(name), sign) for step in steps]
            curve[bound] = _make_curve(bins, edges, with_range=False)["y"]
    final_values = {name: [row[name] for row in last_values if name in row] for name in mean_series["of"]}
    final_moments = {
        name: (*_mean_and_deviation(values), len(values)) for name, values in final_values.items() if values
    }
    mean_series["final"] = {
        name: [round_for_page(mean), round_for_page(spread) if count > 1 else None, count]
        for name, (mean, spread, count) in final_moments.items()
    }
    return mean_series


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else 0.0


def _band_edge(values: Sequence[float] | None, sign: int) -> float:
    if not values:
        return math.nan
    mean, spread = _mean_and_deviation(values)
    return mean + sign * spread


def points_for(runs: Sequence[Rows]) -> int:
    curves = sum(len(metric_names(rows)) for rows in runs) or 1
    return max(FEWEST_POINTS, min(MOST_POINTS, _VALUES_OF_PAGE // curves))


def phase_times(rows: Rows) -> dict[str, Any]:
    """Return the time of each phase over the run, as JSON values.

    `x` has the last step of each column. `of` has each phase's mean seconds per step in each column; `other` is the
    time outside of all phases. Parts of a phase, like reshard_wire, are left out. `total` has the seconds over all
    steps, `per_column` the maximum number of steps in a column.
    """
    names = [name for name in metric_names(rows) if re.fullmatch(r"time/[^/]+_seconds", name)]
    phases = {
        name.removeprefix("time/").removesuffix("_seconds"): name for name in names if name != "time/step_seconds"
    }
    # reshard_wire is part of reshard. Stacked together, it would count twice.
    phases = {
        phase: name
        for phase, name in phases.items()
        if not any(phase.startswith(f"{whole_phase}_") for whole_phase in phases)
    }
    timed_rows = [(step, row) for step, row in rows if "time/step_seconds" in row]
    if not timed_rows:
        return {"x": [], "of": {}, "total": {}}
    # Seconds of each phase by step. Time outside of all phases becomes the phase `other`.
    columns: dict[str, list[float]] = {
        phase: [_finite(row.get(name)) for _, row in timed_rows] for phase, name in phases.items()
    }
    step_seconds = [_finite(row["time/step_seconds"]) for _, row in timed_rows]
    phase_totals = [sum(values[index] for values in columns.values()) for index in range(len(timed_rows))]
    # The phases' sum may slightly exceed the step's time, but a negative time cannot be drawn.
    columns["other"] = [
        max(0.0, seconds - seconds_in_phases)
        for seconds, seconds_in_phases in zip(step_seconds, phase_totals, strict=True)
    ]
    phase_seconds = {phase: sum(values) for phase, values in columns.items() if any(values)}
    order = sorted(phase_seconds, key=lambda phase: (phase == "other", -phase_seconds[phase]))
    # A column shows the mean over its steps, because a long run has more steps than pixels.
    bins = Bins.of(len(timed_rows), _NUM_COLUMNS)
    return {
        "x": [part[-1] for part in bins.parts([step for step, _ in timed_rows])],
        "of": {
            phase: [round_for_page(sum(part) / len(part)) for part in bins.parts(columns[phase])] for phase in order
        },
        "total": {phase: round_for_page(phase_seconds[phase]) for phase in order},
        "per_column": max(len(part) for part in bins.parts(step_seconds)),
    }


def list_fault_counts(rows: Rows) -> list[dict[str, Any]]:
    """Return the non-zero error counts: sum, number of steps with errors, first and last step."""
    counts = []
    for name in metric_names(rows):
        if not FAULTS.fullmatch(name):
            continue
        steps = [(step, row[name]) for step, row in rows if row.get(name) and not math.isnan(row[name])]
        if steps:
            total = round_for_page(sum(count for _, count in steps))
            counts.append(
                {"metric": name, "sum": total, "steps": len(steps), "first": steps[0][0], "last": steps[-1][0]}
            )
    return counts


def not_finite(rows: Rows) -> list[dict[str, Any]]:
    """Return the metrics with NaN or infinite values: number of steps, first and last step."""
    steps_by_name: dict[str, list[int]] = {}
    for step, row in rows:
        for name, value in row.items():
            if math.isnan(value):
                steps_by_name.setdefault(name, []).append(step)
    return [
        {"metric": name, "steps": len(steps), "first": steps[0], "last": steps[-1]}
        for name, steps in steps_by_name.items()
    ]


def round_for_page(value: float) -> float | int | None:
    """Return a number with five significant digits, in its shortest JSON form. None: it is not finite."""
    # Five digits are finer than a pixel and keep the page small.
    short = float(f"{value:.5g}")
    if not math.isfinite(short):
        return None
    # Integers below 1e15 are exact and shorter in JSON.
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _make_curve(bins: Bins, values: Sequence[float], *, with_range: bool) -> dict[str, Any]:
    """Return a metric's curve in the form of `series`. `with_range` adds the extremes of each bin."""
    values_by_bin = [[value for value in part if not math.isnan(value)] for part in bins.parts(values)]
    filled_bins = [index for index, bin_values in enumerate(values_by_bin) if bin_values]
    # Evaluations are only every few steps, so a list of bins is shorter than many nulls.
    is_sparse = len(filled_bins) < len(values_by_bin) / 2
    bins_on_page = [values_by_bin[index] for index in filled_bins] if is_sparse else values_by_bin
    curve: dict[str, Any] = {"i": filled_bins} if is_sparse else {}
    curve["y"] = [round_for_page(sum(numbers) / len(numbers)) if numbers else None for numbers in bins_on_page]
    if with_range:
        curve["low"] = [round_for_page(min(numbers)) if numbers else None for numbers in bins_on_page]
        curve["high"] = [round_for_page(max(numbers)) if numbers else None for numbers in bins_on_page]
    # A metric logged but never finite gets an empty curve, so that it is not overlooked.
    if any(map(math.isnan, values)) and not filled_bins:
        curve["y"] = []
    return curve


def _finite(value: float | None) -> float:
    return 0.0 if value is None or math.isnan(value) else value


def _is_always(runs: Sequence[Rows], name: str, value: float) -> bool:
    return all(row.get(name, value) == value for rows in runs for _, row in rows)


def _shorten_name(name: str) -> str:
    parts = name.split("/")
    return "/".join(parts[1:-1]) if parts[0] == "val" else "/".join(parts[1:])


def _group_order(name: str) -> int:
    group = name.split("/")[0]
    return GROUPS.index(group) if group in GROUPS else len(GROUPS)
