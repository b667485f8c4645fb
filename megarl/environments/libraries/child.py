"""The program of a child process of an environment library, run in the library's own interpreter.

It is started by its path. It imports nothing from megarl except a few files, also by path.

    python child.py ADAPTER DESCRIPTOR

The descriptor is a socket with messages of `processes/frames.py`. The first message has the adapter's settings and
`memory_bytes`, the limit of the address space or null. `ADAPTER_adapter.py`, next to this file, has a class
`Library(settings, load_file)` loading the library. `load_file` imports a file of megarl by its path in the package.
The `introduction` of the object, a dictionary, is sent to the driver.

If the library's `is_forked` is False, requests are steps of episodes, carried out one after the other. The method
`make_episode(settings)` returns an object with the methods of the requests. Requests and their answers:

    {"id": 1, "session": "a", "closed": [], "do": "reset", "settings": {...}, "index": 7, "is_heldout": null}
    {"id": 1, "value": {"text": "...", "system": null}}
    {"id": 2, "session": "a", "closed": [], "do": "step", "text": "..."}
    {"id": 2, "value": {"text": "...", "reward": 0.5, "done": true, "correct": false}}

Sessions in `closed` are closed before the request.

If `is_forked` is True, the method `play(request)` carries out each request in a fork of this process. Answers come in
any order, each shorter than 32 KiB. {"cancel": 1} kills the fork of request 1. If the first message has `end_seconds`
above 0, the fork gets SIGTERM first, and so many seconds to end. So do all forks when the driver closes the connection
or ends.

An exception of the library is the `error` of an answer.
"""

import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import random
import resource
import select
import signal
import socket
import sys
import time

MAX_ERROR_CHARACTERS = 2000
"""Maximum characters of an error's text. A fork's answer must stay below 32 KiB, because Linux may split longer writes
to the socket.
"""
SEED_STEP = 1_000_003
"""Prime stride between seeds, so that neighbouring seeds do not share problems."""
MAX_SEED = 1 << 32


def load_file(path):
    """Import a file of megarl by its path in the package, because this interpreter may lack megarl."""
    file = pathlib.Path(__file__).parents[2] / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Session:
    """An episode with its own state of the global random generators, so that episodes do not interfere."""

    def __init__(self, episode):
        self.episode = episode
        self.states = None

    def call(self, method, *arguments):
        if self.states is not None:
            set_random_states(self.states)
        value = getattr(self.episode, method)(*arguments)
        self.states = random_states()
        return value


def random_states():
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy else None


def set_random_states(states):
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


class Episodes:
    """Episodes in progress, by session name."""

    def __init__(self, make_episode):
        self.make_episode = make_episode
        self.sessions = {}

    def play(self, request):
        """Carry out a request and return its value."""
        for name in request["closed"]:
            session = self.sessions.pop(name, None)
            # An error while closing an episode must not fail the request of another episode.
            # SystemExit of a user's module is not an Exception.
            with contextlib.suppress(BaseException):
                if session is not None:
                    session.call("close")
        if request["do"] == "step":
            return self.sessions[request["session"]].call("step", request["text"])
        # Libraries may use global random generators to make an episode: seed them by the problem.
        random.seed(request["index"])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(request["index"] % MAX_SEED)
        session = self.sessions[request["session"]] = Session(self.make_episode(request["settings"]))
        seed = (request["settings"]["seed"] * SEED_STEP + request["index"]) % MAX_SEED
        return session.call("reset", seed, request["is_heldout"])


def answer(play, request):
    """Carry out a request, and return its `value`, or its `error` as text."""
    try:
        value = play(request)
        json.dumps(value, allow_nan=False)
    # SystemExit and timeouts of some libraries are not Exceptions.
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]}
    return {"value": value}


