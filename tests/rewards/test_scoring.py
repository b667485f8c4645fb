import asyncio
import contextlib
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from megarl.rewards.scoring import RewardPool
from megarl.types import ConfigError, PeerLostError, Reward

FUNCTIONS = """
import ctypes, os, signal, subprocess, sys, time
from pathlib import Path
from megarl.types import Reward

def act(text, answer, *, correct_score):
    verb, _, argument = text.partition(" ")
    if verb == "sleep":
        time.sleep(float(argument))
    elif verb == "hang":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        Path(argument).write_text(f"{os.getpid()} {child.pid}")
        while True:
            time.sleep(1)
    elif verb == "power":
        9 ** 9 ** 9
    elif verb == "raise":
        raise ValueError(argument)
    elif verb == "exit":
        sys.exit(3)
    elif verb == "die":
        os._exit(3)
    elif verb == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif verb == "fill":
        bytearray(8 << 30)
    elif verb == "pid":
        return Reward(os.getpid(), True, True)
    elif verb == "return":
        return eval(argument)
    return Reward(correct_score, True, text == answer)

def second(text, answer, *, correct_score):
    return Reward(0.25, text != "ill", True)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "reward_functions_of_a_test.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "reward_functions_of_a_test"


@contextlib.contextmanager
def pool_of(*functions, num_workers=1, timeout_seconds=30.0, correct_score=1.0):
    pool = RewardPool(functions, num_workers=num_workers, timeout_seconds=timeout_seconds, correct_score=correct_score)
    try:
        yield pool
    finally:
        pool.close()


def score_all(pool, *texts, answer="answer"):
    async def gather():
        return await asyncio.gather(*(pool.score(text, answer) for text in texts))

    return asyncio.run(gather())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


ZERO = Reward(0.0, False, False)


def test_scores_are_those_of_the_function_called_directly():
    with pool_of("boxed", num_workers=2, correct_score=10.0) as pool:
        texts = [rf"\boxed{{{number}/2}}" for number in range(40)]
        rewards = score_all(pool, *texts, answer="3.5")
        assert rewards == [Reward(10.0 * (number == 7), True, number == 7) for number in range(40)]
        bomb = score_all(pool, r"\boxed{9^{9^{9}}}", r"\boxed{10000000!}", answer="7")
        assert bomb == [Reward(0.0, True, False)] * 2
        assert (pool.num_timeouts, pool.num_errors) == (0, 0)


def test_several_functions_are_summed_and_must_all_agree(module):
    with pool_of(f"{module}:act", f"{module}:second", correct_score=2.0) as pool:
        assert score_all(pool, "answer", "ill") == [Reward(2.25, True, True), Reward(2.25, False, False)]


def test_a_hang_that_ignores_signals_is_killed_with_what_it_started(module, tmp_path):
    with pool_of(f"{module}:act", timeout_seconds=1.0) as pool:
        assert score_all(pool, "answer") == [Reward(1.0, True, True)]
        started = time.monotonic()
        assert score_all(pool, f"hang {tmp_path / 'pids'}") == [ZERO]
        assert 1.0 <= time.monotonic() - started < 5.0
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        wait_until(lambda: not any(map(is_alive, pids)))
        assert score_all(pool, "answer", "other") == [Reward(1.0, True, True), Reward(1.0, True, False)]
        assert (pool.num_timeouts, pool.num_errors) == (1, 0)


def test_a_computation_that_never_returns_to_python_is_killed(module):
    with pool_of(f"{module}:act", timeout_seconds=1.0) as pool:
        assert score_all(pool, "power", "answer") == [ZERO, Reward(1.0, True, True)]
        assert (pool.num_timeouts, pool.num_errors) == (1, 0)


@pytest.mark.parametrize(
    "text",
    [
        "raise it",
        "exit",
        "die",
        "crash",
        "fill",
        "return Reward(float('nan'), True, True)",
        "return Reward(float('inf'), True, True)",
        "return Reward('1', True, True)",
        "return Reward(10 ** 400, True, True)",
        "return None",
        "return 1.0",
    ],
)
def test_a_failure_is_counted_and_scores_zero(module, text):
    with pool_of(f"{module}:act") as pool:
        assert score_all(pool, text, "answer") == [ZERO, Reward(1.0, True, True)]
        assert (pool.num_timeouts, pool.num_errors) == (0, 1)


def test_the_first_failure_is_logged_with_its_traceback(module, caplog):
    with pool_of(f"{module}:act") as pool:
        score_all(pool, "raise first", "raise second")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ValueError: first" in caplog.text and "in act" in caplog.text


def test_the_clock_starts_when_the_process_is_ready(tmp_path, monkeypatch):
    source = "import time\nfrom megarl.types import Reward\ntime.sleep(2)\n"
    (tmp_path / "slow_to_import.py").write_text(
        source + "def one(text, answer, *, correct_score): return Reward(1, 1, 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    started = time.monotonic()
    with pool_of("slow_to_import:one", timeout_seconds=1.0) as pool:
        assert time.monotonic() - started < 1.0
        assert score_all(pool, "any") == [Reward(1.0, True, True)]
        assert pool.num_timeouts == 0


def test_workers_run_at_once_one_completion_each_and_stay(module):
    with pool_of(f"{module}:act", num_workers=2) as pool:
        score_all(pool, "sleep 0.2", "sleep 0.2")
        started = time.monotonic()
        score_all(pool, *["sleep 0.5"] * 4)
        assert 1.0 <= time.monotonic() - started < 1.8
        pids = {reward.score for _ in range(5) for reward in score_all(pool, "pid", "pid")}
        assert 1 <= len(pids) <= 2


def test_the_event_loop_stays_free(module):
    async def count_while(awaitable):
        task, ticks = asyncio.ensure_future(awaitable), 0
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    with pool_of(f"{module}:act") as pool:
        score_all(pool, "answer")
        assert asyncio.run(count_while(pool.score("sleep 0.5", "answer"))) > 10


def test_unknown_and_unimportable_functions_are_errors_of_the_recipe():
    with pool_of("boxd") as pool, pytest.raises(ConfigError, match="Did you mean 'boxed'"):
        score_all(pool, "any")
    with pool_of("no_such_module_anywhere:score") as pool:
        for _ in range(2):
            with pytest.raises(ConfigError, match="cannot import no_such_module_anywhere"):
                score_all(pool, "any")


def test_a_process_that_ends_while_it_starts_is_named(tmp_path, monkeypatch):
    (tmp_path / "ends_on_import.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        pool_of("ends_on_import:score") as pool,
        pytest.raises(PeerLostError, match="ends_on_import:score did not start"),
    ):
        score_all(pool, "any")


def test_close_is_quick_idempotent_and_leaves_no_process(module, tmp_path):
    async def close_amid_scoring(pool):
        scores = [
            asyncio.ensure_future(pool.score(text, "")) for text in (f"hang {tmp_path / 'pids'}", "sleep 60", "pid")
        ]
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
            await asyncio.sleep(0.02)
        pool.close()
        return await asyncio.gather(*scores, return_exceptions=True)

    with pool_of(f"{module}:act", num_workers=2) as pool:
        pids = [int(reward.score) for reward in score_all(pool, "pid", "pid")]
        started = time.monotonic()
        outcomes = asyncio.run(close_amid_scoring(pool))
        assert time.monotonic() - started < 10.0
        assert all(isinstance(outcome, PeerLostError | asyncio.CancelledError) for outcome in outcomes)
        pids += [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        wait_until(lambda: not any(map(is_alive, pids)))
        assert (pool.num_timeouts, pool.num_errors) == (0, 0)
        pool.close()


def test_closing_before_the_processes_are_up():
    with pool_of("boxed", num_workers=2) as pool:
        processes = [worker._process for worker in pool._workers]
    assert all(process.exitcode == -signal.SIGKILL for process in processes)


def test_processes_die_with_a_parent_that_is_killed(module, tmp_path):
    script = tmp_path / "driver_of_a_test.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from megarl.rewards.scoring import RewardPool

        async def main():
            pool = RewardPool(["{module}:act"], num_workers=2, timeout_seconds=600.0, correct_score=1.0)
            print(int((await pool.score("pid", "")).score), int((await pool.score("pid", "")).score), flush=True)
            await asyncio.gather(pool.score("power", ""), pool.score("sleep 600", ""))

        if __name__ == "__main__":
            asyncio.run(main())
        """)
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            pids = [int(pid) for pid in driver.stdout.readline().split()]
            time.sleep(0.3)
            assert len(pids) == 2 and all(map(is_alive, pids))
        finally:
            driver.kill()
    wait_until(lambda: not any(map(is_alive, pids)))
