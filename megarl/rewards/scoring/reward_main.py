"""Main function of a reward process. It imports the reward functions and scores one completion after the other."""

from __future__ import annotations

import traceback
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megarl.processes.frames import MAX_ERROR_CHARACTERS, Answer, RefusedError
from megarl.rewards import resolve
from megarl.rewards.scoring.calling import BoundFunction, bind
from megarl.rewards.scoring.results import check_result
from megarl.types import ConfigError

if TYPE_CHECKING:
    from megarl.sandbox.sandbox_fusion import AnySandbox


def start(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Import the reward functions. Returns (the values and record fields that they need, the function that scores).

    `settings` has the functions with their keyword arguments, and the sandbox. A sandbox is started only if a function
    needs one. Raises RefusedError if a function cannot be used.
    """
    try:
        functions = {
            setting["name"]: bind(setting["name"], resolve(setting["name"]), setting["kwargs"])
            for setting in settings["functions"]
        }
        needs = frozenset().union(*(function.needs for function in functions.values()))
        sandbox = _start_sandbox(settings["sandbox"]) if "sandbox" in needs else None
    except ConfigError as error:
        raise RefusedError(str(error)) from error

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if sandbox is not None:
            request["values"]["sandbox"] = sandbox
        return _score_sample(functions, request["values"])

    fields = {name for function in functions.values() for name in function.record_fields}
    return {"needs": sorted(needs), "record_fields": sorted(fields)}, answer


def _start_sandbox(settings: dict[str, Any]) -> AnySandbox:
    # Imported only when needed: the sandbox's modules take a third of a process's start.
    from megarl.sandbox.sandbox import SandboxError, SandboxSettings
    from megarl.sandbox.sandbox_fusion import open_sandbox

    sandbox = open_sandbox(SandboxSettings(**settings))
    try:
        sandbox.start()
    except SandboxError as error:
        raise RefusedError(str(error)) from error
    return sandbox


def _score_sample(functions: dict[str, BoundFunction], values: dict[str, Any]) -> dict[str, Any]:
    """Return the score of each function, or the first error. A score is null if the function does not apply."""
    scores: dict[str, dict[str, Any] | None] = {}
    name = ""
    try:
        for name, function in functions.items():
            score = check_result(function(values))
            scores[name] = None if score is None else asdict(score)
    except BaseException:  # SystemExit and timeouts of some libraries are not Exceptions.
        return {"error": f"{name}: {_shorten_traceback()}"}
    return {"scores": scores}


def _shorten_traceback() -> str:
    try:
        return traceback.format_exc()[-MAX_ERROR_CHARACTERS:]
    # Formatting may itself fail, for instance after a MemoryError or in an error's __str__.
    except BaseException as error:
        return f"{type(error).__name__} while the error was formatted"
