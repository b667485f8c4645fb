"""Old names of metrics, for runs and checkpoints from before a rename.

Readers of a run folder use current names, so a metric has one curve even across a rename.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

RENAMED = {
    "curriculum/passed": "curriculum/skipped",
    "entropy/kept": "entropy/trained_share",
    "importance/cut": "importance/clipped_share",
    "partial/kept_tokens": "staleness/old_tokens",
    "rollout/attempts": "rollout/prompt_batches",
    "rollout/beside_evaluation_tokens": "rollout/tokens_during_evaluation",
    "rollout/given_up": "rollout/dropped_groups",
    "rollout/held_seconds": "rollout/paused_seconds",
    "rollout/kept": "rollout/groups_passing_filter",
    "rollout/kept_tokens/max": "rollout/candidates_left/max",
    "rollout/kept_tokens/mean": "rollout/candidates_left/mean",
    "rollout/kept_tokens_bytes": "rollout/candidates_left_bytes",
    "tools/truncated": "tools/shortened",
}
"""Current names of metrics by their old names."""

_BY_SOURCE = {
    old.removeprefix("rollout/"): new.removeprefix("rollout/")
    for old, new in RENAMED.items()
    if old.startswith(("curriculum/", "tools/", "rollout/kept_tokens"))
}
"""Renamed metrics that a mixture also logs per source, as `environment/SOURCE/NAME`, without the prefix `rollout/`."""


@lru_cache(maxsize=4096)
def current_name(name: str) -> str:
    """Return the current name of a logged metric, with or without a source's prefix."""
    # Cached, because a reader of a run asks for the same names at each step.
    group, _, source_and_metric = name.partition("/")
    source, _, metric = source_and_metric.partition("/")
    if group == "environment" and metric in _BY_SOURCE:
        return f"environment/{source}/{_BY_SOURCE[metric]}"
    return RENAMED.get(name, name)


def current_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics by their current names.

    An old step may have both tools/truncated and tools/shortened. These counted different limits, so they are added.
    Null, for a number that was not finite, stays null.
    """
    current: dict[str, Any] = {}
    for name, value in metrics.items():
        new_name = current_name(name)
        if new_name in current:
            value_before = current[new_name]
            current[new_name] = None if None in (value_before, value) else value_before + value
        else:
            current[new_name] = value
    return current


def renamed_error(name: str) -> str | None:
    new_name = current_name(name)
    return None if new_name == name else f"{name} is an old name; write {new_name}"
