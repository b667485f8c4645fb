"""A run's metrics in Prometheus' format, read by the parser of its own client."""

from __future__ import annotations

import math
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from megarl.tracking.live.prometheus import RunMetrics, prometheus_name


def scraped(metrics: RunMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Values by name and labels."""
    registry = CollectorRegistry()
    registry.register(metrics)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def of(name: str, /, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_the_newest_value_of_each_metric_is_scraped() -> None:
    status: dict[str, Any] = {"state": "running", "step": 0}
    metrics = RunMetrics("small", 8, lambda: status)
    before = scraped(metrics)
    assert before[of("megarl_step")] == 0 and of("megarl_step_logged_time_seconds") not in before
    metrics.log(1, {"reward/mean": 0.25, "val/my set/accuracy": 1.0})
    metrics.log(2, {"reward/mean": 0.5, "train/loss": math.nan})
    found = scraped(metrics)
    assert found[of("megarl_step")] == 2 and found[of("megarl_steps")] == 8
    assert found[of("megarl_reward_mean", metric="reward/mean")] == 0.5
    # An evaluation is not made at each step: its last value remains.
    assert found[of("megarl_val_my_set_accuracy", metric="val/my set/accuracy")] == 1.0
    assert math.isnan(found[of("megarl_train_loss", metric="train/loss")])
    assert found[of("megarl_run_info", name="small")] == 1
    states = {dict(labels)["megarl_run_state"]: value for (name, labels), value in found.items() if "state" in name}
    assert states["running"] == 1 and sum(states.values()) == 1
    assert found[of("megarl_step_logged_time_seconds")] >= found[of("megarl_run_start_time_seconds")] > 1e9


def test_names_that_become_one_differ_in_their_label() -> None:
    metrics = RunMetrics("small", None, dict)
    metrics.log(1, {"a/b_c": 1.0, "a_b/c": 2.0})
    found = scraped(metrics)
    assert found[of("megarl_a_b_c", metric="a/b_c")] == 1 and found[of("megarl_a_b_c", metric="a_b/c")] == 2
    assert prometheus_name("val/a-1.5/pass_at_4") == "megarl_val_a_1_5_pass_at_4"


def test_health_has_the_step_and_the_broken_rules() -> None:
    status = {"state": "running", "step": 3, "health": [{"rule": "no_gradient"}]}
    metrics = RunMetrics("small", 8, lambda: status)
    assert metrics.health() == {
        "run": "small",
        "state": "running",
        "step": 3,
        "steps": 8,
        "seconds_since_step": None,
        "warnings": ["no_gradient"],
    }
    metrics.log(4, {})
    assert metrics.health()["step"] == 4 and 0 <= metrics.health()["seconds_since_step"] < 60
