"""A pool of processes that run reward functions, each killed if it does not answer in time.

A thread per process talks to it over a pipe; the event loop only awaits the threads. A process serves one completion at
a time, so killing it loses no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import multiprocessing
import os
import queue
import resource
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Protocol

from megarl.platform.processes import die_with
from megarl.rewards import resolve
from megarl.types import ConfigError, PeerLostError, Reward

START_TIMEOUT_SECONDS = 300.0
MEMORY_LIMIT_BYTES = 4 << 30

_ZERO = Reward(score=0.0, format_valid=False, answer_correct=False)
_SPAWN = multiprocessing.get_context("spawn")
_logger = logging.getLogger(__name__)


class Scorer(Protocol):
    """One reward process, somewhere."""

    def ask(self, completion_text: str, answer: str) -> Reward:
        """Its reward for a completion; TimeoutError or ScoringError mean that this completion has none."""
        ...

    def close(self) -> None:
        """Kill it."""


MakeScorer = Callable[[Sequence[str], float, float], Scorer]
"""Starts a process for reward functions, with the score of a right answer and the seconds for one completion."""


class RewardPool:
    """Score completions in `num_workers` processes that live until `close`.

    A completion whose scoring takes more than `timeout_seconds`, raises, ends its process, or gives anything but a
    Reward with a finite score, is scored zero and counted in `num_timeouts` or `num_errors`. The clock starts when a
    process has imported the functions and takes the completion. Construction starts the processes without waiting
    for them; the thread that constructs the pool must outlive it. `make_worker` says where the processes are.
    """

    def __init__(
        self,
        functions: Sequence[str],
        *,
        num_workers: int,
        timeout_seconds: float,
        correct_score: float,
        make_worker: MakeScorer | None = None,
    ) -> None:
        self.num_timeouts = 0
        self.num_errors = 0
        self._count_lock = threading.Lock()
        make = make_worker or RewardWorker
        self._workers = [make(tuple(functions), correct_score, timeout_seconds) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[Scorer] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(max(1, num_workers), thread_name_prefix="reward")

    async def score(self, completion_text: str, answer: str) -> Reward:
        """The sum of the functions' scores; format and answer are good if all functions say so.

        Any number may be awaited at once; each waits for a free process. Raises ConfigError if a function cannot be
        imported, PeerLostError if the processes do not start or the pool is closed meanwhile.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._score, completion_text, answer)

    def close(self) -> None:
        """Kill the processes and drop what they were scoring; calling it again does nothing."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(cancel_futures=True)

    def _score(self, completion_text: str, answer: str) -> Reward:
        worker = self._idle.get()  # never waits: there are as many threads as workers
        try:
            return worker.ask(completion_text, answer)
        except TimeoutError:
            with self._count_lock:
                self.num_timeouts += 1
        except ScoringError as error:
            with self._count_lock:
                self.num_errors += 1
                level = logging.WARNING if self.num_errors == 1 else logging.DEBUG
            _logger.log(level, "a reward function failed, its completion scores zero: %s", error)
        finally:
            self._idle.put(worker)
        return _ZERO


class ScoringError(Exception):
    """A function raised, ended its process, or returned no proper Reward."""


class RewardWorker:
    """One process and the pipe to it; used by one thread at a time, but closed by any."""

    def __init__(self, functions: Sequence[str], correct_score: float, timeout_seconds: float) -> None:
        self._functions, self._correct_score, self._timeout_seconds = functions, correct_score, timeout_seconds
        self._lock = threading.Lock()
        self._is_closed = False
        self._start()

    def ask(self, completion_text: str, answer: str) -> Reward:
        if not self._is_ready:
            self._wait_until_ready()
        try:
            self._connection.send((completion_text, answer))
            if not self._connection.poll(self._timeout_seconds):
                self._restart()
                raise TimeoutError
            reply = self._connection.recv()
        except (EOFError, ConnectionError):
            self._restart()
            raise ScoringError("the reward process ended while scoring") from None
        if isinstance(reply, str):
            raise ScoringError(reply)
        return reply

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._kill()

    def _start(self) -> None:
        self._connection, child_connection = _SPAWN.Pipe()
        self._is_ready = False
        self._process = _SPAWN.Process(
            target=_serve, args=(child_connection, self._functions, self._correct_score), name="reward", daemon=True
        )
        self._process.start()
        child_connection.close()

    def _restart(self) -> None:
        with self._lock:
            if self._is_closed:
                raise PeerLostError("the reward processes were closed while a completion was scored")
            self._kill()
            self._connection.close()
            self._start()

    def _wait_until_ready(self) -> None:
        try:
            message = self._connection.recv() if self._connection.poll(START_TIMEOUT_SECONDS) else "it is silent"
        except (EOFError, ConnectionError):
            message = "it ended"
        if message is None:
            self._is_ready = True
            return
        self._restart()
        if isinstance(message, ConfigError):
            raise message
        functions = ", ".join(self._functions)
        raise PeerLostError(f"a reward process for {functions} did not start: {message}; see its output above.")

    def _kill(self) -> None:
        if self._process.exitcode is None:
            try:
                os.killpg(self._process.pid or 0, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()  # too young to lead a group of its own
        self._process.join()


def _serve(connection: Connection, functions: Sequence[str], correct_score: float) -> None:
    """Body of a reward process: send None when ready (or the ConfigError), then a Reward or an error text for each."""
    os.setsid()  # what the functions start dies with the process, and Ctrl-C is the driver's alone
    parent = multiprocessing.parent_process()
    die_with(parent.pid if parent else None)
    try:
        rewards = {name: resolve(name) for name in functions}
    except ConfigError as error:
        connection.send(error)
        return
    _limit_memory()
    connection.send(None)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            completion_text, answer = connection.recv()
            try:
                reply = _sum(rewards, completion_text, answer, correct_score)
            except BaseException:  # math-verify's time-out and SystemExit are no Exception
                reply = traceback.format_exc()
            connection.send(reply)


def _sum(rewards: dict[str, Callable[..., Any]], completion_text: str, answer: str, correct_score: float) -> Reward:
    total, format_valid, answer_correct = 0.0, True, True
    for name, reward in rewards.items():
        result = reward(completion_text, answer, correct_score=correct_score)
        if not isinstance(result, Reward) or not math.isfinite(result.score):
            raise ValueError(f"{name} returned {result!r:.200}, not a Reward with a finite score")
        total += float(result.score)
        format_valid &= bool(result.format_valid)
        answer_correct &= bool(result.answer_correct)
    return Reward(total, format_valid, answer_correct)


def _limit_memory() -> None:
    """Cap the address space at what the imports took plus the limit: thread pools alone may reserve gigabytes."""
    with open("/proc/self/statm") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used_bytes + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
