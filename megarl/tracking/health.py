"""Health rules: checks of a run's metrics. They warn if the policy cannot learn or loses abilities.

Each rule is a row of RULES, and warns once in a run.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

from megarl.config.sections.health import HealthConfig
from megarl.findings import Finding
from megarl.tracking.step_lines import StepLine

LOWEST_LEARNING_RATE = 1e-8
"""Lowest usual learning rate. Adam moves a weight by about the rate per update, so 10,000 updates move it by 1e-4."""
LORA_FACTOR = 10.0
"""Usual learning rates for LoRA adapters are this factor higher (Schulman et al. 2025, LoRA Without Regret)."""
_EVALUATIONS = 2
"""Number of consecutive evaluations below the best one before a warning. A single one may be chance."""

Series = Mapping[str, Sequence[tuple[int, float]]]
"""Finite values of each watched metric, in order: (step, value)."""


class Evidence(NamedTuple):
    """Proof of a broken rule: the metric, its value, and the comparison in words."""

    metric: str
    value: float
    compared: str


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A health rule that broke after a step, with its facts for status.json."""

    rule: str
    step: int
    metric: str
    value: float
    problem: str
    remedy: str

    @property
    def finding(self) -> Finding:
        return Finding(
            "warning", f"health, {self.rule}", f"{self.metric} is {self.value:.3g} {self.problem}", self.remedy
        )

    @property
    def text(self) -> str:
        place, text, remedy = self.finding.place, self.finding.text, self.finding.remedy
        return f"{place}: {text}. Try this: {remedy}."

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Rule(NamedTuple):
    """A health rule: the metrics it watches, its check, the meaning of a failure, and a remedy."""

    name: str
    metrics: tuple[str, ...]
    check: Callable[[Series, HealthConfig], Evidence | None]
    meaning: str
    remedy: str
    reads_evaluations: bool = False

    def is_due_after(self, metrics: Collection[str]) -> bool:
        """Return whether to check the rule once metrics with these names are logged."""
        # A step has hundreds of metrics. Search them only for a rule with a pattern.
        return any(name in metrics for name in self.metrics) or (
            self.reads_evaluations and any(map(is_accuracy, metrics))
        )


def _make_check_of_all(
    metric: str, is_bad: Callable[[float, HealthConfig], bool]
) -> Callable[[Series, HealthConfig], Any]:
    """Return a check that fails if the last `window` values of a metric are all bad."""

    def check(series: Series, health: HealthConfig) -> Evidence | None:
        last_values = _values_of(series, metric)[-health.window :]
        if len(last_values) < health.window or not all(is_bad(value, health) for value in last_values):
            return None
        return Evidence(metric, last_values[-1], f"and was as bad for {health.window} steps")

    return check


def _make_check_of_rise(
    metric: str, factor: Callable[[HealthConfig], float], lowest: Callable[[HealthConfig], float]
) -> Callable[[Series, HealthConfig], Evidence | None]:
    """Return a check that compares the median of a metric's last `window` values with the median of the first.

    It fails if the ratio is at least `factor`, and the last median at least `lowest`.
    """

    def check(series: Series, health: HealthConfig) -> Evidence | None:
        # A step without a gradient has norm 0. As a first step, it would make any later norm a rise.
        values = [value for value in _values_of(series, metric) if value > 0]
        if len(values) < 2 * health.window:
            return None
        # Medians, because single steps may be outliers.
        first_median, last_median = median(values[: health.window]), median(values[-health.window :])
        if last_median < lowest(health) or last_median < factor(health) * first_median:
            return None
        return Evidence(
            metric,
            last_median,
            f"(median of {health.window} steps), {last_median / first_median:.3g} times the first steps'",
        )

    return check


