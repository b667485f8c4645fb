"""A worker that meets ranks of other groups on a bridge."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from megarl.groups import cancelled, cross_world, rendezvous, signed
from megarl.groups.cross_world import close_bridge, open_bridge, rank_in
from megarl.groups.peer_errors import told_of_bridge
from megarl.platform import device

_LONG_BYTES = 1 << 27


class Bridging:
    """A rank in the world of its group, and on a bridge between groups once it has joined one."""

    def __init__(self, rank, world_size):
        self.rank = rank
        device.init_world(60.0)
        self.bridge = None
        self.stops = self.is_faulty = False
        self.fate = "", 0

    def join(self, meeting, topology, version):
        if self.bridge is not None:
            close_bridge(self.bridge)
        if self.stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            self.bridge = open_bridge(meeting, self.rank, 60.0)
        except Exception as error:
            self.bridge = None
            return told_of_bridge(error)
        self.version = version
        return {"lost": "a fault of its own"} if self.is_faulty else {}

    def stop_in_join(self):
        self.stops = True

    def leave_every_bridge(self):
        self.is_faulty = True

    def signal_when_all_have_come(self, number):
        """From now on, this signal ends or stops the rank at a bridge, before the others can connect to it."""
        await_all = cross_world._await_all

        def come(*args):
            await_all(*args)
            os.kill(os.getpid(), number)

        cross_world._await_all = come

    def signal_in_reshard(self, moment, number):
        """From now on, this signal ends or stops the rank in a reshard."""
        self.fate = moment, number

    def reshard(self, verify, version):
        try:
            self._send_much()
            signed.gather(None, self.bridge, purpose="test")
        except Exception as error:
            told = told_of_bridge(error)
            self.bridge = close_bridge(self.bridge)
            return told
        self.version = version
        return {}

    def _send_much(self):
        """Ranks 0 and 2 send each other a long message."""
        moment, number = self.fate
        if moment == "before a message":
            os.kill(os.getpid(), number)
        size, own = self.bridge.size(), rank_in(self.bridge)
        lengths = [_LONG_BYTES * ({own, other} == {0, 2}) for other in range(size)]
        sent, received = (torch.full((sum(lengths),), value, dtype=torch.uint8) for value in (1, 0))
        work = dist.all_to_all_single(received, sent, lengths, lengths, self.bridge, async_op=True)
        if moment == "in a message":
            while not received[_LONG_BYTES // 16]:
                time.sleep(1e-4)
            os.kill(os.getpid(), number)
        cross_world.wait(cross_world.begun(work, self.bridge), self.bridge)

    def world(self):
        """The name of this rank's world, and a key that all of the run have."""
        return rendezvous.world_name(), rendezvous.derived_key("test")

    def place(self):
        """Ranks in world and on its node, and the sum of one over the world."""
        total = torch.ones(1)
        dist.all_reduce(total)
        return self.rank, os.environ["LOCAL_RANK"], int(total.item())

    def exchange(self):
        """What all ranks of the bridge say of themselves, and one number from each of them."""
        size = self.bridge.size()
        told = signed.gather((rank_in(self.bridge), os.getpid()), self.bridge, purpose="test")
        received = torch.empty(size)
        sent = torch.arange(size) + 100.0 * rank_in(self.bridge)
        dist.all_to_all_single(received, sent, [1] * size, [1] * size, self.bridge)
        return told, received.tolist(), self.version

    def wait_until_broken(self, name):
        """Why this bridge was broken off, once it is."""
        while (reason := cancelled.reason_of(name)) is None:
            time.sleep(0.01)
        return reason

    def pid(self):
        return os.getpid()

    def echo(self, value):
        return self.rank, value

    def fail(self, rank):
        """On this rank of the bridge an error; the others meet a collective that it does not come to."""
        if rank_in(self.bridge) == rank:
            close_bridge(self.bridge)
            raise ValueError("the first cause")
        signed.gather(None, self.bridge, purpose="test")
