"""Tasks of a verifiers taskset, played against an endpoint.

The file is started by its path and imports nothing from megarl.

    python verifiers_child.py PARENT_PID

The first line of standard input has the settings. Its answer is {"ready": true, "num_tasks": 50} or {"refused": "..."}.
Each further line is a request {"id": 1, "task": 7, "base_url": "...", "api_key": "..."}. Its answer is {"id": 1,
"reward": 0.5} or {"id": 1, "error": "..."}, in any order. {"kill": 1} ends a task. Importing verifiers takes seconds,
so it is imported once, and each task is played in a fork.
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

# PR_SET_PDEATHSIG of linux/prctl.h: die with the parent.
DEATH_SIGNAL = 1
MAX_ERROR_CHARACTERS = 900
"""Limit of an error's text, so that a pipe takes an answer as one piece even from several writers."""


def load(settings):
    """Return the environment and its first tasks."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    environment = loaders.load_environment(loaders.resolve_env_config(settings["env"]))
    return environment, list(itertools.islice(environment.taskset, settings["max_tasks"]))


async def played(environment, task, base_url):
    """Return the reward of an episode. Raises RuntimeError with its errors."""
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
    """In a fork: play a task, answer, and exit."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
        # Its own process group lets `end` kill all processes of the task.
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
    """Fork for each request until standard input ends, then kill all forks."""
    # `select` also wakes for SIGCHLD through this pipe, so ended forks are noticed at once.
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
                # The fork must not wake the parent's loop.
                signal.set_wakeup_fd(-1)
                os.close(requests)
                play(environment, tasks, request, answers)
            running[pid] = request["id"]
    end(running)


def reap(running, answers):
    """Collect ended forks, kill their process groups, and answer for failed ones."""
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
    # The parent may have died before prctl took effect.
    if os.getppid() != int(sys.argv[1]):
        return
    # Modules next to this file have names of libraries. The user's own modules are in the current folder.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here] + [os.getcwd()]
    # The harness finds programs of the interpreter's environment, such as uv, by PATH.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    # Harnesses may print. Keep the real descriptors for the protocol, and send prints to standard error.
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    line = b""
    # Read byte by byte: a buffer would swallow later requests.
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
