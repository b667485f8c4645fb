"""Gloo ranks forked from a process that has imported everything: eight of them start in a second, not in minutes."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


def as_rank(world_size: int) -> None:
    """Restart this program in the environment of megarl's ranks, unless it has it already. Forks inherit it."""
    from megarl.platform.device import rank_environment

    environment = rank_environment(world_size)
    if any(os.environ.get(name) != value for name, value in environment.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})


def run_forked(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(*args)` on every rank of a gloo world, with one thread each. Returns results by rank.

    Raises SystemExit with the traceback of the first rank that failed. All processes have ended then.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(target=_run_rank, args=(function, rank, world_size, f"{folder}/store", pipe[1], args))
            for rank, pipe in enumerate(pipes)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            return _receive_results([receiver for receiver, _ in pipes])
        finally:
            for process in processes:
                process.kill()
                process.join()


def _receive_results(receivers: list[Connection]) -> list[Any]:
    """Return the results of all ranks. Raises SystemExit with the traceback of a rank that failed."""
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        ready = wait([r for i, r in enumerate(receivers) if i not in results])
        for rank in [i for i, receiver in enumerate(receivers) if receiver in ready]:
            try:
                is_done, results[rank] = receivers[rank].recv()
            except EOFError:
                is_done, results[rank] = False, "it was killed (out of memory?)"
            if not is_done:
                raise SystemExit(f"rank {rank} failed: {results[rank]}")
    return [results[rank] for rank in range(len(receivers))]


def _run_rank(
    function: Callable[..., Any], rank: int, world_size: int, store: str, answer: Connection, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    from megarl.groups import rendezvous, world

    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
    torch.set_num_threads(1)
    try:
        rendezvous.set_rendezvous(rendezvous.Rendezvous(b"a benchmark has no secrets", file=store))
        world.initialize(3600.0)
        answer.send((True, function(*args)))
        dist.barrier()
    except BaseException:
        answer.send((False, traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)
