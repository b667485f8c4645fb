"""The process of a sandbox run: drops all rights, then runs the program."""

from __future__ import annotations

import _sitebuiltins
import atexit
import builtins
import gc
import json
import linecache
import math
import os
import resource
import signal
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megarl.sandbox import landlock, seccomp
from megarl.sandbox.kernel import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, drop_capabilities, prctl
from megarl.sandbox.namespaces import DEVICES

_FILE = "program.py"
# Limits without a recipe field, far above a test program's needs: file size, open files, tasks, stack.
_MAX_FILE_BYTES = 16 << 20
_MAX_OPEN_FILES = 64
_MAX_TASKS = 128
_STACK_BYTES = 64 << 20
READY = b"ready"


@dataclass(frozen=True, slots=True)
class Confinement:
    """Values for every run, computed by the spawner: folders, address space, and how the kernel counts threads."""

    layers: frozenset[str]
    trees: tuple[str, ...]
    """Folders that a program may read."""
    listable: tuple[str, ...]
    """Folders in which a program may only list file names."""
    search_path: tuple[str, ...]
    used_bytes: int
    """Bytes of the spawner's address space. Every run inherits it."""
    counts_tasks: bool
    """Whether the kernel counts a user's threads per namespace. Only then can a run's threads be limited."""


def confine_process(confinement: Confinement, limits: Mapping[str, Any]) -> None:
    """Drop all rights that a sandboxed program does not need. Raises OSError if an available layer fails."""
    layers = confinement.layers
    os.umask(0o077)
    if "namespaces" in layers:
        os.chdir("/tmp")
    _set_resource_limits(confinement, limits)
    # Landlock and seccomp require no_new_privs of an unprivileged process.
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)
    drop_capabilities()
    if "landlock" in layers:
        landlock.restrict(
            readable=confinement.trees,
            listable=confinement.listable,
            usable=DEVICES,
            writable=("/tmp",) if "namespaces" in layers else (),
        )
    # Last, because the filter forbids the system calls used above.
    if "seccomp" in layers:
        seccomp.apply_filter(is_isolated="namespaces" in layers)


def _set_resource_limits(confinement: Confinement, limits: Mapping[str, Any]) -> None:
    """Set the kernel's limits on CPU time, memory, files and threads of this process."""
    # rlimits have whole seconds, and the kernel samples CPU time. So `sandbox` checks the exact time.
    soft_cpu_seconds = math.floor(limits["cpu_seconds"]) + 1
    limits_by_resource = {
        resource.RLIMIT_CPU: soft_cpu_seconds + 1,
        # The limit includes the spawner's own address space, inherited by the fork.
        resource.RLIMIT_AS: confinement.used_bytes + limits["memory_bytes"],
        resource.RLIMIT_FSIZE: _MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_STACK: _STACK_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if confinement.counts_tasks:
        limits_by_resource[resource.RLIMIT_NPROC] = _MAX_TASKS
    for resource_name, wanted_limit in limits_by_resource.items():
        # Without rights a process can only lower a hard limit.
        hard_limit = resource.getrlimit(resource_name)[1]
        new_limit = wanted_limit if hard_limit == resource.RLIM_INFINITY else min(wanted_limit, hard_limit)
        # SIGXCPU (soft limit) comes a second before SIGKILL (hard limit). A program can ignore SIGXCPU only.
        soft_limit = min(soft_cpu_seconds, new_limit) if resource_name == resource.RLIMIT_CPU else new_limit
        resource.setrlimit(resource_name, (soft_limit, new_limit))


def run_source(source: bytes, search_path: Sequence[str]) -> NoReturn:
    """Run the Python program `source` as `python FILE` would, then end this process with the program's exit code."""
    exit_code = 1
    try:
        _reset_interpreter(search_path)
        exit_code = _run_as_main(source)
    except BaseException:
        # The program may have broken everything, even sys.stderr, so report nothing.
        pass
    finally:
        os._exit(exit_code)


def _reset_interpreter(search_path: Sequence[str]) -> None:
    # The spawner froze all objects and switched the garbage collector off.
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.path[:] = search_path
    sys.path_importer_cache.clear()
    sys.argv[:] = [_FILE]
    # `site` normally adds these, but the spawner runs without it (-S).
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "surrogateescape" if name == "stdin" else "backslashreplace"
        stream = open(descriptor, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run_as_main(source: bytes) -> int:
    """Run a program as the module `__main__`, and return its exit code."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exit_code = 0
    try:
        text = source.decode()
        # The program is not in a file: put its lines into the cache that tracebacks read.
        linecache.cache[_FILE] = (len(text), None, text.splitlines(keepends=True), _FILE)
        exec(compile(text, _FILE, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as system_exit:
        exit_code = _exit_code_for(system_exit.code)
    except BaseException as error:
        _print_error(error)
        exit_code = 1
    try:
        # Exit in Python's order: wait for threads, run atexit functions, flush.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        _print_error(error)
        exit_code = exit_code or 1
    return exit_code


def _exit_code_for(system_exit_code: object) -> int:
    """Return the exit code for an argument of `sys.exit`; print a text."""
    if system_exit_code is None:
        return 0
    if isinstance(system_exit_code, int):
        return system_exit_code & 0xFF
    sys.stderr.write(f"{system_exit_code}\n")
    return 1


def _print_error(error: BaseException) -> None:
    # Skip the frames of this file, because `python FILE` has none.
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    sys.stderr.flush()


def read_limits(text: bytes) -> Mapping[str, Any]:
    return json.loads(text)
