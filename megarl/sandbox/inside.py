"""In the process of a run: rights are given up, then the program is run."""

from __future__ import annotations

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
_MAX_FILE_BYTES = 16 << 20
_MAX_OPEN_FILES = 64
_MAX_TASKS = 128
_STACK_BYTES = 64 << 20
READY = b"ready"


@dataclass(frozen=True, slots=True)
class Confinement:
    """The parts of a machine's sandbox, known when its spawner has started."""

    layers: frozenset[str]
    trees: tuple[str, ...]
    """Folders that a program may read."""
    listable: tuple[str, ...]
    """Folders whose names alone it may read."""
    search_path: tuple[str, ...]
    used_bytes: int
    """Address space of the spawner, which a run begins with."""
    counts_tasks: bool
    """Whether the kernel counts a user's threads by namespace, so that they can be bounded."""


def confine(confinement: Confinement, limits: Mapping[str, Any]) -> None:
    """Give up all rights but those of a run. Raises OSError for a layer that was there when the spawner started."""
    layers = confinement.layers
    os.setsid()
    os.umask(0o077)
    if "namespaces" in layers:
        os.chdir("/tmp")
    _limit(confinement, limits)
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
    if "seccomp" in layers:
        seccomp.apply(is_alone="namespaces" in layers)


def _limit(confinement: Confinement, limits: Mapping[str, Any]) -> None:
    # Whole seconds, and the kernel counts them by samples: whether it was too long is decided by the exact time.
    cpu = math.floor(limits["cpu_seconds"]) + 1
    most = {
        resource.RLIMIT_CPU: cpu + 1,
        resource.RLIMIT_AS: confinement.used_bytes + limits["memory_bytes"],
        resource.RLIMIT_FSIZE: _MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_STACK: _STACK_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if confinement.counts_tasks:
        most[resource.RLIMIT_NPROC] = _MAX_TASKS
    for what, number in most.items():
        hard = resource.getrlimit(what)[1]
        allowed = number if hard == resource.RLIM_INFINITY else min(number, hard)
        # SIGXCPU comes a second before the end that nobody can put off.
        soft = min(cpu, allowed) if what == resource.RLIMIT_CPU else allowed
        resource.setrlimit(what, (soft, allowed))


def run(source: bytes, search_path: Sequence[str]) -> NoReturn:
    """Run a program as Python runs a file, and end with its exit code."""
    code = 1
    try:
        _like_new(search_path)
        code = _run(source)
    except BaseException:
        # The program may have left nothing intact.
        pass
    finally:
        os._exit(code)


def _like_new(search_path: Sequence[str]) -> None:
    """The state in which Python begins a program."""
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.path[:] = search_path
    sys.path_importer_cache.clear()
    sys.argv[:] = [_FILE]
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "surrogateescape" if name == "stdin" else "backslashreplace"
        stream = open(descriptor, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(source: bytes) -> int:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    code = 0
    try:
        text = source.decode()
        linecache.cache[_FILE] = (len(text), None, text.splitlines(keepends=True), _FILE)
        exec(compile(text, _FILE, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as ended:
        code = _exit_code(ended.code)
    except BaseException as error:
        _print_error(error)
        code = 1
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        _print_error(error)
        code = code or 1
    return code


def _exit_code(given: object) -> int:
    if given is None:
        return 0
    if isinstance(given, int):
        return given & 0xFF
    sys.stderr.write(f"{given}\n")
    return 1


def _print_error(error: BaseException) -> None:
    """The traceback without this file's frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    sys.stderr.flush()


def limits_of(text: bytes) -> Mapping[str, Any]:
    """The limits of a run from the message that asks for it."""
    return json.loads(text)
