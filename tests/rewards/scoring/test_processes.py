"""How reward processes begin and end."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config import RewardConfig
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_pool import RewardPool
from megarl.rewards.scoring.reward_process import worker_settings
from megarl.types import ConfigError, PeerLostError, Reward
from tests.child_processes import is_alive
from tests.rewards.pools import all_scored, failures_of, pool_of, processes_of, score_all, wait_until


async def test_a_signal_to_all_processes_of_a_job_ends_no_reward_process(module):
    with pool_of(f"{module}:act") as pool:
        assert await score_all(pool, "terminated") == [Reward(float(signal.SIGTERM), True, True)]
        processes = processes_of(pool)
        assert len(processes) == 2
        for process in processes:
            os.kill(process, signal.SIGTERM)
        assert await failures_of(pool, "answer") == [None]


@pytest.mark.parametrize("ending", ["die", "close"])
async def test_what_leaves_the_process_group_is_killed_too(module, tmp_path, ending):
    with pool_of(f"{module}:act", wall_timeout_seconds=30.0) as pool:
        path = tmp_path / "pids"
        assert await failures_of(pool, f"detach {path}") == [None]
        wait_until(lambda: Path(f"{path}2").exists() and Path(f"{path}2").read_text())
        pids = [int(pid) for pid in (path.read_text() + " " + Path(f"{path}2").read_text()).split()]
        assert len(pids) == 3 and all(map(is_alive, pids))
        if ending == "die":
            assert await failures_of(pool, "die") == ["error"]
            assert not any(map(is_alive, pids))
    assert not any(map(is_alive, pids))


async def test_a_score_that_nobody_waits_for_any_more_ends_its_process(module, tmp_path):
    path = tmp_path / "pids"

    async def drive(pool):
        hanging = asyncio.create_task(pool.score(Sample(f"hang {path}", "answer")))
        queued = asyncio.create_task(pool.score(Sample(f"hang {path}2", "answer")))
        while not (path.exists() and path.read_text()):
            await asyncio.sleep(0.01)
        hanging.cancel()
        queued.cancel()
        assert await asyncio.gather(hanging, queued, return_exceptions=True)
        return await pool.score(Sample("answer", "answer"))

    with pool_of(f"{module}:act", wall_timeout_seconds=600.0) as pool:
        assert (await drive(pool)).failure is None
        assert not any(is_alive(int(pid)) for pid in path.read_text().split())
        assert not Path(f"{path}2").exists()


@pytest.mark.parametrize(
    ("text", "error_text"),
    [("exit", "SystemExit: 3"), ("die", "ended with exit code 3"), ("crash", "killed by SIGSEGV")],
)
async def test_the_end_of_a_process_is_told(module, text, error_text):
    with pool_of(f"{module}:act") as pool:
        (failed,) = await all_scored(pool, text)
        assert error_text in failed.detail


async def test_a_completion_whose_process_is_killed_from_outside_is_scored_once_more(tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    (tmp_path / "killed_once.py").write_text(
        "import os, pathlib, signal\n"
        f"mark = pathlib.Path({str(mark)!r})\n"
        "def score(completion_text):\n"
        "    if completion_text != 'fine' and not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    notices = []
    with pool_of("killed_once:score", notice=notices.append) as pool:
        assert [scored.failure for scored in await all_scored(pool, "fine", "killed")] == [None, None]
        assert await failures_of(pool, "killed") == [None]
        assert pool.metrics() == {"reward/lost_processes": 1.0} and pool.metrics() == {}
    assert mark.exists() and len(notices) == 1 and "reward/lost_processes" in notices[0]


async def test_an_invalid_answer_after_a_lost_process_counts_that_process(tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    (tmp_path / "killed_then_wrong.py").write_text(
        "import json, os, pathlib, signal, struct, time\n"
        f"mark = pathlib.Path({str(mark)!r})\n"
        "def score(completion_text):\n"
        "    if not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    reply = json.dumps({'id': 1, 'score': '1'}).encode()\n"
        "    for name in os.listdir('/proc/self/fd'):\n"
        "        path = f'/proc/self/fd/{name}'\n"
        "        if os.path.exists(path) and os.readlink(path).startswith('socket'):\n"
        "            os.write(int(name), struct.pack('!I', len(reply)) + reply)\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pool_of("killed_then_wrong:score") as pool:
        (failed,) = await all_scored(pool, "any")
        assert pool.metrics() == {"reward/lost_processes": 1.0}
    assert "not a valid reward" in failed.detail


async def test_a_killed_process_is_replaced_at_once_and_taken_last(module):
    with pool_of(f"{module}:act", num_workers=2) as pool:
        before = {reward.score for reward in await score_all(pool, "pid", "pid")}
        assert len(before) == 2 and await failures_of(pool, "die") == ["error"]
        # Two supervisors and their children run, before anybody asks for the second place.
        assert len(processes_of(pool)) >= 3
        assert (await score_all(pool, "pid"))[0].score in before
        assert len({reward.score for reward in await score_all(pool, "pid", "pid")} - before) == 1


async def test_a_process_that_is_killed_while_it_imports_is_started_once_more(tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    (tmp_path / "killed_on_import.py").write_text(
        "import os, pathlib, signal\n"
        f"mark = pathlib.Path({str(mark)!r})\n"
        "if not mark.exists():\n"
        "    mark.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def score(completion_text):\n"
        "    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pool_of("killed_on_import:score") as pool:
        assert await score_all(pool, "any") == [Reward(1.0, True, True)] and mark.exists()


async def test_an_import_that_hangs_is_ended(tmp_path, monkeypatch):
    (tmp_path / "hangs_on_import.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = worker_settings(RewardConfig.model_validate({"functions": ("hangs_on_import:score",)}))
    pool = RewardPool(replace(settings, start_timeout_seconds=0.5), num_workers=1)
    try:
        with pytest.raises(ConfigError, match=r"importing hangs_on_import:score took more than 0\.5 s"):
            await score_all(pool, "any")
    finally:
        pool.close()


async def test_only_reward_processes_search_the_current_folder_and_only_where_it_is_named(tmp_path, monkeypatch):
    (tmp_path / "brotli.py").write_text("raise SystemExit('this was not to be imported')\n")
    (tmp_path / "mine_in_a_test.py").write_text(
        "from megarl.types import Reward\ndef one(completion_text): return Reward(1.0, True, True)\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    folder = str(tmp_path)
    assert (
        worker_settings(RewardConfig.model_validate({"functions": ("mine_in_a_test:one",)})).search_path[-1] == folder
    )
    for name in ("boxed", "no_such_module:one", "json:loads"):
        assert folder not in worker_settings(RewardConfig.model_validate({"functions": (name,)})).search_path
    with pool_of("mine_in_a_test:one") as pool:
        assert await score_all(pool, "any") == [Reward(1.0, True, True)]
    assert sys.path == before and "mine_in_a_test" not in sys.modules


async def test_a_process_that_ends_while_it_starts_is_named(tmp_path, monkeypatch):
    (tmp_path / "ends_on_import.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        pool_of("ends_on_import:score") as pool,
        pytest.raises(PeerLostError, match="ends_on_import:score ended with exit code 1 while it started"),
    ):
        await score_all(pool, "any")


async def test_close_is_quick_idempotent_and_leaves_no_process(module, tmp_path):
    async def close_amid_scoring(pool):
        scores = [
            asyncio.ensure_future(pool.score(Sample(text, "")))
            for text in (f"hang {tmp_path / 'pids'}", "sleep 60", "pid")
        ]
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
            await asyncio.sleep(0.02)
        pool.close()
        return await asyncio.gather(*scores, return_exceptions=True)

    with pool_of(f"{module}:act", num_workers=2) as pool:
        pids = [int(reward.score) for reward in await score_all(pool, "pid", "pid")]
        started = time.monotonic()
        outcomes = await close_amid_scoring(pool)
        assert time.monotonic() - started < 30.0
        assert all(isinstance(outcome, PeerLostError | asyncio.CancelledError) for outcome in outcomes)
        pids += [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert not any(map(is_alive, pids))
        pool.close()


def test_closing_before_the_processes_are_up():
    with pool_of("boxed", num_workers=2) as pool:
        processes = processes_of(pool)
        assert len(processes) >= 2
    assert not any(map(is_alive, processes))


def test_processes_die_with_a_parent_that_is_killed(module, tmp_path):
    script = tmp_path / "driver_of_a_test.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from megarl.config import RewardConfig
        from megarl.rewards.scoring.calling import Sample
        from megarl.rewards.scoring.reward_pool import RewardPool
        from megarl.rewards.scoring.reward_process import worker_settings

        async def main():
            settings = worker_settings(RewardConfig.model_validate(
                {{"functions": ["{module}:act"], "timeout_seconds": 600.0}}
            ))
            pool = RewardPool(settings, num_workers=2)
            pids = [int((await pool.score(Sample("pid", ""))).reward.score) for _ in range(2)]
            print(*pids, flush=True)
            await asyncio.gather(pool.score(Sample("power", "")), pool.score(Sample("sleep 600", "")))

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
