"""Pools of reward processes, and what is asked of them."""

import asyncio
import contextlib
import time
from dataclasses import replace

from megarl.config import RewardConfig
from megarl.processes.process_tree import descendants
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_pool import RewardPool
from megarl.rewards.scoring.reward_process import worker_settings
from megarl.types import Reward


@contextlib.contextmanager
def pool_of(*functions, num_workers=1, log_folder=None, notice=lambda text: None, **given):
    limits = {"timeout_seconds": 30.0, "wall_timeout_seconds": 60.0}
    settings = worker_settings(RewardConfig.model_validate({"functions": functions} | limits | given))
    pool = RewardPool(settings, num_workers=num_workers, log_folder=log_folder, notice=notice)
    try:
        yield pool
    finally:
        pool.close()


async def all_scored(pool, *texts, answer="answer"):
    return await asyncio.gather(*(pool.score(Sample(text, answer)) for text in texts))


async def score_all(pool, *texts, answer="answer"):
    return [summed(scored) for scored in await all_scored(pool, *texts, answer=answer)]


def summed(scored):
    """The reward without what each function said."""
    return replace(scored.reward, scores={})


async def failures_of(pool, *texts):
    return [scored.failure for scored in await all_scored(pool, *texts)]


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_of(pool):
    supervisors = [place.process.pid for place in pool._processes.places]
    return [*supervisors, *(process for supervisor in supervisors for process in descendants(supervisor))]


ZERO = Reward(0.0, False, False)
