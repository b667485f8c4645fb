"""A process of each kind that is stopped, not killed: it is named within its deadline plus 10 s."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cluster.calls.deadlines import Deadlines
from megarl.cluster.calls.diagnosis import HangReport
from megarl.cluster.calls.rank_errors import RankLostError
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.launchers import run_nodes as launchers
from megarl.cluster.launchers.local import LocalNodes
from megarl.config import ClusterConfig, RewardConfig
from megarl.platform import native_stacks
from megarl.platform.native_stacks import is_stopped
from megarl.processes.process_tree import descendants
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.reward_pool import RewardPool
from megarl.rewards.scoring.reward_process import worker_settings
from megarl.sandbox.sandbox import Sandbox, SandboxError, SandboxSettings
from tests.child_processes import is_alive
from tests.cluster.started import started
from tests.rollout.test_environment_processes import attempts
from tests.shared_fork_servers import SHARED

GRACE_SECONDS = 10.0


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, distributed_tier: None) -> None:
    """Ranks import `probe` as the driver does."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "cluster"))


@pytest.mark.usefixtures("probe")
async def test_row_2_a_stopped_rank_is_named_with_the_stacks_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Debuggers take seconds; `test_native_stacks_of_this_process` runs one. The agent finds none.
    monkeypatch.setenv("PATH", str(tmp_path))
    async with started(3, log_folder=tmp_path) as group:
        await group.call("join_gloo")
        pids = await group.call("pid")
        group.deadlines = Deadlines.for_all_methods(2.0)
        group.report_hangs(HangReport(tmp_path, lambda: [group.diagnosis]))
        os.kill(pids[1], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankLostError) as caught:
            await group.call("collective_that_one_misses", 1, 60.0)
        seconds = time.monotonic() - began
    assert 2.0 <= seconds < 2.0 + GRACE_SECONDS
    cause = "rank 1 of 3 did not answer `collective_that_one_misses` within 2 s; ranks 0, 2 waited in a collective"
    assert (caught.value.rank, caught.value.exit_code, caught.value.cause) == (1, 76, cause)
    report = tmp_path / "hang_1.txt"
    assert str(report) in caught.value.__notes__[-1]
    text = report.read_text()
    assert "\nfirst silent rank: 1\n" in text
    kernel = text.partition("== rank 1: threads in the kernel ==")[2].partition("\n==")[0]
    assert ": T (stopped)" in kernel
    assert "== rank 1: Python ==\nwrote no stack" in text
    for rank in (0, 2):
        assert "in collective_that_one_misses" in text.partition(f"== rank {rank}: Python ==")[2].partition("\n==")[0]
    assert text.count("no native stacks: neither py-spy nor gdb is installed") == 3


def test_native_stacks_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    states = native_stacks.thread_states(os.getpid())
    assert f"thread {os.getpid()} " in states and ": " in states.partition("\n")[0]
    nobody = 2**22 + 1
    assert native_stacks.thread_states(nobody) == ""
    monkeypatch.setattr(native_stacks, "_DEBUGGERS", {"sh": ("sh", "-c", "echo frames of $0", "PID")})
    assert native_stacks.native_stacks(nobody, 60.0) == f"frames of {nobody}"
    monkeypatch.setattr(native_stacks, "_DEBUGGERS", {"sh": ("sh", "-c", "echo denied >&2; exit 3")})
    assert native_stacks.native_stacks(nobody, 60.0) == "no native stacks: sh ended with code 3: denied"
    monkeypatch.setattr(native_stacks, "_DEBUGGERS", {"sleep": ("sleep", "60")})
    assert native_stacks.native_stacks(nobody, 0.1) == "no native stacks: sleep did not end within 0.1 s"


