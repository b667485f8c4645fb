"""Main function of a reward process. It imports the functions and scores one completion after the other."""

from __future__ import annotations

import os
import socket
import traceback
from contextlib import suppress
from typing import Any, NamedTuple

from megarl.config.judges import Judging
from megarl.processes.frames import receive, send
from megarl.processes.process_tree import limit_memory
from megarl.rewards import resolve
from megarl.rewards.calling import BoundFunction, bind
from megarl.rewards.results import FunctionScore, checked, combined
from megarl.sandbox.sandbox import SandboxError, SandboxSettings
from megarl.sandbox.sandbox_fusion import AnySandbox, open_sandbox
from megarl.types import ConfigError

MEMORY_LIMIT_BYTES = 4 << 30
MAX_ERROR_CHARACTERS = 4000


def serve(connection: socket.socket) -> None:
    """Answer requests until the driver closes the connection.

    The first message names the functions, their weights and keyword arguments, and has the settings of a sandbox
    (started only if a function needs one). Its answer is `ready` with the sample values the functions need, or
    `refused` with the reason. Each later request has these values of a sample and a number, repeated in the answer.
    """
    with suppress(EOFError, OSError):
        start = receive(connection, None)
        try:
            functions = {f["name"]: bind(f["name"], resolve(f["name"]), f["kwargs"]) for f in start["functions"]}
            needs = frozenset().union(*(function.needs for function in functions.values()))
            sandbox = _started(start["sandbox"]) if "sandbox" in needs else None
        except (ConfigError, SandboxError) as error:
            send(connection, {"refused": str(error)[:MAX_ERROR_CHARACTERS]})
            return
        weighing = _Weighing(
            weights={f["name"]: f["weight"] for f in start["functions"]},
            judges={f["name"]: f["judging"] for f in start["functions"]},
            correct_score=start["correct_score"],
        )
        # Limited after the imports: memory of the libraries does not count.
        limit_memory(MEMORY_LIMIT_BYTES)
        send(connection, {"ready": True, "needs": sorted(needs)})
        process = os.getpid()
        while True:
            request = receive(connection, None)
            if sandbox is not None:
                request["values"]["sandbox"] = sandbox
            answer = _answer(functions, weighing, request["values"])
            if os.getpid() != process:
                # A function forked, and this is the child. The connection belongs to the parent.
                os._exit(0)
            send(connection, {"id": request["id"], **answer})


def _started(settings: dict[str, Any]) -> AnySandbox:
    """Return a working sandbox with these settings. Raises ConfigError or SandboxError if it does not work."""
    sandbox = open_sandbox(SandboxSettings(**settings))
    sandbox.start()
    return sandbox


class _Weighing(NamedTuple):
    """How scores become a reward (`scores.combined`)."""

    weights: dict[str, float]
    judges: dict[str, Judging]
    correct_score: float


def _answer(functions: dict[str, BoundFunction], weighing: _Weighing, values: dict[str, Any]) -> dict[str, Any]:
    scores: dict[str, FunctionScore | None] = {}
    name = ""
    try:
        for name, function in functions.items():
            scores[name] = checked(function(values))
        total = combined(scores, *weighing)
    except BaseException:  # SystemExit and timeouts of some libraries are not Exceptions.
        return {"error": f"{name}: {_shortened_traceback()}"}
    return {
        "score": total.score,
        "format_valid": total.format_valid,
        "answer_correct": total.answer_correct,
        "scores": total.scores,
        "metrics": total.metrics,
        "judges_format": any(score is not None and score.format_valid is not None for score in scores.values()),
        "judges_answer": any(score is not None and weighing.judges[name] != "none" for name, score in scores.items()),
    }


def _shortened_traceback() -> str:
    try:
        return traceback.format_exc()[-MAX_ERROR_CHARACTERS:]
    # Formatting may fail itself, for instance after a MemoryError or in an error's own __str__.
    except BaseException as error:
        return f"{type(error).__name__} while the error was formatted"
