"""Fixtures of the fault tests."""

from tests.faults.broken_runs import broken_runs

__all__ = ["broken_runs"]
