"""A worker group against ranks that raise, die, hang: every failure is bounded, named, and leaves nothing."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest

from megarl import faults
from megarl.cluster.calls import group_end
from megarl.cluster.calls.deadlines import Deadlines
from megarl.cluster.calls.group_ranks import PartOfRun
from megarl.cluster.calls.rank_errors import RankFailedError
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.launchers import run_nodes as launchers
from megarl.cluster.launchers.local import LocalAgent
from megarl.cluster.launchers.run_nodes import importing_early, start_nodes, start_ranks
from megarl.cluster.ranks.rank_handle import log_tail
from megarl.config import ClusterConfig
from megarl.config.parallel import ParallelConfig
from megarl.processes.launcher import LaunchedProgram
from megarl.types import ConfigError, DataError, DiskFullError, PeerLostError
from tests.child_processes import is_alive
from tests.cluster.started import shared_imports, started
from tools.local_group import LocalGroup

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("worker_module", "nothing_left")]

NOTICED_SECONDS = 30
"""Ranks that nobody ends sleep twice as long."""


async def patience(group):
    """Seconds within which ranks that are well answer, also on a busy machine: many times what a call takes."""
    begun = time.monotonic()
    for _ in range(5):
        await group.call("product", 1)
    return min(20.0, max(0.5, 10 * (time.monotonic() - begun)))


@pytest.mark.usefixtures("own_fork_servers")
async def test_call_and_scatter_answer_by_rank():
    async with started(3, kwargs={"scale": 7}, environment={"RIVER": "Aare"}) as group:
        assert await group.call("product", 5, plus=1) == [(0, 36), (1, 71), (2, 106)]
        assert await group.scatter("product", [2, 3, 5]) == [(0, 14), (1, 42), (2, 105)]
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RIVER"]
        expected = [[str(r), str(r), "3", "3", "Aare"] for r in range(3)]
        assert await group.call("environment", names) == expected
        with pytest.raises(ValueError, match="one per rank: got 2"):
            await group.scatter("product", [2, 3])
        pids = await group.call("pid")
        assert await group.call("session") == [(pid, pid) for pid in pids]  # a terminal's ctrl-c does not reach them
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
        assert all(b"megarl.processes.fork_server_main" in command for command in commands)
        names = [Path(f"/proc/{pid}/comm").read_text() for pid in pids]
        assert names == [f"megarl rank {rank}\n" for rank in range(3)]


async def test_ranks_use_the_agent_that_imports_early(tmp_path):
    cluster = ClusterConfig(device="cpu", ranks_per_node=2)
    with importing_early(cluster):
        early = launchers._early.agent
        assert early is not None
        ranks = await start_ranks(cluster, tmp_path)
        assert [place.agent.introduction.pid for place in ranks.trainers.places] == [early.pid] * 2
        await ranks.close()
    with pytest.raises(ConfigError), importing_early(cluster):
        unused = launchers._early.agent
        raise ConfigError("a check failed")
    assert unused is not None and not is_alive(unused.pid)


@pytest.mark.parametrize(
    ("sizes", "expected"), [({}, False), ({"dp": 2}, False), ({"tp": 2}, True), ({"cp": 2}, True), ({"etp": 2}, True)]
)
async def test_only_trainers_that_split_layers_order_their_kernels(sizes, expected, tmp_path, monkeypatch):
    asked: dict[int, bool] = {}

    async def record(nodes, logs, part, *_, orders_kernels=False):
        asked[part.first_rank] = orders_kernels
        group = create_autospec(WorkerGroup, instance=True)
        group.part = part
        return group

    monkeypatch.setattr(launchers.RunNodes, "_fork_group", record)
    parallel = ParallelConfig(**{"tp": 1, "pp": 1, "dp": 1, "rollout_tp": 1, "rollout_ranks": 1, **sizes})
    cluster = ClusterConfig(device="cpu", ranks_per_node=3)
    nodes = await start_nodes(cluster, tmp_path)
    await nodes.fork_ranks(tmp_path, 2, [1], trainer=parallel)
    assert asked == {0: expected, 2: False}
    await nodes.fork_ranks(tmp_path, 2, [1])
    assert asked == {0: False, 2: False}
    await nodes.close()


async def test_a_fault_of_a_test_is_set_in_the_rank_that_it_names(tmp_path, monkeypatch):
    """Ranks are counted over the whole run, of which this group is the ranks 4 and 5."""
    monkeypatch.setenv(faults.VARIABLE, "update:5:any:raise")
    group = LocalGroup(2, PartOfRun(4, 6, bytes(32)), imports=shared_imports())
    try:
        await group.start("probe:Probe", {}, log_folder=tmp_path)
        first, second = await group.call("reach", "update")
        assert first is None and "update:5:any:raise" in second
    finally:
        await group.close()


async def test_the_loop_is_free_and_calls_take_turns(tmp_path):
    async with started() as group:
        first = asyncio.create_task(group.call("wait_for", str(tmp_path / "go")))
        others = [asyncio.create_task(group.call("product", n)) for n in range(20)]
        await asyncio.sleep(0.1)
        assert not first.done() and not any(other.done() for other in others)
        (tmp_path / "go").touch()
        answers = await asyncio.gather(*others)
        assert first.done()
        assert answers == [[(0, n), (1, 2 * n)] for n in range(20)]


async def test_large_arrays_arrive_whole_and_are_pickled_once():
    num_pickled = 0

    class Counted:
        def __reduce__(self):
            nonlocal num_pickled
            num_pickled += 1
            return int, ("5",)

    large = np.arange(8_000_000)
    async with started() as group:
        for array in (large, large[::3], large[:0], large.astype(np.float32).reshape(2, -1), large[:7]):
            answers = await group.scatter("reversed", [array] * 2)
            for rank, answer in enumerate(answers):
                expected = array.copy()
                expected[:1] += rank
                np.testing.assert_array_equal(answer, expected[::-1])
                assert answer.dtype == array.dtype
        assert await group.call("product", Counted()) == [(0, 5), (1, 10)]
    assert num_pickled == 1


@pytest.mark.parametrize(
    "kind, exit_code, cause, details",
    [
        pytest.param("raise", 70, "raised ValueError during `fail_on`: seven is not even", "in _raise\n", id="raises"),
        pytest.param("device", 76, "raised RuntimeError during `fail_on`: CUDA error", "in _lose_the", id="device"),
        pytest.param("exit", 76, "exited with code 7 during `fail_on`", "rank_0001.log:\nlast words", id="os._exit"),
        pytest.param("sys.exit", 76, "exited with code 3 during `fail_on`", "last words", id="sys.exit"),
        pytest.param("kill", 76, "was killed by SIGKILL (out of memory?)", "last words", id="kill -9"),
        pytest.param("segfault", 76, "was killed by SIGSEGV", "Segmentation fault", id="segfault"),
        pytest.param("unpicklable", 70, "of 2 raised", "pickle", id="result that does not pickle"),
    ],
)
async def test_a_failure_names_rank_and_cause_and_ends_the_group(tmp_path, kind, exit_code, cause, details):
    async with started(log_folder=tmp_path / "logs") as group:
        pids = await group.call("pid")
        begun = time.monotonic()
        with pytest.raises(RankFailedError) as caught:
            await group.call("fail_on", 1, kind)
        assert time.monotonic() - begun < NOTICED_SECONDS
        assert kind == "unpicklable" or caught.value.rank == 1
        assert caught.value.exit_code == exit_code
        assert cause in str(caught.value)
        (error_text,) = caught.value.__notes__
        assert details in error_text
        assert not any(map(is_alive, pids))
        for _ in range(2):
            with pytest.raises(RankFailedError) as again:
                await group.call("product", 1)
            assert again.value is caught.value


async def test_what_a_rank_raised_stands_in_its_log(tmp_path):
    async with started(log_folder=tmp_path) as group:
        with pytest.raises(RankFailedError):
            await group.call("fail_on", 1, "raise")
    assert "in _raise\n" in (tmp_path / "rank_0001.log").read_text()


async def test_a_full_disk_in_a_rank_is_a_full_disk_in_the_driver():
    async with started() as group:
        with pytest.raises(DiskFullError, match=r"no room on a disk \(No space left on device\)") as caught:
            await group.call("fail_on", 1, "full")
        assert caught.value.exit_code == 74
        assert "the shard was not written" in caught.value.__notes__[0]


async def test_a_megarl_error_keeps_its_class_and_message():
    async with started() as group:
        with pytest.raises(ConfigError) as caught:
            await group.call("fail_on", 1, "config")
        assert str(caught.value) == "trainer.tp is 3: the model has 8 heads; take a divisor"
        assert caught.value.exit_code == 2
        assert "raised by rank 1 of 2" in caught.value.__notes__[0]


async def test_a_constructor_that_raises_ends_the_start():
    with pytest.raises(DataError, match="shard 1 is missing"):
        async with started(kwargs={"broken_rank": 1}):
            pytest.fail("started")


@pytest.mark.parametrize(
    "kind, cause",
    [
        pytest.param("kill", "rank 1 of 3 was killed by SIGKILL", id="killed in a collective"),
        pytest.param(
            "late", "rank 1 of 3 raised ValueError during `broken_collective`: the cause", id="echoes come first"
        ),
    ],
)
async def test_the_first_cause_is_named_and_not_the_echo(tmp_path, kind, cause):
    async with started(3, log_folder=tmp_path) as group:
        await group.call("join_gloo")
        begun = time.monotonic()
        with pytest.raises(RankFailedError) as caught:
            await group.call("broken_collective", 1, kind)
        assert time.monotonic() - begun < NOTICED_SECONDS
        assert caught.value.cause.startswith(cause)
        assert "gloo" not in str(caught.value)


async def test_a_death_is_noticed_although_a_grandchild_holds_the_socket():
    async with started() as group:
        begun = time.monotonic()
        with pytest.raises(RankFailedError, match="rank 1 of 2 exited with code 9"):
            await group.call("fork_and_die_on", 1)
        assert time.monotonic() - begun < NOTICED_SECONDS


async def test_a_death_between_calls_is_told_by_the_next():
    async with started() as group:
        pid = (await group.call("pid"))[0]
        os.kill(pid, signal.SIGKILL)
        while is_alive(pid):
            await asyncio.sleep(0.01)
        with pytest.raises(RankFailedError, match="rank 0 of 2 was killed by SIGKILL"):
            await group.call("product", 1)


async def test_a_fork_server_that_is_killed_is_named_rather_than_its_ranks():
    async with started() as group:
        pid = (await group.call("pid"))[0]
        server = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(server, signal.SIGKILL)
        with pytest.raises(RankFailedError, match="ended with its fork server, which was killed by SIGKILL"):
            while True:
                await group.call("product", 1)


async def test_a_silent_rank_is_named_with_its_stack(tmp_path):
    async with started(log_folder=tmp_path) as group:
        seconds = await patience(group)
        group.deadlines = Deadlines.for_all_methods(seconds)
        with pytest.raises(RankFailedError) as caught:
            await group.call("sleep_on", 1, 60)
        assert caught.value.cause == f"rank 1 of 2 did not answer `sleep_on` within {seconds:g} s"
        assert caught.value.exit_code == 76
        assert "in sleep_on" in caught.value.__notes__[0]


async def test_a_rank_that_hangs_while_it_is_built_is_told_from_those_that_wait_for_it(tmp_path):
    async with started(3, log_folder=tmp_path) as group:
        await group.call("join_gloo")
        group.deadlines = Deadlines.for_all_methods(0.5)
        with pytest.raises(RankFailedError) as caught:
            await group.construct("probe:Stuck", {"stuck": 1})
        cause = "rank 1 of 3 did not answer `__init__` within 0.5 s; ranks 0, 2 waited in a collective"
        assert (caught.value.rank, caught.value.cause) == (1, cause)
        assert "probe.py" in caught.value.__notes__[0]
        assert all("most recent call first" in (tmp_path / f"rank_000{r}.log").read_text() for r in range(3))


async def test_a_rank_that_misses_a_collective_is_named_when_the_others_give_up():
    async with started() as group:
        await group.call("join_gloo")
        with pytest.raises(RankFailedError) as caught:
            await group.call("collective_that_one_misses", 1, 0.5)
        error_text = "rank 1 of 2 did not enter a collective of `collective_that_one_misses`"
        assert (caught.value.rank, caught.value.cause) == (1, error_text)


async def test_ranks_of_one_machine_listen_on_loopback_only():
    async with started() as group:
        await group.call("join_gloo")
        addresses = [address for of_rank in await group.call("listening") for address in of_rank]
        assert addresses and all(address.startswith("0100007F:") for address in addresses)  # 127.0.0.1


async def test_temporary_files_of_ranks_are_private_and_go_with_the_group():
    async with started() as group:
        folders = [Path(path) for path in await group.call("temporary")]
        assert len(set(folders)) == 2
        for folder in folders:
            assert folder.stat().st_mode & 0o777 == 0o700 and folder != Path(tempfile.gettempdir())
            (folder / "left").touch()
        with pytest.raises(RankFailedError):
            await group.call("fail_on", 1, "kill")
        assert not any(folder.exists() for folder in folders)


async def test_a_stopped_rank_is_killed(tmp_path):
    async with started(log_folder=tmp_path) as group:
        group.deadlines = Deadlines.for_all_methods(await patience(group))
        os.kill((await group.call("pid"))[1], signal.SIGSTOP)
        with pytest.raises(RankFailedError, match="rank 1 of 2 did not answer `product`"):
            await group.call("product", 1)


async def test_a_cancelled_call_ends_the_group():
    async with started() as group:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(group.call("sleep", 60), timeout=0.3)
        with pytest.raises(PeerLostError, match="call of `sleep` on the ranks was interrupted"):
            await group.call("product", 1)


async def test_close_lets_ranks_leave_and_may_be_repeated(tmp_path):
    async with started() as group:
        await group.call("leave_note", str(tmp_path))
        await group.close()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["left_0", "left_1"]
        await group.close()
        with pytest.raises(PeerLostError, match="closed"):
            await group.call("product", 1)


async def test_ranks_leave_without_taking_themselves_apart(monkeypatch):
    # The limit of 10 s would be too near to what a busy machine takes.
    monkeypatch.setattr(group_end, "_LEAVE_SECONDS", 120.0)
    async with started() as group:
        await group.call("linger")
        begun = time.monotonic()
        await group.close()
        assert time.monotonic() - begun < NOTICED_SECONDS


async def test_stacks_are_shown_and_the_call_goes_on(tmp_path):
    logs = [tmp_path / f"rank_{rank:04d}.log" for rank in range(2)]
    async with started(log_folder=tmp_path) as group:
        call = asyncio.create_task(group.call("sleep", 1.0))
        while not all("in sleep\n" in log.read_text() for log in logs):
            await asyncio.sleep(0.05)
            group.diagnosis.show_stacks()
        await call
        assert await group.call("product", 1) == [(0, 1), (1, 2)]


async def test_a_log_that_its_disk_does_not_take_is_a_full_disk(small_disk):
    disk = small_disk("size=64k")

    async with started(log_folder=disk) as group:
        with (disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        with pytest.raises(DiskFullError, match="no room on its disk"):
            await group.call("fail_on", 1, "raise")


NOISY_LOG = """\
/x/site-packages/torch/distributed/c10d_logger.py:83: FutureWarning: `torch.distributed.reduce` is deprecated.
  return func(*args, **kwargs)
