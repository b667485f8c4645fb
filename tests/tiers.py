"""Which tier a test belongs to, by what it uses. A test that carries the marker of a tier is of that one."""

from __future__ import annotations

from pathlib import Path

import pytest

TIERS = ("end_to_end", "cluster", "distributed", "types", "fast")
"""What each is, pyproject.toml says. Runs start ranks, too: the first that fits counts, and `fast` is what is left."""

FOLDERS = {"end_to_end": "end_to_end", "distributed": "distributed"}

FIXTURES = {
    "ranks": "distributed",
    "worker_module": "distributed",
    "pool": "distributed",
    "group": "distributed",
    "cluster": "cluster",
}
"""Used by the test itself or by another of its fixtures."""

NAMES = {"RankPool": "distributed"}
"""Read by the test's own lines."""

FILES = {
    "test_local.py": "distributed",
    "test_connected.py": "distributed",
    "test_bench_reshard.py": "distributed",
    "test_bench_gpu.py": "distributed",
    "test_bench_driver.py": "distributed",
    "test_bench_rollout.py": "distributed",
    "test_check_overlap.py": "distributed",
    "test_relay.py": "distributed",
    "test_run_ranks.py": "distributed",
    "test_session_watch.py": "distributed",
    "test_doctor.py": "distributed",
    "test_scripts.py": "distributed",
    "test_types.py": "types",
    "test_cli.py": "end_to_end",
    "test_check_judge.py": "end_to_end",
    "test_check_partial.py": "end_to_end",
    "test_check_streaming.py": "end_to_end",
}
"""Where ranks start in no fixture, or programs that load torch and vLLM; and where programs run from start to end."""

TESTS = {
    "test_nodes_and_doctor_report_it": "distributed",
    "test_plan_needs_nothing_but_a_config": "distributed",
    "test_a_job_is_checked_before_it_is_submitted": "distributed",
    "test_a_dry_run_tries_the_rewards": "distributed",
    "test_dry_run_prints_the_sizes_and_starts_nothing": "distributed",
    "test_a_bound_is_measured_with_and_without_correction": "distributed",
    "test_a_request_that_has_not_begun_is_the_new_weights_own": "distributed",
    "test_an_engine_that_dies_fails_every_request": "distributed",
    "test_a_tier_is_known_by_what_a_test_uses": "end_to_end",
    "test_the_last_lines_say_how_slurm_is_installed": "end_to_end",
    "test_additions_touch_what_contributing_says": "end_to_end",
}
"""The same, in files whose other tests start none."""


def needs_slurm(item: pytest.Item) -> bool:
    """Whether the test is left out where Slurm is not installed."""
    reasons = [str(mark.kwargs.get("reason")) for mark in item.iter_markers("skipif")]
    return any(reason.startswith("needs Slurm") for reason in reasons)


def folder_of(item: pytest.Item) -> str:
    """The folder of tests/ that a test is in."""
    tests = Path(__file__).parent
    return item.path.relative_to(tests).parts[0] if item.path.is_relative_to(tests) else ""


def tier_of(item: pytest.Item) -> str:
    own = next((tier for tier in TIERS if item.get_closest_marker(tier)), None)
    code = getattr(getattr(item, "function", None), "__code__", None)
    found = {
        FOLDERS.get(folder_of(item)),
        *(FIXTURES.get(name) for name in getattr(item, "fixturenames", ())),
        *(NAMES.get(name) for name in (code.co_names if code else ())),
        FILES.get(item.path.name),
        TESTS.get(getattr(item, "originalname", item.name)),
        "cluster" if item.get_closest_marker("slurm") else None,
    }
    return own or next((tier for tier in TIERS if tier in found), "fast")
