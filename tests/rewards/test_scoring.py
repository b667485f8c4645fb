import asyncio
import contextlib
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
from megarl.platform.processes import descendants
from megarl.rewards.calling import Sample
from megarl.rewards.scoring import RewardPool
from megarl.rewards.worker import RewardWorker, worker_settings
from megarl.types import ConfigError, PeerLostError, Reward

FUNCTIONS = """
import ctypes, json, multiprocessing, os, pickle, signal, socket, struct, subprocess, sys, time
from pathlib import Path
from megarl.types import Reward

def act(completion_text, answer, *, correct_score):
    text = completion_text
    verb, _, argument = text.partition(" ")
    if verb == "sleep":
        time.sleep(float(argument))
    elif verb == "meet":
        own, _, other = argument.partition(" ")
        Path(own).touch()
        while not Path(other).exists():
            time.sleep(0.01)
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
    elif verb == "fork":
        if os.fork() == 0:
            time.sleep(float(argument))
    elif verb == "detach":
        started = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(argument).write_text(f"{os.getpid()} {started.pid}")
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                Path(argument + "2").write_text(str(os.getpid()))
                time.sleep(600)
            os._exit(0)
    elif verb == "busy_child":
        subprocess.run([sys.executable, "-c", "while True: pass"])
    elif verb == "print":
        line = "x" * 1023
        for _ in range(int(argument)):
            print(line)
        os.write(2, b"written to stderr")
    elif verb == "reply":
        for descriptor in sockets():
            os.write(descriptor, eval(argument))
        time.sleep(600)
    elif verb == "inherited":
        listing = subprocess.run(["ls", "/proc/self/fd"], capture_output=True)
        return Reward(len(listing.stdout.split()), True, True)
    elif verb == "terminated":
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        child.terminate()
        child.join()
        os.kill(os.getpid(), signal.SIGTERM)
        return Reward(-child.exitcode, True, True)
    elif verb == "pid":
        return Reward(os.getpid(), True, True)
    elif verb == "return":
        return eval(argument)
    return Reward(correct_score, True, text == answer)

class Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)

def sockets():
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket"):
                yield int(name)
        except FileNotFoundError:
            pass

def framed(payload):
    return struct.pack("!I", len(payload)) + payload

def second(completion_text, answer):
    return Reward(0.25, completion_text != "ill", True)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "reward_functions_of_a_test.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "reward_functions_of_a_test"


@contextlib.contextmanager
def pool_of(*functions, num_workers=1, log_folder=None, notice=lambda text: None, **given):
    limits = {"timeout_seconds": 30.0, "wall_timeout_seconds": 60.0}
    settings = worker_settings(RewardConfig.model_validate({"functions": functions} | limits | given))
    pool = RewardPool(settings, num_workers=num_workers, log_folder=log_folder, notice=notice)
    try:
        yield pool
    finally:
        pool.close()


def all_scored(pool, *texts, answer="answer"):
    async def gather():
        return await asyncio.gather(*(pool.score(Sample(text, answer)) for text in texts))

    return asyncio.run(gather())


def score_all(pool, *texts, answer="answer"):
    return [summed(scored) for scored in all_scored(pool, *texts, answer=answer)]


def summed(scored):
    """The reward without what each function said."""
    return replace(scored.reward, scores={})


def failures_of(pool, *texts):
    return [scored.failure for scored in all_scored(pool, *texts)]


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


def processes_of(pool):
    keepers = [worker._keeper.pid for worker in pool._workers]
    return [*keepers, *(process for keeper in keepers for process in descendants(keeper))]


ZERO = Reward(0.0, False, False)


def test_scores_are_those_of_the_function_called_directly():
    with pool_of("boxed", num_workers=2, correct_score=10.0) as pool:
        texts = [rf"\boxed{{{number}/2}}" for number in range(40)]
        rewards = score_all(pool, *texts, answer="3.5")
        assert rewards == [Reward(10.0 * (number == 7), True, number == 7) for number in range(40)]
        bomb = all_scored(pool, r"\boxed{9^{9^{9}}}", r"\boxed{10000000!}", answer="7")
        assert [(summed(scored), scored.failure) for scored in bomb] == [(Reward(0.0, True, False), None)] * 2


def test_several_functions_are_summed_and_must_all_agree(module):
    with pool_of(f"{module}:act", f"{module}:second", correct_score=2.0) as pool:
        assert score_all(pool, "answer", "ill") == [Reward(2.25, True, True), Reward(2.25, False, False)]


OPINIONS = """
def steps(record, num_tokens, truncated, *, per_level=1.0):
    return None if truncated else per_level * record["level"] - num_tokens