def _find_falling_accuracy(series: Series, health: HealthConfig) -> Evidence | None:
    """Return evidence if a validation set's accuracy falls while the training reward rises, else None."""
    rewards = series.get("reward/mean", ())
    for metric in [name for name in series if is_accuracy(name)]:
        evaluated = series[metric]
        best_step, best = max(evaluated, key=lambda item: item[1])
        later_values = [(step, value) for step, value in evaluated if step > best_step]
        newest = later_values[-_EVALUATIONS:]
        if len(newest) < _EVALUATIONS or any(value > best - health.validation_drop for _, value in newest):
            continue
        rewards_until_best = [value for step, value in rewards if step <= best_step][-health.window :]
        # If the best evaluation came before the first step, compare with the first rewards.
        rewards_before = rewards_until_best or [value for _, value in rewards[: health.window]]
        rewards_now = [value for _, value in rewards[-health.window :]]
        # A falling accuracy alone may mean overfitting or a bad learning rate. With a rising reward it is reward
        # hacking.
        if rewards_before and fmean(rewards_now) >= fmean(rewards_before) + health.reward_rise:
            compared = (
                f"after {best:.3g} at step {best_step}, while reward/mean rose from {fmean(rewards_before):.3g} to "
            )
            return Evidence(metric, newest[-1][1], f"{compared}{fmean(rewards_now):.3g}")
    return None


def _values_of(series: Series, metric: str) -> list[float]:
    return [value for _, value in series.get(metric, ())]


RULES = (
    Rule(
        "no_gradient",
        ("reward/zero_variance_groups",),
        _make_check_of_all("reward/zero_variance_groups", lambda value, health: value >= 1.0),
        "all attempts of every group have the same reward, so no group has a gradient",
        "problems of another difficulty, more train.samples_per_prompt, or a reward that grades answers more finely; "
        "look at answers with `megarl samples`",
    ),
    Rule(
        "constant_reward",
        ("reward/std",),
        _make_check_of_all("reward/std", lambda value, health: value == 0.0),
        "all rewards of a step are equal",
        "check the reward function and data.answer_field on a few answers (`megarl samples`), or warm the model up "
        "with sft if no answer is right",
    ),
    Rule(
        "entropy_collapsed",
        ("train/entropy",),
        _make_check_of_all("train/entropy", lambda value, health: value < health.entropy_low),
        "the policy has become nearly deterministic: all attempts are alike",
        "a lower optimizer.learning_rate, algorithm.clip_high=0.28, algorithm.entropy_coefficient, or a higher "
        "rollout.sampling.temperature",
    ),
    Rule(
        "entropy_exploding",
        ("train/entropy",),
        _make_check_of_rise("train/entropy", lambda health: health.entropy_rise, lambda health: health.entropy_high),
        "the policy samples nearly random tokens",
        "a lower optimizer.learning_rate, no algorithm.entropy_coefficient, or algorithm.kl_coefficient above 0",
    ),
    Rule(
        "grad_norm_rising",
        ("train/grad_norm",),
        _make_check_of_rise("train/grad_norm", lambda health: health.grad_norm_rise, lambda health: 0.0),
        "training is about to diverge",
        "a lower optimizer.learning_rate, a longer optimizer.warmup_steps, or a smaller optimizer.clip_grad_norm",
    ),
    Rule(
        "mismatch_rising",
        ("logprob_gap/mean",),
        _make_check_of_rise(
            "logprob_gap/mean", lambda health: health.logprob_gap_rise, lambda health: health.logprob_gap_high
        ),
        "trainer and engine disagree more and more about the sampled tokens",
        "algorithm.importance_sampling=tis, model.dtype=float32, a lower optimizer.learning_rate, or "
        "train.max_logprob_gap",
    ),
    Rule(
        "lost_in_merge",
        ("lora/lost_in_merge",),
        _make_check_of_all("lora/lost_in_merge", lambda value, health: value > health.lost_in_merge),
        "rounding the merged weights hides the adapters' update from the engine, so samples are not the policy's",
        "lora.sync=adapter if the engine can take it, a higher optimizer.learning_rate, or model.dtype=float32",
    ),
    Rule(
        "truncated",
        ("rollout/truncated",),
        _make_check_of_all("rollout/truncated", lambda value, health: value >= health.truncated),
        "nearly all attempts are cut off at the length limit",
        "a larger rollout.sampling.max_new_tokens, algorithm.overlong_buffer, or a system prompt that asks for short "
        "answers",
    ),
    Rule(
        "no_end_of_sequence",
        ("rollout/ended/done",),
        _make_check_of_all("rollout/ended/done", lambda value, health: value == 0.0),
        "no attempt ended by itself",
        "check the chat template and the model's eos_token_id, or give rollout.sampling.stop; a base model needs sft "
        "first",
    ),
    Rule(
        "validation_falling",
        ("reward/mean",),
        _find_falling_accuracy,
        "the reward is earned in a way that does not solve the problems (reward hacking)",
        "read held-out answers with `megarl samples`, fix or drop the exploited reward, add "
        "algorithm.kl_coefficient, and keep checkpoint.best",
        reads_evaluations=True,
    ),
)
"""All health rules checked after each step."""
LEARNING_RATE = "learning_rate"
"""Name of the health rule checked once at the start (`unusual_learning_rate`)."""


