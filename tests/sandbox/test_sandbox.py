"""Runs of programs: their output, their limits, and the isolation of each from the next."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.platform.imports import disable_collector
from megarl.processes.launcher import LaunchedProgram
from megarl.sandbox import kernel
from megarl.sandbox.busy_time import BusyTime
from megarl.sandbox.layers import Layers
from megarl.sandbox.sandbox import _SPAWNER, Sandbox, SandboxError, SandboxSettings, _Run
from megarl.sandbox.spawner import _import_packages
from megarl.types import ConfigError


def test_a_program_reads_and_prints(sandbox: Sandbox) -> None:
    ran = sandbox.run("import sys\nprint(int(input()) * 7)\nprint(sys.stdin.read(), end='')", "11\nmé\n")
    assert (ran.outcome, ran.stdout, ran.stderr, ran.exit_code) == ("ok", "77\nmé\n", "", 0)
    assert 0 < ran.cpu_seconds < 1


def test_it_is_run_as_python_runs_a_file(sandbox: Sandbox) -> None:
    program = (
        "from __future__ import annotations\nimport atexit, sys, threading\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].atexit is atexit\n"
        "atexit.register(print, 'at the end')\n"
        "threading.Thread(target=lambda: print('thread')).start()\n"
        "sys.exit(3)"
    )
    ran = sandbox.run(program)
    assert (ran.outcome, ran.stdout, ran.exit_code) == ("error", "thread\nat the end\n", 3)


def test_asyncio_wakes_its_loop_from_threads(sandbox: Sandbox) -> None:
    program = (
        "import asyncio\n"
        "async def main():\n"
        "    loop = asyncio.get_running_loop()\n"
        "    print(await asyncio.to_thread(sum, [1, 2]), await loop.run_in_executor(None, max, 3, 4))\n"
        "asyncio.run(main())"
    )
    ran = sandbox.run(program)
    assert (ran.outcome, ran.stdout) == ("ok", "3 4\n"), ran.stderr


def test_locks_and_flags_of_files(sandbox: Sandbox) -> None:
    program = (
        "import fcntl, os\nfile = open('/tmp/x', 'w')\nfcntl.lockf(file, fcntl.LOCK_EX)\n"
        "os.set_inheritable(file.fileno(), True)\nread, write = os.pipe()\nos.set_blocking(read, False)\n"
        "fcntl.fcntl(read, fcntl.F_SETFL, os.O_NONBLOCK)\nprint(fcntl.fcntl(read, fcntl.F_GETFL) & os.O_NONBLOCK > 0)"
    )
    ran = sandbox.run(program)
    assert (ran.outcome, ran.stdout) == ("ok", "True\n"), ran.stderr


def test_an_error_shows_the_line_and_not_the_sandbox(sandbox: Sandbox) -> None:
    ran = sandbox.run("def f(x):\n    return 1 / x\n\nf(0)")
    assert ran.outcome == "error" and ran.exit_code == 1
    assert "return 1 / x" in ran.stderr and "ZeroDivisionError" in ran.stderr
    assert "megarl" not in ran.stderr


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        pytest.param("while True: pass", "timeout", id="CPU time"),
        pytest.param("print('x' * 70_000)", "output", id="output"),
        pytest.param("x = bytearray(1 << 30)", "error", id="memory"),
        pytest.param("def f(:", "error", id="syntax"),
        pytest.param("import os\nos.kill(os.getpid(), 15)", "error", id="signal"),
    ],
)
def test_limits_end_it(sandbox: Sandbox, program: str, outcome: str) -> None:
    assert sandbox.run(program).outcome == outcome


def test_a_program_that_waits_is_ended_by_the_clock() -> None:
    with contextlib.closing(Sandbox(SandboxSettings(wall_timeout_seconds=0.5, packages=()))) as sandbox:
        ran = sandbox.run("import time\ntime.sleep(3600)", cpu_seconds=0.2)
        assert (ran.outcome, ran.is_wall_clock_timeout) == ("timeout", True)
        assert sandbox.run("print(1)").stdout == "1\n"


def test_busy_time_of_an_ended_process_still_counts() -> None:
    """The kernel forgets an ended process. Later idle time of the remaining ones does not count."""
    child = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])\nprint(flush=True)\ninput()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", parent], stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None and process.stdout is not None
        busy_time = BusyTime(os.getpid())
        process.stdout.readline()
        seconds_of_both = busy_time.read()
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        seconds_after_child = busy_time.read()
        time.sleep(0.5)
        seconds_after_idling = busy_time.read()
        process.kill()
    assert seconds_after_child >= seconds_of_both >= 0.2
    assert seconds_after_idling < seconds_after_child + 0.25


def test_waiting_for_a_busy_cpu_extends_the_wall_clock_limit() -> None:
    """The program exceeds its limit by the clock only because other processes use its CPU."""
    busy = "import os\nos.sched_setaffinity(0, {%d})\nprint(flush=True)\nwhile True: pass"
    ours = os.sched_getaffinity(0)
    cpu = min(ours)
    settings = SandboxSettings(wall_timeout_seconds=0.4, longest_seconds=100.0, packages=())
    with contextlib.closing(Sandbox(settings)) as sandbox, contextlib.ExitStack() as stack:
        os.sched_setaffinity(0, {cpu})
        try:
            sandbox.start()
        finally:
            os.sched_setaffinity(0, ours)
        for _ in range(3):
            command = [sys.executable, "-c", busy % cpu]
            other = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
            stack.enter_context(other)
            stack.callback(other.kill)
            assert other.stdout is not None
            other.stdout.readline()
        program = "import time\nwhile time.process_time() < 0.25: pass\nprint(1)"
        ran = sandbox.run(program, cpu_seconds=0.4)
        assert (ran.outcome, ran.stdout) == ("ok", "1\n")
        assert ran.wall_seconds > 0.4
        assert sandbox.run("import time\ntime.sleep(3600)", cpu_seconds=0.4).is_wall_clock_timeout


def test_a_run_that_does_not_begin_is_an_error_of_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Sandbox(SandboxSettings(packages=()))) as sandbox:
        sandbox.start()
        assert sandbox._process is not None
        monkeypatch.setattr("megarl.sandbox.sandbox._START_SECONDS", 0.1)
        monkeypatch.setattr("megarl.sandbox.sandbox._KILL_SECONDS", 0.1)
        os.kill(sandbox._process.pid, signal.SIGSTOP)
        with pytest.raises(SandboxError, match="a program has not begun in"):
            sandbox.run("print(1)")
        monkeypatch.undo()
        assert sandbox.run("print(1)").stdout == "1\n"


def test_a_process_that_outlives_its_run_is_an_error_of_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a run is reported, but a process started by it holds the pipes open."""
    monkeypatch.setattr("megarl.sandbox.sandbox._KILL_SECONDS", 0.2)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pipes = [os.pipe() for _ in range(3)]
    try:
        run = _Run(ours, [read for read, _ in pipes], 100.0, 100.0, 1000, os.getpid())
        os.write(pipes[2][1], b"ready")
        theirs.send(b'{"exit_code": 0, "cpu_seconds": 0.1}')
        before = time.process_time()
        # One collection of a worker's objects takes longer than the limit below.
        with disable_collector(), pytest.raises(SandboxError, match="a process that it started is still running"):
            run.read_until_end()
        assert time.process_time() - before < 0.1, "it waits, and does not ask again and again"
    finally:
        for descriptor in (end for pipe in pipes for end in pipe):
            os.close(descriptor)
        ours.close()
        theirs.close()


