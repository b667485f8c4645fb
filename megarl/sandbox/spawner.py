"""Spawner of the sandbox: a small process that forks a process for each run, and ends it.

It passes on a run's file descriptors, and never reads the program or its output. So the memory that a run inherits
contains nothing of other runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import re
import resource
import select
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megarl.processes.process_tree import fork_child, kill_tree
from megarl.sandbox import landlock, namespaces, seccomp
from megarl.sandbox.inside import READY, Confinement, confine_process, read_limits, run_source
from megarl.sandbox.kernel import PR_SET_NO_NEW_PRIVS, KernelError, prctl

MAX_MESSAGE_BYTES = 4096
_DESCRIPTORS = 5
"""Number of a run's descriptors: program, standard input, output and error, and a pipe that reports the start."""
_PREIMPORTED = """
collections heapq bisect itertools functools math random string re datetime copy statistics operator io json typing
fractions decimal time enum dataclasses array queue cmath numbers abc contextlib inspect textwrap struct
""".split()  # noqa: SIM905
"""Modules that test programs often import. Each forked run inherits them."""
_TMP_BYTES = 64 << 20
_COUNTS_BY_NAMESPACE = (5, 14)
"""First kernel version that counts a user's tasks by user namespace. Earlier kernels also count tasks elsewhere."""


def spawn(control: int, settings: dict[str, Any]) -> NoReturn:
    """Run the programs that the driver sends, until it closes the connection.

    `settings`: the folders that programs see, and the names of the isolation layers to try.
    """
    connection = socket.socket(fileno=control)
    confinement, faults = _enter_layers(settings)
    connection.send(json.dumps({"layers": sorted(confinement.layers), "faults": faults}).encode())
    # Until now stderr carried errors to the starting process.
    os.dup2(0, 2)
    # The garbage collector does not touch frozen objects, so forks share their memory pages.
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        text, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, _DESCRIPTORS)
        if not text:
            os._exit(0)
        if len(descriptors) == _DESCRIPTORS:
            connection.send(
                json.dumps(_run_and_report_usage(connection, confinement, read_limits(text), descriptors)).encode()
            )
        # An empty list of descriptors is a request to kill a run that has ended meanwhile.


def _enter_layers(settings: dict[str, Any]) -> tuple[Confinement, dict[str, str]]:
    """Enter all available layers. Returns the confinement of runs, and the reasons for missing layers by name."""
    for name in _PREIMPORTED:
        importlib.import_module(name)
    # Open it now, because the new root has no /proc.
    statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    faults: dict[str, str] = {}
    layers = {"limits"}
    is_root = os.geteuid() == 0
    if "namespaces" in settings["layers"]:
        try:
            namespaces.enter_namespaces(settings["trees"], is_root)
            layers.add("namespaces")
        except OSError as error:
            # This process is only partly inside, and useless. Another spawner starts without namespaces.
            faults["namespaces"] = str(error.strerror)
            return Confinement(frozenset(), (), (), (), 0, False), faults
    elif is_root:
        try:
            namespaces.become_unprivileged()
        except OSError as error:
            faults["unprivileged"] = str(error)
    if os.geteuid() != 0:
        layers.add("unprivileged")
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for layer, probe in (("landlock", _probe_landlock), ("seccomp", _probe_seccomp)):
        if layer in settings["layers"]:
            fault = _try_in_child(probe)
            if fault is None:
                layers.add(layer)
            else:
                faults[layer] = fault
    _import_packages(settings["packages"], settings["listable"])
    # Measure after all imports: each run starts with this address space.
    used_bytes = int(os.read(statm, 200).split()[0]) * resource.getpagesize()
    os.close(statm)
    trees, listable, search_path = (tuple(settings[name]) for name in ("trees", "listable", "search_path"))
    counts_tasks = "namespaces" in layers and _kernel() >= _COUNTS_BY_NAMESPACE
    return Confinement(frozenset(layers), trees, listable, search_path, used_bytes, counts_tasks), faults


def _kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])


def _import_packages(names: Sequence[str], folders: Sequence[str]) -> None:
    """Import packages once for all programs, with their rights. A failing import fails again in the program."""
    earlier_path = list(sys.path)
    sys.path += folders
    for name in names:
        with contextlib.suppress(BaseException):  # Some packages call sys.exit.
            importlib.import_module(name)
    sys.path[:] = earlier_path


def _probe_landlock() -> None:
    landlock.restrict(readable=(), listable=(), usable=(), writable=())