@pytest.mark.parametrize("was_stopped", [False, True])
@pytest.mark.parametrize(
    ("end", "fault"),
    [("exec sleep 600", "sh did not end within 3 s"), ("kill -KILL $$", "sh ended with code -9: ")],
    ids=["at its limit", "earlier"],
)
def test_a_debugger_that_is_killed_leaves_no_process_stopped(
    monkeypatch: pytest.MonkeyPatch, was_stopped: bool, end: str, fault: str
) -> None:
    # As gdb does: it stops the process, and is killed before it lets the process go on.
    monkeypatch.setattr(native_stacks, "_DEBUGGERS", {"sh": ("sh", "-c", f"kill -STOP $0; {end}", "PID")})
    process = subprocess.Popen(["sleep", "600"])
    try:
        if was_stopped:
            process.send_signal(signal.SIGSTOP)
            _until(lambda: is_stopped(process.pid))
        assert native_stacks.native_stacks(process.pid, 3.0) == f"no native stacks: {fault}"
        _until(lambda: is_stopped(process.pid) == was_stopped)
    finally:
        process.kill()
        process.wait()


def _until(is_reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_variables_of_the_flight_recorder_are_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    monkeypatch.setattr(launchers.chosen_device, "has_cuda_build", lambda: True)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "50")
    found = launchers._flight_recorder_variables(ClusterConfig(), tmp_path, 4)
    assert found["TORCH_FR_BUFFER_SIZE"] == "50" and found["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/flight_4_"
    assert launchers._flight_recorder_variables(ClusterConfig(device="cpu"), tmp_path, 4) == {}
    library = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        # TORCH_NCCL_DUMP_ON_TIMEOUT is in the library of CUDA builds.
        for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"):
            assert content.find(name.encode()) > 0, name


REWARD = """
def score(completion_text):
    return 1.0
"""


@pytest.mark.parametrize("kind", ["worker", "supervisor"])
async def test_row_34_a_stopped_reward_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    (tmp_path / "rewards_of_hangs.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    reward = RewardConfig(functions=("rewards_of_hangs:score",), timeout_seconds=30.0, wall_timeout_seconds=1.0)
    notices: list[str] = []
    pool = RewardPool(worker_settings(reward), num_workers=1, log_folder=None, notice=notices.append)
    try:
        assert (await pool.score(Sample("a", "a"))).failure is None
        supervisor = pool._processes.places[0].process.pid
        (worker,) = descendants(supervisor)
        os.kill({"worker": worker, "supervisor": supervisor}[kind], signal.SIGSTOP)
        began = time.monotonic()
        scored = await pool.score(Sample("b", "b"))
        assert time.monotonic() - began < 1.0 + GRACE_SECONDS
        # A stopped supervisor holds up nothing: completions go to the worker itself.
        if kind == "worker":
            assert scored.failure == "timeout" and "reward.wall_timeout_seconds = 1" in scored.detail
            assert len(notices) == 1
        assert (await pool.score(Sample("c", "c"))).failure is None
    finally:
        began = time.monotonic()
        pool.close()
        assert time.monotonic() - began < 2 * GRACE_SECONDS
    wait_until_gone([supervisor, worker])


def test_a_stopped_environment_process(tmp_path: Path) -> None:
    file = tmp_path / "waits.py"
    file.write_text(
        "import os, signal\n"
        "from megarl.environments import Start, Step\n"
        "class Stops:\n"
        "    def reset(self, problem, seed):\n"
        "        return Start(problem.messages)\n"
        "    def step(self, turn):\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    def close(self):\n"
        "        pass\n"
    )
    began = time.monotonic()
    [trajectory], _ = attempts(f"{file}:Stops", ["once"], ["a text"], seconds=2.0)
    assert time.monotonic() - began < 2.0 + 2 * GRACE_SECONDS
    assert trajectory.ended == "seconds" or (trajectory.failure or "").startswith("error"), trajectory


def test_a_stopped_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Sandbox(SandboxSettings(packages=(), wall_timeout_seconds=1.0))) as sandbox:
        assert sandbox.run("print(3)").stdout == "3\n"
        assert sandbox._process is not None
        os.kill(sandbox._process.pid, signal.SIGSTOP)
        monkeypatch.setattr("megarl.sandbox.sandbox._START_SECONDS", 1.0)
        began = time.monotonic()
        with pytest.raises(SandboxError, match=f"process {sandbox._process.pid}, its parent, is stopped"):
            sandbox.run("print(4)")
        # The kill of the spawner has its own 10 s.
        assert time.monotonic() - began < 1.0 + 2 * GRACE_SECONDS
        monkeypatch.undo()
        assert sandbox.run("print(5)").stdout == "5\n"


@pytest.mark.long
@pytest.mark.usefixtures("probe")
async def test_a_stopped_fork_server_is_named_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARED)
    monkeypatch.syspath_prepend(tmp_path)
    stops = tmp_path / "stops_its_server.py"
    stops.write_text(
        "import os, pathlib, signal\n"
        f"pathlib.Path({str(tmp_path / 'server')!r}).write_text(str(os.getpid()))\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    nodes = LocalNodes({}, ("stops_its_server",))
    await nodes.start(tmp_path, 60.0)
    try:
        places = nodes.choose_places(1, (), on_one_node=True)

        async def start(seconds: float) -> WorkerGroup:
            group = WorkerGroup(1, places=places)
            imports = nodes.imports
            return await group.start(
                "probe:Probe", {}, log_folder=tmp_path, start_timeout_seconds=seconds, imports=imports
            )

        _until((tmp_path / "server").exists)
        began = time.monotonic()
        with pytest.raises(RankLostError) as caught:
            await start(2.0)
        assert time.monotonic() - began < 2.0 + 2 * GRACE_SECONDS
        server = int((tmp_path / "server").read_text())
        assert f"its fork server (process {server}) is stopped" in caught.value.cause
        stops.write_text("")
        group = await start(60.0)
        (rank,) = await group.call("pid")
        await group.close()
    finally:
        await nodes.close()
    wait_until_gone([server, rank])


WALL_CLOCK = {
    "megarl/cluster/agents/agent_link.py": "times of lost ranks, to tell the first cause",
    "megarl/cluster/checks/node_report.py": "clocks of nodes, compared with the driver's",
    "megarl/cluster/ranks/rank.py": "times of errors, to tell the first cause",
    "megarl/files/temporary_folder.py": "age of folders",
    "megarl/processes/fork_server.py": "times of ended processes, to tell the first cause",
    "megarl/report/watched.py": "age of files",
    "megarl/serving/dialects/chat.py": "dates of answers",
    "megarl/serving/dialects/responses.py": "dates of answers",
    "megarl/sandbox/containers/outliving.py": "age of sockets",
    "megarl/service/handlers/sessions.py": "dates of sessions and models in listings",
    "megarl/tracking/trackers/hparams.py": "dates of records",
    "megarl/tracking/trackers/mlflow.py": "dates of records",
    "megarl/tracking/live/prometheus.py": "dates of records",
    "megarl/tracking/trackers/tensorboard.py": "dates of records",
}
"""Modules that read the wall clock, and for what. None of them waits by it."""


def test_row_49_few_modules_read_the_wall_clock() -> None:
    root = Path(__file__).resolve().parents[2]
    files = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in (root / "megarl").rglob("*.py")}
    assert {name for name, text in files.items() if re.search(r"\btime\.time\(\)", text)} == set(WALL_CLOCK)


@pytest.mark.usefixtures("probe")
@pytest.mark.parametrize("hours", [-1, 1])
async def test_row_49_deadlines_do_not_follow_the_wall_clock(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    true_time = time.time
    async with started(2) as group:
        group.deadlines = Deadlines.for_all_methods(60.0)
        began = true_time()
        # The clock jumps by an hour, as at a wrong daylight saving time, once a call is under way.
        monkeypatch.setattr(time, "time", lambda: true_time() + 3600.0 * hours * (true_time() > began + 0.2))
        assert await group.call("sleep", 1.0) == [None, None]
        group.deadlines = Deadlines.for_all_methods(2.0)
        began_at = time.monotonic()
        with pytest.raises(RankLostError, match="rank 1 of 2 did not answer `sleep_on` within 2 s"):
            await group.call("sleep_on", 1, 60.0)
        assert 2.0 <= time.monotonic() - began_at < 2.0 + GRACE_SECONDS


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60.0
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