@dataclass(slots=True)
class Health:
    """State of the health rules in a run. `warned` has the names of the rules that have warned."""

    config: HealthConfig
    warned: set[str] = field(default_factory=set)
    _series: defaultdict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))

    def observe(self, step: int, metrics: Mapping[str, float | None]) -> list[BrokenRule]:
        """Add a step's metrics. Return the rules that broke for the first time."""
        watched_metrics = {metric for rule in RULES for metric in rule.metrics}
        for name, value in metrics.items():
            if (name in watched_metrics or is_accuracy(name)) and value is not None and math.isfinite(value):
                self._series[name].append((step, value))
        broken_rules: list[BrokenRule] = []
        for rule in RULES:
            # Check a rule only if this step has its metrics, and once per run.
            if not rule.is_due_after(metrics) or not self.takes(rule.name):
                continue
            if (evidence := rule.check(self._series, self.config)) is not None:
                # Warn once per run, because a broken rule stays broken in most later steps.
                self.warned.add(rule.name)
                metric, value, compared = evidence
                broken_rules.append(
                    BrokenRule(rule.name, step, metric, value, f"{compared}: {rule.meaning}", rule.remedy)
                )
        return broken_rules

    def takes(self, rule: str) -> bool:
        return rule not in self.warned and rule not in self.config.off

    def replay(self, steps: Iterable[StepLine]) -> None:
        """Add the metrics of the steps before a resume. An earlier start has reported the rules broken in them."""
        for line in steps:
            self.observe(line.step, line.metrics)


def usual_learning_rates(hidden_size: int, *, has_lora: bool) -> tuple[float, float]:
    """Return the usual range of Adam's peak learning rate. The largest stable rate falls as 1 / width (Yang et al.
    2022).
    """
    return LOWEST_LEARNING_RATE, (LORA_FACTOR if has_lora else 1.0) / hidden_size


def unusual_learning_rate(rate: float, usual: tuple[float, float], step: int = 0) -> BrokenRule | None:
    """Return the broken rule if a learning rate is outside of the usual range, else None."""
    low, high = usual
    if low <= rate <= high:
        return None
    effect = "the model may be destroyed within a few updates" if rate > high else "the model will hardly change"
    problem = f"and {low:.3g} to {high:.3g} is usual for this model: {effect}"
    remedy = f"a rate in this range, or health.learning_rate=[{min(low, rate):.3g}, {max(high, rate):.3g}]"
    return BrokenRule(LEARNING_RATE, step, "optimizer.learning_rate", rate, problem, remedy)


def is_accuracy(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 3 and parts[0] == "val" and parts[2] == "accuracy"


def heldout_metrics(rows: Collection[Mapping[str, float | None]]) -> list[str]:
    """Return the names of the accuracies and mean rewards of whole validation sets in rows of metrics.

    A reward equal to its set's accuracy in all rows is left out.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    accuracies = [name for name in names if is_accuracy(name)]
    rewards = [name for name in names if re.fullmatch("val/[^/]+/reward/mean", name)]
    return accuracies + [
        name for name in rewards if any(row.get(name) != row.get(_accuracy_of_set(name)) for row in rows)
    ]


def _accuracy_of_set(metric: str) -> str:
    return f"val/{metric.split('/')[1]}/accuracy"