def _probe_seccomp() -> None:
    seccomp.apply_filter(is_isolated=False)


def _try_in_child(probe: Callable[[], None]) -> str | None:
    """Try an irreversible step in a separate process. Returns why it fails; None: it succeeds."""
    read_end, write_end = os.pipe()

    def try_probe() -> None:
        """Call `probe`, and write the text of its error into the pipe."""
        try:
            probe()
        except KernelError as error:
            os.write(write_end, str(error.strerror).encode())
        except BaseException as error:
            os.write(write_end, repr(error).encode())

    child = fork_child(try_probe)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        fault = file.read().decode()
    exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return fault or (None if exit_code == 0 else f"a process that tried it ended with {exit_code}")


def _run_and_report_usage(
    connection: socket.socket, confinement: Confinement, limits: Any, descriptors: list[int]
) -> dict[str, Any]:
    """Run a program to its end, or until the driver requests a kill. Returns exit code, CPU time and memory."""
    try:
        if "namespaces" in confinement.layers:
            child = fork_child(lambda: _run_first_process(confinement, limits, descriptors), namespaces.fork_run)
        else:
            child = fork_child(lambda: _run_program(confinement, limits, descriptors))
    except OSError as error:
        os.write(descriptors[-1], f"no process can be started: {error.strerror}".encode())
        return {"exit_code": 1, "cpu_seconds": 0.0, "memory_bytes": 0}
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    # Unlike `wait`, a pidfd can be polled together with the connection.
    child_pidfd = os.pidfd_open(child)
    poll = select.poll()
    poll.register(child_pidfd, select.POLLIN)
    poll.register(connection, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if child_pidfd in ready:
            break
        # Any message here is a kill request. An empty one means that the other side has closed.
        message = connection.recv(MAX_MESSAGE_BYTES)
        kill_tree(child)
        if not message:
            os._exit(0)
        poll.unregister(connection)
    os.close(child_pidfd)
    _, status, usage = os.wait4(child, 0)
    return {
        "exit_code": _exit_code(status),
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "memory_bytes": usage.ru_maxrss << 10,
    }


def _exit_code(status: int) -> int:
    exit_code = os.waitstatus_to_exitcode(status)
    return exit_code if exit_code >= 0 else 128 - exit_code


def _run_first_process(confinement: Confinement, limits: Any, descriptors: list[int]) -> NoReturn:
    """Run as the first process of a run's namespaces. When it ends, all their processes end."""
    status = descriptors[-1]
    try:
        namespaces.mount_private_tmp(_TMP_BYTES)
        program = fork_child(lambda: _run_program(confinement, limits, descriptors))
        # A pipe end that stays open here would delay the reader's end of file.
        os.closerange(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os._exit(_exit_code(os.waitpid(program, 0)[1]))
    except BaseException as error:
        os.write(status, f"the sandbox could not be set up: {error}".encode())
    finally:
        # Never return into the spawner's loop.
        os._exit(1)


def _run_program(confinement: Confinement, limits: Any, descriptors: list[int]) -> NoReturn:
    """Confine this process, and run a program in it. `descriptors`: source, stdin, stdout, stderr, status."""
    program, stdin, stdout, stderr, status = descriptors
    try:
        with os.fdopen(program, "rb") as file:
            source = file.read()
        # Move them above 2, so that dup2 overwrites none that is still needed.
        moved_descriptors = [_move_above_stderr(descriptor) for descriptor in (stdin, stdout, stderr, status)]
        for standard_descriptor, descriptor in enumerate(moved_descriptors[:3]):
            os.dup2(descriptor, standard_descriptor)
        status = os.dup2(moved_descriptors[3], 3, inheritable=False)
        os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        confine_process(confinement, limits)
        os.write(status, READY)
        os.close(status)
    except BaseException as error:
        os.write(status, f"the sandbox could not be set up: {error}".encode())
        os._exit(1)
    run_source(source, confinement.search_path)


def _move_above_stderr(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10)


def main() -> NoReturn:
    """Run the spawner process. Command-line arguments: the connection's descriptor, and `settings` as JSON."""
    control, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    sys.argv[:] = [""]
    null_device = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(2):
        os.dup2(null_device, descriptor)
    os.close(null_device)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # If memory runs out, the kernel then kills programs before the training.
        file.write("1000")
    # Only the connection and the standard streams are passed on: close what the starting process left open.
    os.closerange(3, control)
    spawn(control, settings)
