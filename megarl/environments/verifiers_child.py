"""Plays tasks of a taskset of verifiers against an endpoint; started by its path, it imports nothing of megarl.

    python verifiers_child.py PARENT_PID

The first line of standard input has the settings, its answer {"ready": true, "num_tasks": 50} or {"refused": "..."}.
Then a request is a line {"id": 1, "task": 7, "base_url": "...", "api_key": "..."}, its answer {"id": 1, "reward": 0.5}
or {"id": 1, "error": "..."}, in any order; {"kill": 1} ends a task. Importing verifiers takes seconds: it is done once,
and a task is played in a fork.
"""

import asyncio
import ctypes
import importlib
import itertools
import json
import os
import select
import signal
import sys
from contextlib import suppress

DEATH_SIGNAL = 1
MAX_ERROR_CHARACTERS = 900
"""An answer is shorter than what a pipe takes whole."""


def load(settings):
    """The environment, and its first tasks."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    environment = loaders.load_environment(loaders.resolve_env_config(settings["env"]))
    return environment, list(itertools.islice(environment.taskset, settings["max_tasks"]))


async def played(environment, task, base_url):
    """The reward of an episode. Raises RuntimeError with its errors."""
    vf = importlib.import_module("verifiers.v1")
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    context = vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
    async with environment.serving():
        episode = await environment.run_episode(task, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
    return float(sum(trace.reward for trace in episode.traces))


def play(environment, tasks, request, answers):
    """In a fork: play a task, answer, and end."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
        os.setsid()
        os.environ["OPENAI_API_KEY"] = request["api_key"]
        try:
            told = {"reward": asyncio.run(played(environment, tasks[request["task"]], request["base_url"]))}
        except BaseException as error:
            told = {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]}
        tell(answers, {"id": request["id"], **told})
        code = 0
    finally:
        os._exit(code)


def tell(answers, message):
    os.write(answers, json.dumps(message).encode() + b"\n")


def serve(requests, answers, environment, tasks):
    """Fork for each request until standard input ends; then end all."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    running = {}
    held = b""
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, 512)
            reap(running, answers)
        if requests not in ready:
            continue
        part = os.read(requests, 1 << 16)
        if not part:
            break
        *lines, held = (held + part).split(b"\n")
        for request in map(json.loads, lines):
            if "kill" in request:
                end(pid for pid, number in running.items() if number == request["kill"])
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                os.close(requests)
                play(environment, tasks, request, answers)
            running[pid] = request["id"]
    end(running)


def reap(running, answers):
    """Forks that ended; what is left of their process groups is killed."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = running.pop(pid, None)
            end([pid])
            if number is not None and status != 0:
                tell(answers, {"id": number, "error": f"ended with {os.waitstatus_to_exitcode(status)}"})


def end(pids):
    for pid in list(pids):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def main():
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return
    # Modules beside this file have the names of libraries; those of the user are in the current folder.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here] + [os.getcwd()]
    # Programs of the interpreter's environment, uv among them, are found by the harness.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(requests, 1)
    try:
        environment, tasks = load(json.loads(line))
    except BaseException as error:
        tell(answers, {"refused": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]})
        return
    tell(answers, {"ready": True, "num_tasks": len(tasks)})
    serve(requests, answers, environment, tasks)


if __name__ == "__main__":
    main()
