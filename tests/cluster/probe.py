"""A worker whose methods do what the tests of worker groups need of them."""

import atexit
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from megarl import faults
from megarl.types import ConfigError, DataError


class NarrowConfigError(ConfigError):
    """Known to the rank only: the driver sees its nearest relative in the vocabulary."""


class Stuck:
    """A worker of which one rank hangs while it is made, on the way to a collective in which the others wait."""

    def __init__(self, rank, world_size, *, stuck):
        import torch.distributed as dist

        if rank == stuck:
            time.sleep(60)
        dist.barrier()


class Probe:
    def __init__(self, rank, world_size, *, scale=1, broken_rank=None):
        if rank == broken_rank:
            raise DataError(f"shard {rank} is missing")
        self.rank, self.world_size, self.scale, self.farewell = rank, world_size, scale, None
        self.heard = []

    def product(self, factor, *, plus=0):
        return self.rank, self.scale * factor * (self.rank + 1) + plus

    def pid(self):
        return os.getpid()

    def session(self):
        return os.getsid(0), os.getpgid(0)

    def environment(self, names):
        return [os.environ.get(name) for name in names]

    def temporary(self):
        return tempfile.gettempdir()

    def listening(self):
        """The addresses that this process listens on."""
        inodes = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists() or link.is_symlink()}
        rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
        return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]

    def collective_that_one_misses(self, missing, seconds):
        """The others give up the collective after so long."""
        from datetime import timedelta

        import torch.distributed as dist

        group = dist.new_group(timeout=timedelta(seconds=seconds))
        if self.rank == missing:
            time.sleep(60)
        dist.barrier(group)

    def reach(self, point):
        """Reach a point at which tests break a process. Returns the fault that it raises, or None."""
        try:
            faults.reach(point)
        except RuntimeError as error:
            return str(error)

    def sleep(self, seconds):
        time.sleep(seconds)

    def wait_for(self, path):
        while not Path(path).exists():
            time.sleep(0.01)

    def meet(self, paths):
        """Show that this rank is here, and wait until another is where it shall be."""
        mine, other = paths
        Path(mine).touch()
        self.wait_for(other)

    def hear(self, word):
        """All words so far, in the order in which they came."""
        self.heard.append(word)
        return list(self.heard)

    def sleep_on(self, rank, seconds):
        time.sleep(seconds if rank == self.rank else 0)

    def reversed(self, array):
        array[:1] += self.rank  # what arrives is the rank's own and writable
        return array[::-1]

    def fail_on(self, rank, kind):
        if rank == self.rank:
            print("last words")
            {
                "raise": self._raise,
                "exit": lambda: os._exit(7),
                "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
                "config": self._raise_config,
                "full": self._fill_a_disk,
                "device": self._lose_the_device,
                "sys.exit": lambda: sys.exit(3),
                "unpicklable": lambda: None,
            }[kind]()
        if kind == "unpicklable":
            return lambda: None
        time.sleep(60)

    def _raise(self):
        raise ValueError("seven is not even")

    def _fill_a_disk(self):
        with open("/dev/full", "wb", buffering=0) as file:
            try:
                file.write(b"x")
            except OSError as error:
                raise RuntimeError("the shard was not written") from error

    def _lose_the_device(self):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    def _raise_config(self):
        raise NarrowConfigError("trainer.tp is 3: the model has 8 heads; take a divisor")

    def join_gloo(self):
        from megarl.groups import world

        world.initialize(60.0)

    def broken_collective(self, victim, kind):
        """The victim dies, or leaves the collective and only later says why; the others wait in the collective."""
        import torch
        import torch.distributed as dist

        if self.rank == victim:
            time.sleep(0.2)
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            dist.destroy_process_group()
            time.sleep(0.4)
            raise ValueError("the cause")
        dist.all_reduce(torch.arange(4.0))

    def fork_and_die_on(self, rank):
        if rank == self.rank:
            if os.fork() == 0:  # a child that holds the rank's socket open
                time.sleep(60)
            os._exit(9)
        time.sleep(60)

    def linger(self):
        """Have the interpreter take its time when it ends."""
        atexit.register(time.sleep, 60)

    def leave_note(self, folder):
        self.farewell = Path(folder) / f"left_{self.rank}"

    def close(self):
        if self.farewell:
            self.farewell.write_text("bye")