class ForkServer:
    """Answers each request in a fork of this process, until the driver closes the connection.

    `answer` carries out a request. A fork that must end gets SIGTERM, and is killed `end_seconds` later.
    """

    def __init__(self, connection, answer, frames, process_tree, end_seconds):
        self.connection, self.answer, self.end_seconds = connection, answer, end_seconds
        self.frames, self.process_tree = frames, process_tree
        self.request_id_by_pid, self.deadline_by_pid = {}, {}
        # Through this pipe SIGCHLD wakes `select`, so ended forks are noticed at once.
        self.wake_read_end, wake_write_end = os.pipe()
        os.set_blocking(wake_write_end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write_end, warn_on_full_buffer=False)

    def run(self):
        """Answer requests until the connection ends, then end all forks."""
        while True:
            if self.connection not in self.wait_for_events([self.connection]):
                continue
            try:
                request = self.frames.receive(self.connection, None)
            except (EOFError, OSError):
                break
            if "cancel" not in request:
                self.start_fork(request)
                continue
            for pid in [pid for pid, request_id in self.request_id_by_pid.items() if request_id == request["cancel"]]:
                self.end_fork(pid)
        for pid in self.request_id_by_pid:
            self.end_fork(pid)
        while self.request_id_by_pid:
            self.wait_for_events([])

    def start_fork(self, request):
        """Fork a process that answers the request. If no process can be forked, answer with this error."""

        def answer_in_fork():
            # The fork must not wake the parent's loop.
            signal.set_wakeup_fd(-1)
            self.frames.answer_request(self.connection, request, self.answer)

        try:
            self.request_id_by_pid[self.process_tree.fork_child(answer_in_fork)] = request["id"]
        except OSError as error:
            text = f"no process can be forked: {error}"
            self.frames.send(self.connection, {"id": request["id"], "error": text})

    def end_fork(self, pid):
        # A second call must not extend the deadline.
        if pid not in self.deadline_by_pid:
            self.deadline_by_pid[pid] = time.monotonic() + self.end_seconds
            if self.end_seconds:
                self.process_tree.send_signal(pid, signal.SIGTERM)

    def wait_for_events(self, descriptors):
        """Wait until a descriptor is readable, a fork has ended, or a deadline is over. Returns what is readable.

        Overdue forks are killed. Failed forks are reported as the errors of their requests.
        """
        deadlines = self.deadline_by_pid.values()
        timeout_seconds = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        ready, _, _ = select.select([*descriptors, self.wake_read_end], [], [], timeout_seconds)
        now = time.monotonic()
        for pid in [pid for pid, deadline in self.deadline_by_pid.items() if deadline <= now]:
            self.process_tree.kill_tree(pid)
            del self.deadline_by_pid[pid]
        if self.wake_read_end in ready:
            os.read(self.wake_read_end, 512)
            for request_id, status in self.reap_forks():
                error = f"ended with {os.waitstatus_to_exitcode(status)}"
                # After the end of the driver, its other forks still stop what they have started.
                with contextlib.suppress(OSError):
                    self.frames.send(self.connection, {"id": request_id, "error": error})
        return ready

    def reap_forks(self):
        """Collect the status of ended forks, and kill their descendants. Yields request id and exit status of failed
        forks.
        """
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self.process_tree.kill_tree(pid)
                self.deadline_by_pid.pop(pid, None)
                request_id = self.request_id_by_pid.pop(pid, None)
                if request_id is not None and status != 0:
                    yield request_id, status


def limit_address_space(limit_bytes):
    """Limit the address space of this process, in bytes.

    Raises MemoryError if the process already uses more: the limit would then have hardly any effect.
    """
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, resource.RLIM_INFINITY))
    used_bytes = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if used_bytes > limit_bytes:
        raise MemoryError(
            f"the Python process with the imported library alone already takes {used_bytes >> 20} MiB of address "
            "space; raise the memory limit"
        )


def main():
    """Load the library's adapter, and answer the driver's requests, in this process or in forks."""
    # The driver's error messages quote only standard error: print everything there.
    os.dup2(2, 1)
    name, descriptor = sys.argv[1:]
    frames = load_file("processes/frames.py")
    process_tree = load_file("processes/process_tree.py")
    process_tree.ignore_ending_signals()
    connection = socket.socket(fileno=int(descriptor))
    # Programs started by the library must not inherit the connection.
    connection.set_inheritable(False)
    # Modules next to this file must not hide the user's modules in the current folder.
    folder = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != folder] + [os.getcwd()]
    library_class = load_file(f"environments/libraries/{name}_adapter.py").Library
    end_seconds = 0.0

    def start(settings):
        nonlocal end_seconds
        end_seconds = settings["end_seconds"]
        try:
            library = library_class(settings, load_file)
            if settings["memory_bytes"] is not None:
                limit_address_space(settings["memory_bytes"])
        # SystemExit of a user's module is not an Exception.
        except BaseException as error:
            text = f"{name} cannot be loaded: {type(error).__name__}: {error}"
            raise frames.RefusedError(text) from error
        play = library.play if library.is_forked else Episodes(library.make_episode).play
        introduction = {"is_forked": library.is_forked, **library.introduction}
        return introduction, functools.partial(answer, play)

    if not library_class.is_forked:
        frames.answer_requests(connection, start)
        return
    with contextlib.suppress(EOFError, OSError):
        answer_request = frames.introduce(connection, start)
        if answer_request is not None:
            ForkServer(connection, answer_request, frames, process_tree, end_seconds).run()


if __name__ == "__main__":
    main()
