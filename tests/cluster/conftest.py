"""Fixtures of the tests that start ranks of their own."""

import os
from pathlib import Path

import pytest

from megarl.processes.fork_server import end_fork_servers
from tests.shared_fork_servers import SHARED


@pytest.fixture
def own_fork_servers(monkeypatch):
    """As outside of tests: a driver shares its fork servers with no other."""
    monkeypatch.delenv(SHARED)


@pytest.fixture
def worker_module(monkeypatch, distributed_tier):
    """Ranks import `probe` as the driver does."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def nothing_left():
    """No child process of a test, not even a zombie, and no descriptor outlives it."""

    def holdings():
        children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
        return {pid for pids in children for pid in pids}, len(os.listdir("/proc/self/fd"))

    # A pool of ranks that other tests go on with stays.
    end_fork_servers(is_all=False)
    children, num_descriptors = holdings()
    yield
    end_fork_servers(is_all=False)
    left, num_left = holdings()
    # A child of an earlier test may end during this one.
    assert not left - children and num_left <= num_descriptors