def test_with_neither_namespaces_nor_seccomp_nothing_runs() -> None:
    without = ("namespaces", "seccomp")
    layers = Layers(frozenset({"landlock", "limits", "unprivileged"}), dict.fromkeys(without, "not here"))
    with pytest.raises(ConfigError, match="neither namespaces nor seccomp"):
        layers.require_minimum()
    for one in without:
        Layers(layers.active | {one}, {}).require_minimum()
    with pytest.raises(ConfigError, match=r"neither namespaces nor seccomp|unprivileged"):
        Sandbox(SandboxSettings(require=(), packages=()), _without=without).start()


@contextlib.contextmanager
def endless_run(sandbox: Sandbox) -> Iterator[LaunchedProgram]:
    """Yield the process of a started sandbox while a thread runs an endless program, until the run fails."""
    sandbox.start()
    process = sandbox._process
    assert process is not None
    ended: list[BaseException] = []

    def run() -> None:
        try:
            sandbox.run("while True: pass", cpu_seconds=100.0)
        except SandboxError as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not _children(process.pid):
        time.sleep(0.01)
    yield process
    thread.join()
    assert len(ended) == 1


def test_it_can_be_closed_during_a_run() -> None:
    """`close` wakes the thread of the run. That thread closes the descriptors that it uses."""
    sandbox = Sandbox(SandboxSettings(packages=()))
    with endless_run(sandbox) as process:
        sandbox.close()
    assert sandbox._process is None and process.exit_code() is not None


def test_output_may_be_longer_where_more_is_expected(sandbox: Sandbox) -> None:
    program = "print('x' * 200_000)"
    assert sandbox.run(program).outcome == "output"
    assert len(sandbox.run(program, output_bytes=300_000).stdout) == 200_001


def test_a_megabyte_in_and_out(sandbox: Sandbox) -> None:
    text = "abcdefg\n" * 131_072
    ran = sandbox.run("import sys\nsys.stdout.write(sys.stdin.read().upper())", text, output_bytes=2 << 20)
    assert ran.stdout == text.upper()


