"""The body of a reward process: it imports the functions and answers for one completion after another."""

from __future__ import annotations

import os
import resource
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megarl.rewards import check_signature, resolve
from megarl.rewards.frames import receive, send
from megarl.rewards.scores import added, checked
from megarl.types import ConfigError

MEMORY_LIMIT_BYTES = 4 << 30
MAX_ERROR_CHARACTERS = 4000

Functions = dict[str, Callable[..., Any]]


def serve(connection: socket.socket) -> None:
    """Answer until the driver closes the connection.

    The first message names the functions and the score of a right answer; the answer is that they are ready or why
    they are refused. Each later one is a completion with its gold answer and a number, which the answer repeats.
    """
    with suppress(EOFError, OSError):
        start = receive(connection, None)
        try:
            functions = {name: resolve(name) for name in start["functions"]}
            for name, function in functions.items():
                check_signature(name, function)
        except ConfigError as error:
            send(connection, {"refused": str(error)[:MAX_ERROR_CHARACTERS]})
            return
        _limit_memory()
        send(connection, {"ready": True})
        process = os.getpid()
        while True:
            request = receive(connection, None)
            answer = _answer(functions, request["completion"], request["answer"], start["correct_score"])
            if os.getpid() != process:
                # A function forked, and this is the copy: the connection belongs to the original.
                os._exit(0)
            send(connection, {"id": request["id"], **answer})


def _answer(functions: Functions, completion_text: str, answer: str, correct_score: float) -> dict[str, Any]:
    total = added([])
    for name, function in functions.items():
        try:
            result = function(completion_text, answer, correct_score=correct_score)
            total = added([total, checked(result)])
        except BaseException:  # SystemExit and the time-outs of some libraries are no Exception
            return {"error": f"{name}: {_shortened_traceback()}"}
    return {"score": total.score, "format_valid": total.format_valid, "answer_correct": total.answer_correct}


def _shortened_traceback() -> str:
    try:
        return traceback.format_exc()[-MAX_ERROR_CHARACTERS:]
    except BaseException as error:
        return f"{type(error).__name__} while the error was formatted"


def _limit_memory() -> None:
    """Cap the address space at what the imports took plus the limit: thread pools alone may reserve gigabytes."""
    with open("/proc/self/statm") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used_bytes + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
