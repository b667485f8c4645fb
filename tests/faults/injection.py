"""Faults on demand: a process is killed, stopped or broken at a named point of the real code (`megarl.faults`).

The variable `MEGARL_FAULT` has the form `POINT:RANK:STEP:KIND`, or several of them separated by commas:

- POINT: a name of `POINTS`.
- RANK: a rank's number in the run, `driver`, or `any` for every rank.
- STEP: the training step in progress, 0 before the first one, or `any`.
- KIND: a name of `KINDS`; `sleep` has its seconds, as in `sleep:2.5`.

Each fault happens once in a process.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megarl.faults import DRIVER, VARIABLE
from megarl.types import ConfigError

ANY = "any"
_EXIT_CODE = 7
"""Exit code of the kind `exit`. No error of megarl has it."""


class Point(NamedTuple):
    """A point of the code: the kind of process that reaches it, and when. `has_tensors`: a fault may change tensors."""

    process: Literal["rank", "driver"]
    meaning: str
    has_tensors: bool = False


POINTS = {
    "construct": Point("rank", "before the worker's models and engine are built"),
    "logprobs": Point("rank", "before a forward pass without gradients"),
    "update": Point("rank", "before the forward and backward passes of an update"),
    "backward": Point("rank", "between the forward and the backward pass of a microbatch", has_tensors=True),
    "gradients": Point("rank", "after the backward passes, before the optimizer's step", has_tensors=True),
    "updated": Point("rank", "after the optimizer's step", has_tensors=True),
    "save_plan": Point("rank", "before a checkpoint's parts are planned"),
    "save_write": Point("rank", "before this rank's part of a checkpoint is written"),
    "save_finish": Point("rank", "before this rank reports its part of a checkpoint as written"),
    "load": Point("rank", "before a checkpoint is loaded"),
    "restore": Point("rank", "before the state is loaded from copies in host memory"),
    "sample": Point("rank", "before an engine samples further tokens"),
    "reshard": Point("rank", "before weights are sent or received"),
    "resharded": Point("rank", "after weights were sent or received; tensors: the engine's", has_tensors=True),
    "start": Point("driver", "after the run folder is locked, before ranks start"),
    "manifest": Point("driver", "after all parts of a checkpoint are written, before its manifest"),
    "publish": Point("driver", "after the manifest, before the checkpoint gets its name"),
    "latest": Point("driver", "after the checkpoint has its name, before `latest` names it"),
    "remove": Point("driver", "before older checkpoints are removed"),
    "log": Point("driver", "before a step's metrics are written"),
}
"""Points by name."""


class InjectedFaultError(RuntimeError):
    """Raised by the kind `raise`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the variable. `rank` and `step` are texts as written, `argument` is the text after the kind."""

    text: str
    point: str
    rank: str
    step: str
    kind: str
    argument: str

    def is_due(self, point: str, process: str, step: int) -> bool:
        """Return whether a process (a rank's number or `driver`) has this fault at a point of a step."""
        is_here = self.rank == process or (self.rank == ANY and process != DRIVER)
        return self.point == point and is_here and self.step in (ANY, str(step))


def _raise(fault: Fault, _: Sequence[Any]) -> None:
    raise InjectedFaultError(f"{VARIABLE} = {fault.text}: this error was asked for")


def _fail_write(fault: Fault, _: Sequence[Any]) -> None:
    number = {"disk_full": errno.ENOSPC, "io_error": errno.EIO}[fault.kind]
    raise OSError(number, os.strerror(number))


def _end_memory(_: Fault, __: Sequence[Any]) -> None:
    """Limit this process's memory to its present size, so that the next large allocation fails."""
    with open("/proc/self/statm", encoding="ascii") as file:
        num_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _spoil(fault: Fault, tensors: Sequence[Any]) -> None:
    """Change the first value of the first tensor: to NaN, or by inverting its sign bit."""
    # `data` leaves autograd out: it would refuse the backward pass of a changed tensor.
    values = tensors[0].data.view(-1)
    values[0] = float("nan") if fault.kind == "nan" else -values[0]


KINDS: dict[str, Callable[[Fault, Sequence[Any]], object]] = {
    "kill": lambda *_: signal.raise_signal(signal.SIGKILL),
    "stop": lambda *_: signal.raise_signal(signal.SIGSTOP),
    "terminate": lambda *_: signal.raise_signal(signal.SIGTERM),
    "exit": lambda *_: os._exit(_EXIT_CODE),
    "raise": _raise,
    "sleep": lambda fault, _: time.sleep(float(fault.argument)),
    "disk_full": _fail_write,
    "io_error": _fail_write,
    "memory": _end_memory,
    "nan": _spoil,
    "flip": _spoil,
}
"""Effects by kind. `nan` and `flip` change a tensor of a point that has tensors."""
_TENSOR_KINDS = ("nan", "flip")


class Injector:
    """Faults of one process: its name, the step in progress, and the faults that have not happened yet."""

    def __init__(self, text: str, process: str) -> None:
        """Parse the faults. `process` is the rank's number in the run, or `driver`. Raises ConfigError."""
        self._faults, self._process, self.step = parse(text), process, 0

    def reach(self, point: str, tensors: Callable[[], Iterable[Any]]) -> None:
        """Let the faults of a point happen. `tensors` returns the tensors that they may change."""
        due = [fault for fault in self._faults if fault.is_due(point, self._process, self.step)]
        for fault in due:
            self._faults.remove(fault)
            print(f"{VARIABLE}: {fault.text} happens at {time.time():.3f}", file=sys.stderr, flush=True)
            KINDS[fault.kind](fault, list(tensors()))

    def check_ranks(self, world_size: int) -> None:
        """Raise ConfigError for a fault of a rank that a run of `world_size` ranks does not have."""
        for fault in self._faults:
            if fault.rank.isdigit() and int(fault.rank) >= world_size:
                raise _refusal(fault.text, f"rank {fault.rank} does not exist; the run has ranks 0 to {world_size - 1}")


def logged_times(log: str) -> list[float]:
    """Return the times, in seconds since 1970, at which faults happened according to a process's output."""
    return [float(found) for found in re.findall(rf"{VARIABLE}: \S+ happens at ([\d.]+)", log)]


def parse(text: str) -> list[Fault]:
    """Return the faults of the variable's value. Raises ConfigError."""
    return [_parse_one(part) for part in text.split(",")]


def _parse_one(text: str) -> Fault:
    fields = text.split(":", 3)
    if len(fields) != 4:
        raise _refusal(text, "must have the form POINT:RANK:STEP:KIND")
    point, rank, step, kind = fields
    kind, _, argument = kind.partition(":")
    if point not in POINTS:
        raise _refusal(text, f"point {point!r} does not exist; choose from {', '.join(POINTS)}")
    found = POINTS[point]
    if rank != DRIVER and rank != ANY and not rank.isdigit():
        raise _refusal(text, f"rank {rank!r} must be a number, {DRIVER} or {ANY}")
    if (rank == DRIVER) != (found.process == DRIVER):
        raise _refusal(text, f"point {point} is reached by a {found.process} only; name it as the rank")
    if step != ANY and not step.isdigit():
        raise _refusal(text, f"step {step!r} must be a number or {ANY}")
    if kind not in KINDS:
        raise _refusal(text, f"kind {kind!r} does not exist; choose from {', '.join(KINDS)}")
    if kind in _TENSOR_KINDS and not found.has_tensors:
        raise _refusal(text, f"kind {kind} needs a tensor, and point {point} has none")
    if (kind == "sleep") != _is_duration(argument) or (argument and kind != "sleep"):
        raise _refusal(text, "only sleep has a number, its seconds: sleep:SECONDS")
    return Fault(text, point, rank, step, kind, argument)


def _is_duration(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False


def _refusal(text: str, problem: str) -> ConfigError:
    return ConfigError(f"{VARIABLE} = {text}: {problem}")