def test_each_run_is_alone(sandbox: Sandbox) -> None:
    first = "import builtins, os\nopen('/tmp/x', 'w').write('7')\nbuiltins.len = 0\nos.environ['A'] = 'b'\nprint(1)"
    assert sandbox.run(first).stdout == "1\n"
    second = "import os\nprint(os.listdir('/tmp'), len('abc'), os.environ.get('A'), os.getpid())"
    assert sandbox.run(second).stdout == "[] 3 None 2\n"


def test_it_sees_python_and_nothing_else(sandbox: Sandbox) -> None:
    program = (
        "import os, sys\n"
        "print([name for name in ('/etc', '/proc', '/home', '/root/.ssh', '/work', '/var') if os.path.exists(name)])\n"
        "print(os.uname().nodename)\nprint(os.getuid() > 0, sorted(os.environ))"
    )
    ran = sandbox.run(program)
    there, name, rest = ran.stdout.splitlines()
    assert (there, name) == ("[]", "sandbox")
    assert socket.gethostname() != "sandbox"
    assert rest.startswith("True ['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH'")


def test_a_set_has_the_same_order_in_each_sandbox(sandbox: Sandbox) -> None:
    program = "print(list({'tea', 'milk', 'salt', 'pepper', 'bread'}))"
    with contextlib.closing(Sandbox(SandboxSettings(packages=()))) as other:
        assert sandbox.run(program).stdout == other.run(program).stdout


def test_packages_can_be_imported_and_others_not() -> None:
    with contextlib.closing(Sandbox(SandboxSettings(packages=("numpy",)))) as sandbox:
        assert sandbox.run("import numpy\nprint(numpy.arange(5).sum())").stdout == "10\n"
        assert "No module named 'torch'" in sandbox.run("import torch").stderr


def test_a_module_of_one_file_can_be_imported_without_its_neighbours() -> None:
    with contextlib.closing(Sandbox(SandboxSettings(packages=("typing_extensions", "math")))) as sandbox:
        assert (
            sandbox.run("import typing_extensions\nprint(typing_extensions.__name__)").stdout == "typing_extensions\n"
        )
        assert "No module named 'numpy'" in sandbox.run("import numpy").stderr


def test_a_package_that_ends_the_process_does_not_end_the_spawner(tmp_path: Path) -> None:
    (tmp_path / "megarl_test_quits.py").write_text("raise SystemExit(3)")
    _import_packages(["megarl_test_quits"], [str(tmp_path)])
    assert str(tmp_path) not in sys.path


def test_an_error_of_the_spawner_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _SPAWNER.replace(
        "main()", "from megarl.sandbox import spawner\nspawner._PREIMPORTED.append('no_such')\nmain()"
    )
    monkeypatch.setattr("megarl.sandbox.sandbox._SPAWNER", broken)
    with pytest.raises(SandboxError, match="No module named 'no_such'"):
        Sandbox(SandboxSettings(packages=())).start()


def test_programs_go_first_where_memory_runs_out(sandbox: Sandbox) -> None:
    sandbox.start()
    assert sandbox._process is not None
    assert Path(f"/proc/{sandbox._process.pid}/oom_score_adj").read_text() == "1000\n"


def test_a_kernel_that_cannot_protect_mounts_below_is_no_machine_with_namespaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str, *given: object) -> int:
        raise kernel.KernelError(errno.ENOSYS, name)

    monkeypatch.setattr("megarl.sandbox.kernel.syscall", missing)
    with pytest.raises(kernel.KernelError, match=r"5\.12"):
        kernel.restrict_mount("/nowhere", kernel.MS_RDONLY, recursive=True)


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.packages: 'nowhere'"):
        Sandbox(SandboxSettings(packages=("nowhere",))).start()


def test_a_missing_layer_is_refused_with_its_remedy_and_may_be_left_out() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.require.* programs: landlock .*lsm=landlock") as refused:
        Sandbox(SandboxSettings(packages=()), _without=("landlock",)).start()
    assert "sandbox.require=[namespaces, seccomp, limits, unprivileged]" in str(refused.value)
    required = ("namespaces", "seccomp", "limits", "unprivileged")
    with contextlib.closing(Sandbox(SandboxSettings(require=required, packages=()), _without=("landlock",))) as sandbox:
        assert sandbox.run("print(5)").stdout == "5\n"
        assert sandbox.layers is not None
        assert "without landlock" in str(sandbox.layers.notice(required))
        assert sandbox.layers.notice((*required, "landlock")) is None


def test_it_goes_on_after_its_spawner_was_killed() -> None:
    with contextlib.closing(Sandbox(SandboxSettings(packages=()))) as sandbox:
        with endless_run(sandbox) as process:
            program = _children(process.pid)
            process.kill()
        while any(os.path.exists(f"/proc/{pid}") for pid in program):
            time.sleep(0.01)
        assert sandbox.run("print(3)").stdout == "3\n"


def _children(pid: int) -> list[str]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return file.read().split()
