"""The pool of processes: what its end leaves."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from megarl.processes.process_pool import ProcessPool
from megarl.processes.server_process import NO_LIMITS, RequestLimits, ServerSettings


class Process:
    """Process of a test, which records that it was killed."""

    def __init__(self) -> None:
        self.is_killed = False

    def wait_until_ready(self) -> dict[str, Any]:
        return {}

    def request(self, message: Mapping[str, Any], limits: RequestLimits = NO_LIMITS) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.is_killed = True


def test_close_kills_a_process_whose_kill_no_thread_has_begun() -> None:
    process = Process()
    settings = ServerSettings("", "a process", "a.field", {}, (), ".", memory_bytes=1 << 30)
    pool = ProcessPool(settings, 1, log_name="process", make_server=lambda *_: process)
    [place] = pool.places
    place.start()
    is_free = threading.Event()
    for _ in range(2):
        pool.submit(lambda: is_free.wait(60) and None)
    place.kill()
    later = threading.Timer(0.1, is_free.set)
    later.start()
    pool.close()
    later.join()
    assert process.is_killed
