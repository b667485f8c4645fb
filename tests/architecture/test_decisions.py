"""Metrics are written, and not read back: the name of a metric changes nothing that is trained."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import megarl
from megarl.tracking.health import RULES
from megarl.tracking.metric_table import find_row, rows

PACKAGE = Path(megarl.__file__).parent

READERS = ("report/", "tracking/display.py", "tracking/step_table.py", "tracking/tracker.py")
"""Files that show logged metrics to people."""

JUDGED = {
    # Phases' seconds, for metrics of speed.
    "loops/measuring/performance.py": {"perf/engines_open_seconds", "rollout/sampled_tokens", "time/step_seconds"},
    # Idle shares, for a notice on placement.
    "loops/measuring/balance.py": {"time/engines_idle", "time/step_seconds"},
    # The seconds of a step, for a ratio to the plan and a notice.
    "loops/observers/plan_promise.py": {"time/step_seconds"},
    # Metrics of two reshards become one row.
    "loops/reshard_schedule.py": {"rollout/replicas"},
    # The environment's count of shortened replies, to which those of the recipe's limit are added.
    "rollout/attempt_messages.py": {"tools/shortened"},
    # Sums over rows become the step's metrics.
    "rollout/step/updates.py": {"train/loss", "kl/update"},
    # A rule over the logged series, which a resumed run reads from metrics.jsonl.
    "tracking/health.py": {"reward/mean"},
}  # fmt: skip
"""Metrics that other files read by name. Nothing that is trained follows from them."""


def names_read(tree: ast.AST, metrics: set[str]) -> Iterator[str]:
    """Yield the names of metrics that a module looks up in a mapping."""
    for node in ast.walk(tree):
        keys: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            keys = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            keys = node.args[:1]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            keys = [node.left]
        for key in keys:
            if isinstance(key, ast.Constant) and key.value in metrics:
                yield str(key.value)
            # A name with a prefix, as f"{prefix}/not_finite".
            elif isinstance(key, ast.JoinedStr) and isinstance(key.values[-1], ast.Constant):
                end = str(key.values[-1].value)
                yield from [end] if "/" in end and any(name.endswith(end) for name in metrics) else []


def test_no_decision_reads_a_metric_by_its_name() -> None:
    metrics = {row.name for row in rows()}
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        names = set(names_read(ast.parse(path.read_text(encoding="utf-8")), metrics))
        if names and not name.startswith(READERS):
            found[name] = names
    assert found == JUDGED


def test_a_read_is_found_in_each_form() -> None:
    code = 'm["train/loss"]; m.get("kl/reference"); m.pop("train/loss"); "kl/reference" in m; m.get(f"{p}/loss")'
    assert len(list(names_read(ast.parse(code), {"train/loss", "kl/reference"}))) == 5
    assert list(names_read(ast.parse('m["train/loss"] = 1; {"train/loss": 2}'), {"train/loss"})) == []


def test_each_health_rule_watches_a_metric_of_the_table() -> None:
    """Health rules read logged series. A rule whose metric has another name would never warn."""
    assert [name for rule in RULES for name in rule.metrics if find_row(name) is None] == []