def reward_fn(messages, answer):
    return messages[-1]["content"] == answer and messages[0]["role"] == "user"
"""


def test_functions_of_a_file_see_the_sample_and_are_weighed(tmp_path, monkeypatch):
    (tmp_path / "opinions.py").write_text(OPINIONS)
    monkeypatch.chdir(tmp_path)
    functions = (
        {"name": "opinions.py:steps", "weight": 0.5, "kwargs": {"per_level": 4}},
        "opinions.py:reward_fn",
    )
    sample = Sample("5", "5", ({"role": "user", "content": "2 + 3?"},), {"level": 3}, num_tokens=2)

    async def score(pool):
        return await asyncio.gather(pool.score(sample), pool.score(replace(sample, finish_reason="length", answer="6")))

    with pool_of(*functions) as pool:
        both, one = asyncio.run(score(pool))
    assert both.reward == Reward(0.5 * (4 * 3 - 2) + 1.0, True, True, {"steps": 10.0, "reward_fn": 1.0})
    assert one.reward == Reward(0.0, True, False, {"steps": None, "reward_fn": 0.0})


def test_a_message_that_json_cannot_hold_fails_its_sample_alone(tmp_path, monkeypatch):
    (tmp_path / "opinions.py").write_text(OPINIONS)
    monkeypatch.chdir(tmp_path)
    sound = Sample("5", "5", ({"role": "user", "content": "2 + 3?"},))
    image = replace(sound, prompt_messages=({"role": "user", "content": object()},))

    async def score(pool):
        return [await pool.score(sample) for sample in (sound, image, sound)]

    with pool_of("opinions.py:reward_fn") as pool:
        first, failed, again = asyncio.run(score(pool))
    assert failed.failure == "error" and "cannot be sent to the reward process" in failed.detail
    assert first == again and first.reward.score == 1.0 and first.failure is None


def test_a_hang_that_ignores_signals_is_killed_with_what_it_started(module, tmp_path):
    with pool_of(f"{module}:act", wall_timeout_seconds=1.0) as pool:
        assert score_all(pool, "answer") == [Reward(1.0, True, True)]
        started = time.monotonic()
        (hung,) = all_scored(pool, f"hang {tmp_path / 'pids'}")
        assert (summed(hung), hung.failure) == (ZERO, "timeout") and "reward.wall_timeout_seconds = 1" in hung.detail
        assert 1.0 <= time.monotonic() - started < 30.0
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        wait_until(lambda: not any(map(is_alive, pids)))
        assert score_all(pool, "answer", "other") == [Reward(1.0, True, True), Reward(1.0, True, False)]


def test_a_computation_that_never_returns_to_python_is_killed(module):
    with pool_of(f"{module}:act", timeout_seconds=0.3, wall_timeout_seconds=300.0) as pool:
        endless, right = all_scored(pool, "power", "answer")
        assert (summed(endless), endless.failure) == (ZERO, "timeout")
        assert "reward.timeout_seconds = 0.3 CPU seconds" in endless.detail
        assert (summed(right), right.failure) == (Reward(1.0, True, True), None)


def test_the_cpu_limit_counts_what_a_function_starts(module):
    with pool_of(f"{module}:act", timeout_seconds=0.3, wall_timeout_seconds=300.0) as pool:
        (endless,) = all_scored(pool, "busy_child")
        assert endless.failure == "timeout" and "CPU seconds" in endless.detail


def test_waiting_longer_than_the_cpu_limit_is_no_failure(module):
    """As on a machine where others have the CPU: the reward is that of a quiet one."""
    with pool_of(f"{module}:act", timeout_seconds=0.2) as pool:
        waited, right = all_scored(pool, "sleep 0.6", "answer")
        assert (waited.failure, right.failure) == (None, None)
        assert summed(waited) == Reward(1.0, True, False)


def test_a_function_that_forks_shifts_no_later_score(module):
    with pool_of(f"{module}:act", wall_timeout_seconds=30.0) as pool:
        texts = ["fork 0", "fork 0.2", *(f"return Reward({n}, True, True)" for n in range(100))]
        rewards = score_all(pool, *texts)
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
def test_a_reply_that_is_none_is_refused_and_runs_nothing(module, tmp_path, reply):
    with pool_of(f"{module}:act", wall_timeout_seconds=30.0) as pool:
        started = time.monotonic()
        forged, right = all_scored(pool, "reply " + reply.format(path=str(tmp_path / "ran")), "answer")
        assert time.monotonic() - started < 30.0
        assert (forged.reward, forged.failure) == (ZERO, "error") and "the reward process sent" in forged.detail
        assert summed(right) == Reward(1.0, True, True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("reply", ["b'x'", "framed(bytes(100))[:50]"])
def test_the_limit_holds_for_all_of_a_reply(module, reply):
    with pool_of(f"{module}:act", wall_timeout_seconds=1.0) as pool:
        started = time.monotonic()
        assert failures_of(pool, f"reply {reply}", "answer") == ["timeout", None]
        assert time.monotonic() - started < 30.0


def test_what_functions_print_goes_to_a_log_that_stays_small(module, tmp_path, capfd):
    with pool_of(f"{module}:act", log_folder=tmp_path / "logs", wall_timeout_seconds=300.0) as pool:
        assert failures_of(pool, "answer") == [None]
        assert not (tmp_path / "logs").exists(), "nothing was printed"
        assert failures_of(pool, "print 1") == [None]
        log = tmp_path / "logs/reward_0000.log"
        wait_until(lambda: log.exists() and log.read_text() == "x" * 1023 + "\nwritten to stderr")
        assert failures_of(pool, "print 20000", "die", "print 20000") == [None, "error", None]
    assert (1 << 20) <= log.stat().st_size < (1 << 20) + 100
    assert log.read_text().count("[more is not kept") == 1
    assert capfd.readouterr() == ("", "")


def test_functions_start_processes_without_the_connection(module):
    with pool_of(f"{module}:act") as pool:
        # Standard streams and the listing's own.
        assert score_all(pool, "inherited") == [Reward(4.0, True, True)]


def test_a_signal_to_all_processes_of_a_job_ends_no_reward_process(module):
    with pool_of(f"{module}:act") as pool:
        assert score_all(pool, "terminated") == [Reward(float(signal.SIGTERM), True, True)]
        processes = processes_of(pool)
        assert len(processes) == 2
        for process in processes:
            os.kill(process, signal.SIGTERM)
        assert failures_of(pool, "answer") == [None]


@pytest.mark.parametrize("ending", ["die", "close"])
def test_what_leaves_the_process_group_is_killed_too(module, tmp_path, ending):
    with pool_of(f"{module}:act", wall_timeout_seconds=30.0) as pool:
        path = tmp_path / "pids"
        assert failures_of(pool, f"detach {path}") == [None]
        wait_until(lambda: Path(f"{path}2").exists() and Path(f"{path}2").read_text())
        pids = [int(pid) for pid in (path.read_text() + " " + Path(f"{path}2").read_text()).split()]
        assert len(pids) == 3 and all(map(is_alive, pids))
        if ending == "die":
            assert failures_of(pool, "die") == ["error"]
            assert not any(map(is_alive, pids))
    assert not any(map(is_alive, pids))


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
        "return Reward(1e300, True, True)",
        "return Reward(-1.1e6, True, True)",
        "return Reward(True, True, True)",
        "return Reward(None, True, True)",
        "return Reward(1j, True, True)",
        "return Reward(1.0, 'False', True)",
        "return Reward(1.0, True, None)",
        "return [1.0]",
        "return float('nan')",
        "return {'score': 1.0}",
    ],
)
def test_a_failure_is_told_and_scores_zero(module, text):
    with pool_of(f"{module}:act") as pool:
        failed, right = all_scored(pool, text, "answer")
        assert (summed(failed), failed.failure) == (ZERO, "error")
        assert failed.detail.startswith(f"{module}:act: ")
        assert summed(right) == Reward(1.0, True, True)


@pytest.mark.parametrize(
    ("text", "told"), [("exit", "SystemExit: 3"), ("die", "ended with exit code 3"), ("crash", "killed by SIGSEGV")]
)
def test_the_end_of_a_process_is_told(module, text, told):
    with pool_of(f"{module}:act") as pool:
        (failed,) = all_scored(pool, text)
        assert told in failed.detail


def test_numbers_of_other_types_are_scores(module):
    with pool_of(f"{module}:act") as pool:
        texts = (
            "return Reward(__import__('numpy').float32(0.5), __import__('numpy').bool_(True), 0)",
            "return Reward(__import__('fractions').Fraction(1, 2), 1, False)",
            "return Reward(1e6, True, True)",
        )
        expected = [Reward(0.5, True, False), Reward(0.5, True, False), Reward(1e6, True, True)]
        assert score_all(pool, *texts) == expected


def test_a_text_that_is_no_unicode_is_scored_as_it_is(module):
    with pool_of(f"{module}:act") as pool:
        assert score_all(pool, "\ud800 \x00 \U0001f600", answer="\ud800 \x00 \U0001f600") == [Reward(1.0, True, True)]


def test_the_first_failure_of_each_kind_is_noticed_with_an_example(module):
    notices = []
    with pool_of(f"{module}:act", wall_timeout_seconds=1.0, notice=notices.append) as pool:
        failures = failures_of(pool, "raise first", "raise second", "sleep 60", "raise third")
        assert failures == ["error", "error", "timeout", "error"]
    error, timeout = notices
    assert "reward/errors" in error and "ValueError: first" in error and "in act" in error
    assert "reward/timeouts" in timeout and "reward.wall_timeout_seconds = 1" in timeout


def test_the_clock_starts_when_the_process_is_ready(tmp_path, monkeypatch):
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
        assert asyncio.run(score_while_it_imports(pool)).reward.score == 1.0


def test_workers_run_at_once_one_completion_each_and_stay(module, tmp_path):
    with pool_of(f"{module}:act", num_workers=2) as pool:
        one, other = tmp_path / "one", tmp_path / "other"
        met = score_all(pool, f"meet {one} {other}", f"meet {other} {one}")
        assert met == [Reward(1.0, True, False)] * 2
        started = time.monotonic()
        score_all(pool, *["sleep 0.25"] * 4)
        assert time.monotonic() - started >= 0.5
        pids = {reward.score for _ in range(5) for reward in score_all(pool, "pid", "pid")}
        assert 1 <= len(pids) <= 2


def test_the_event_loop_stays_free(module, tmp_path):
    async def meet(pool):
        scoring = asyncio.ensure_future(pool.score(Sample(f"meet {tmp_path / 'one'} {tmp_path / 'other'}", "answer")))
        while not (tmp_path / "one").exists():
            await asyncio.sleep(0.01)
        (tmp_path / "other").touch()
        return await scoring

    with pool_of(f"{module}:act") as pool:
        assert asyncio.run(meet(pool)).failure is None


def test_unknown_and_unimportable_functions_are_errors_of_the_recipe():
    with pool_of("boxd") as pool, pytest.raises(ConfigError, match="Did you mean 'boxed'"):
        score_all(pool, "any")
    with pool_of("no_such_module_anywhere:score") as pool:
        for _ in range(2):
            with pytest.raises(ConfigError, match="cannot import no_such_module_anywhere"):
                score_all(pool, "any")


def test_an_import_that_hangs_is_ended(tmp_path, monkeypatch):
    (tmp_path / "hangs_on_import.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings = worker_settings(RewardConfig.model_validate({"functions": ("hangs_on_import:score",)}))
    worker = RewardWorker(replace(settings, start_timeout_seconds=0.5))
    try:
        with pytest.raises(ConfigError, match=r"importing hangs_on_import:score took more than 0\.5 s"):
            worker.ask(Sample("any", ""))
    finally:
        worker.close()


def test_only_reward_processes_search_the_current_folder_and_only_where_it_is_named(tmp_path, monkeypatch):
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
        assert score_all(pool, "any") == [Reward(1.0, True, True)]
    assert sys.path == before and "mine_in_a_test" not in sys.modules


def test_a_process_that_ends_while_it_starts_is_named(tmp_path, monkeypatch):
    (tmp_path / "ends_on_import.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        pool_of("ends_on_import:score") as pool,
        pytest.raises(PeerLostError, match="ends_on_import:score ended with exit code 1 while it started"),
    ):
        score_all(pool, "any")


def test_close_is_quick_idempotent_and_leaves_no_process(module, tmp_path):
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
        pids = [int(reward.score) for reward in score_all(pool, "pid", "pid")]
        started = time.monotonic()
        outcomes = asyncio.run(close_amid_scoring(pool))
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
        from megarl.rewards.calling import Sample
        from megarl.rewards.scoring import RewardPool
        from megarl.rewards.worker import worker_settings

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
