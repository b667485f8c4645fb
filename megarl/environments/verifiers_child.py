"""Tasks of a verifiers taskset, played against an endpoint.

The file is started by its path. It imports nothing from megarl except `processes/process_tree.py`, also by path.

    python verifiers_child.py DESCRIPTOR

The first line read from the socket has the settings. Its answer is {"ready": true, "num_tasks": 50} or
{"refused": "..."}. Each further line is a request {"id": 1, "task": 7, "base_url": "...", "api_key": "..."}. Its answer
is {"id": 1, "reward": 0.5} or {"id": 1, "error": "..."}, in any order. {"kill": 1} ends a task. Importing verifiers
takes seconds, so it is imported once, and each task is played in a fork.
"""

import asyncio
import functools
import importlib
import importlib.util
import itertools
import json
import os
import pathlib
import select
import signal
import sys
from contextlib import suppress

MAX_ERROR_CHARACTERS = 900
"""Maximum characters of an error's text. An answer is then small enough to be written to the socket in one piece."""


def load(settings):
    """Load the environment with these settings. Returns it and its first tasks."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    environment = loaders.load_environment(loaders.resolve_env_config(settings["env"]))
    return environment, list(itertools.islice(environment.taskset, settings["max_tasks"]))


async def played(environment, task, base_url):
    """Play a task against the endpoint and return its reward. Raises RuntimeError with the errors of the episode."""
    vf = importlib.import_module("verifiers.v1")
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    context = vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
    async with environment.serving():
        episode = await environment.run_episode(task, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
    return float(sum(trace.reward for trace in episode.traces))


def load_process_tree():
    """Import megarl's `process_tree.py` by its path, because this interpreter need not have megarl."""
    path = pathlib.Path(__file__).parents[1] / "processes" / "process_tree.py"
    spec = importlib.util.spec_from_file_location("process_tree", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def play(environment, tasks, request, connection):
    """Play a task in this forked process, and send its reward or error."""
    # The fork must not wake the parent's loop.
    signal.set_wakeup_fd(-1)
    os.environ["OPENAI_API_KEY"] = request["api_key"]
    try:
        outcome = {"reward": asyncio.run(played(environment, tasks[request["task"]], request["base_url"]))}
    except BaseException as error:
        outcome = {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]}
    answer(connection, {"id": request["id"], **outcome})


def answer(connection, message):
    os.write(connection, json.dumps(message).encode() + b"\n")


def serve(connection, environment, tasks):
    """Fork a process for each request, until the driver closes the connection."""
    process_tree = load_process_tree()
    # `select` also wakes for SIGCHLD through this pipe, so ended forks are noticed at once.
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    running = {}
    incomplete = b""
    while True:
        ready, _, _ = select.select([connection, woken], [], [])
        if woken in ready:
            os.read(woken, 512)
            for number, status in reap(running, process_tree.kill_tree):
                answer(connection, {"id": number, "error": f"ended with {os.waitstatus_to_exitcode(status)}"})
        if connection not in ready:
            continue
        part = os.read(connection, 1 << 16)
        if not part:
            return
        *lines, incomplete = (incomplete + part).split(b"\n")
        for request in map(json.loads, lines):
            if "kill" not in request:
                pid = process_tree.fork_child(functools.partial(play, environment, tasks, request, connection))
                running[pid] = request["id"]
                continue
            for pid in [pid for pid, number in running.items() if number == request["kill"]]:
                process_tree.kill_tree(pid)


def reap(running, kill_tree):
    """Collect ended forks and kill their remaining processes. Yields the request number and exit status of failed
    ones.
    """
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            kill_tree(pid)
            number = running.pop(pid, None)
            if number is not None and status != 0:
                yield number, status


def main():
    # Error messages of the driver show standard error alone, so everything printed goes there.
    os.dup2(2, 1)
    connection = int(sys.argv[1])
    # Programs started by a harness must not get it.
    os.set_inheritable(connection, False)
    # Modules next to this file have names of libraries. The user's own modules are in the current folder.
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here] + [os.getcwd()]
    # The harness finds programs of the interpreter's environment, such as uv, by PATH.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    line = b""
    # Read byte by byte: a buffer would swallow later requests.
    while not line.endswith(b"\n"):
        part = os.read(connection, 1)
        if not part:
            return
        line += part
    try:
        environment, tasks = load(json.loads(line))
    except BaseException as error:
        answer(connection, {"refused": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]})
        return
    answer(connection, {"ready": True, "num_tasks": len(tasks)})
    serve(connection, environment, tasks)


if __name__ == "__main__":
    main()