[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
INFO 11-22 09:29:19 [parallel_state.py:12] rank 0 in world size 2
(EngineCore pid=12) WARNING 11-22 09:29:19 [cpu.py:12] something is not set
[W1122 09:29:19.123456 socket.cpp:755] [c10d] The client socket cannot be initialized
WARNING: the node has 3 GPUs
RuntimeError: the cause
"""


def test_the_end_of_a_log_leaves_other_libraries_noise_out(tmp_path):
    log = tmp_path / "rank_0000.log"
    log.write_text(NOISY_LOG)
    assert log_tail(log) == f"The end of {log}:\nWARNING: the node has 3 GPUs\nRuntimeError: the cause"


async def test_close_ends_a_call_that_is_under_way():
    async with started() as group:
        call = asyncio.create_task(group.call("sleep", 60))
        await asyncio.sleep(0.1)
        await group.close()
        with pytest.raises(PeerLostError):
            await call


def slow_to_start(folder: Path, statement: str) -> dict[str, str]:
    """An environment in which rank 1 executes the statement before anything else."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        "import os, time\n"
        "forks = []\n"
        f"def in_child():\n    if len(forks) == 1: {statement}\n"
        "os.register_at_fork(after_in_parent=lambda: forks.append(1), after_in_child=in_child)\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def start_seconds(tmp_path_factory):
    """How long three interpreters take to start here and now."""

    async def drive():
        group = await LocalGroup(3).start(
            "probe:Probe", {}, log_folder=tmp_path_factory.mktemp("start"), environment={}
        )
        await group.close()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
        begun = time.monotonic()
        asyncio.run(drive())
    return time.monotonic() - begun


@pytest.mark.usefixtures("own_fork_servers")
@pytest.mark.parametrize(
    "statement, message",
    [
        pytest.param("time.sleep(600)", r"rank 1 of 3 did not answer `start` within", id="late"),
        pytest.param("os._exit(5)", r"rank 1 of 3 exited with code 5 during `start`", id="dies"),
    ],
)
async def test_a_rank_that_does_not_start_is_named(tmp_path, start_seconds, statement, message):
    # Only the one that is late is waited for in vain.
    seconds = 4 * start_seconds if "sleep" in statement else 600.0

    with pytest.raises(RankFailedError, match=message):
        environment = slow_to_start(tmp_path / "path", statement)
        async with started(3, log_folder=tmp_path, environment=environment, start_timeout_seconds=seconds):
            pytest.fail("started")


def test_ranks_die_with_the_driver(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(
        "import asyncio, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from tools.local_group import LocalGroup\n"
        "async def drive():\n"
        "    from pathlib import Path\n"
        f"    group = await LocalGroup(2).start('probe:Probe', {{}}, log_folder=Path({str(tmp_path)!r}))\n"
        "    print(*await group.call('pid'), flush=True)\n"
        "    await group.call('sleep', 60)\n"
        "asyncio.run(drive())\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_alive, pids))
        driver.kill()
        driver.wait()
        deadline = time.monotonic() + 60
        while any(map(is_alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_alive, pids))


async def test_an_agent_may_end_its_ranks_before_it_is_killed() -> None:
    agent = object.__new__(LocalAgent)
    program = agent._program = Mock(spec=LaunchedProgram)
    calls: list[str] = []

    async def end() -> None:
        await asyncio.sleep(0)
        calls.append("ended")

    program.wait_for_end = end
    program.kill = lambda: calls.append("killed")
    await agent.end()
    assert calls == ["ended", "killed"]
