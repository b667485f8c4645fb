"""What goes over the connection to a reward process, and beside it."""

import time

import pytest

from megarl.types import Reward
from tests.rewards.pools import ZERO, all_scored, failures_of, pool_of, score_all, summed, wait_until


async def test_a_function_that_forks_shifts_no_later_score(module):
    with pool_of(f"{module}:act", wall_timeout_seconds=30.0) as pool:
        texts = ["fork 0", "fork 0.2", *(f"return Reward({n}, True, True)" for n in range(100))]
        rewards = await score_all(pool, *texts)
        assert [reward.score for reward in rewards] == [1.0, 1.0, *range(100)]


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param("framed(pickle.dumps(Command({path!r})))", id="pickle"),
        pytest.param("framed(b'[1, 2]')", id="no object"),
        pytest.param('framed(b\'{{"id": 1, "score": "1"}}\')', id="other types"),
        pytest.param('framed(b\'{{"id": 99, "score": 1.0}}\')', id="another id"),
        pytest.param("framed(b'[' * 60000)", id="deep"),
        pytest.param("struct.pack('!I', (1 << 32) - 1)", id="4 GiB announced"),
    ],
)
async def test_a_reply_that_is_none_is_refused_and_runs_nothing(module, tmp_path, reply):
    with pool_of(f"{module}:act", wall_timeout_seconds=30.0) as pool:
        started = time.monotonic()
        forged, right = await all_scored(pool, "reply " + reply.format(path=str(tmp_path / "ran")), "answer")
        assert time.monotonic() - started < 30.0
        assert (forged.reward, forged.failure) == (ZERO, "error") and "the reward process sent" in forged.detail
        assert summed(right) == Reward(1.0, True, True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("reply", ["b'x'", "framed(bytes(100))[:50]"])
async def test_the_limit_holds_for_all_of_a_reply(module, reply):
    with pool_of(f"{module}:act", wall_timeout_seconds=1.0) as pool:
        started = time.monotonic()
        assert await failures_of(pool, f"reply {reply}", "answer") == ["timeout", None]
        assert time.monotonic() - started < 30.0


async def test_what_functions_print_goes_to_a_log_that_stays_small(module, tmp_path, capfd):
    with pool_of(f"{module}:act", log_folder=tmp_path / "logs", wall_timeout_seconds=300.0) as pool:
        assert await failures_of(pool, "answer") == [None]
        assert not (tmp_path / "logs").exists(), "nothing was printed"
        assert await failures_of(pool, "print 1") == [None]
        log = tmp_path / "logs/reward_0000.log"
        wait_until(lambda: log.exists() and log.read_text() == "x" * 1023 + "\nwritten to stderr")
        assert await failures_of(pool, "print 20000", "die", "print 20000") == [None, "error", None]
    assert (1 << 20) <= log.stat().st_size < (1 << 20) + 100
    assert log.read_text().count("[further output is dropped") == 1
    assert capfd.readouterr() == ("", "")


async def test_functions_start_processes_without_the_connection(module):
    with pool_of(f"{module}:act") as pool:
        # Standard streams and the listing's own.
        assert await score_all(pool, "inherited") == [Reward(4.0, True, True)]
