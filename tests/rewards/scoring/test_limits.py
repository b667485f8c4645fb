"""Time limits of a completion: CPU seconds and seconds by the clock."""

import asyncio
import time

from megarl.rewards.scoring.calling import Sample
from megarl.types import Reward
from tests.child_processes import is_alive
from tests.rewards.pools import ZERO, all_scored, pool_of, score_all, summed, wait_until


async def test_a_hang_that_ignores_signals_is_killed_with_what_it_started(module, tmp_path):
    with pool_of(f"{module}:act", wall_timeout_seconds=1.0) as pool:
        assert await score_all(pool, "answer") == [Reward(1.0, True, True)]
        started = time.monotonic()
        (hung,) = await all_scored(pool, f"hang {tmp_path / 'pids'}")
        assert (summed(hung), hung.failure) == (ZERO, "timeout") and "reward.wall_timeout_seconds = 1" in hung.detail
        assert 1.0 <= time.monotonic() - started < 30.0
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        wait_until(lambda: not any(map(is_alive, pids)))
        assert await score_all(pool, "answer", "other") == [Reward(1.0, True, True), Reward(1.0, True, False)]


async def test_a_computation_that_never_returns_to_python_is_killed(module):
    with pool_of(f"{module}:act", timeout_seconds=0.3, wall_timeout_seconds=300.0) as pool:
        endless, right = await all_scored(pool, "power", "answer")
        assert (summed(endless), endless.failure) == (ZERO, "timeout")
        assert "reward.timeout_seconds = 0.3 CPU seconds" in endless.detail
        assert (summed(right), right.failure) == (Reward(1.0, True, True), None)


async def test_the_cpu_limit_counts_what_a_function_starts(module):
    with pool_of(f"{module}:act", timeout_seconds=0.3, wall_timeout_seconds=300.0) as pool:
        (endless,) = await all_scored(pool, "busy_child")
        assert endless.failure == "timeout" and "CPU seconds" in endless.detail


async def test_waiting_longer_than_the_cpu_limit_is_no_failure(module):
    """As on a machine where others have the CPU: the reward is that of a quiet one."""
    with pool_of(f"{module}:act", timeout_seconds=0.2) as pool:
        waited, right = await all_scored(pool, "sleep 0.6", "answer")
        assert (waited.failure, right.failure) == (None, None)
        assert summed(waited) == Reward(1.0, True, False)


async def test_the_clock_starts_when_the_process_is_ready(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text(
        f"""
import time
from pathlib import Path
from megarl.types import Reward

while not Path({str(tmp_path / "go")!r}).exists():
    time.sleep(0.01)

def one(completion_text, answer, *, correct_score):
    return Reward(1, 1, 1)
"""
    )
    monkeypatch.syspath_prepend(tmp_path)

    async def score_while_it_imports(pool):
        scoring = asyncio.ensure_future(pool.score(Sample("any", "answer")))
        await asyncio.sleep(0.95)
        (tmp_path / "go").touch()
        return await scoring

    # Made before its processes are ready: they wait for what only the test can do.
    with pool_of("slow_to_import:one", wall_timeout_seconds=0.9) as pool:
        assert (await score_while_it_imports(pool)).reward.score == 1.0
