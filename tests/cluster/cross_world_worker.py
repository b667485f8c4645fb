"""A worker that meets ranks of other worlds in a cross-world group."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

from megarl.groups import cancelled, cross_world, rendezvous, signed, world
from megarl.groups.cross_world import join_group, leave_group, rank_in
from megarl.groups.peer_errors import LostPeer, report_loss
from megarl.reshard.reshard_report import ReshardReport

_LONG_BYTES = 1 << 27


class CrossWorldWorker:
    """A rank in the world of its group, and in a cross-world group once it has joined one."""

    def __init__(self, rank, world_size):
        self.rank = rank
        world.initialize(60.0)
        self.group = None
        self.stops = self.is_faulty = self.misreports = False
        self.fate = "", 0

    def close(self):
        leave_group(self.group)
        world.leave()

    def join_and_reshard(self, meeting, topology, version):
        if self.group is not None:
            leave_group(self.group)
        if self.stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            self.group = join_group(meeting, self.rank, 60.0)
        except Exception as error:
            self.group = None
            return report_loss(error)
        self.version = version
        return LostPeer("a fault of its own") if self.is_faulty else ReshardReport()

    def stop_in_join(self):
        self.stops = True

    def leave_every_group(self):
        self.is_faulty = True

    def signal_when_all_have_come(self, number):
        """From now on, this signal ends or stops the rank in a new group, before the others can connect to it."""
        await_all = cross_world._await_all_ranks

        def come(*args):
            await_all(*args)
            os.kill(os.getpid(), number)

        cross_world._await_all_ranks = come

    def signal_in_reshard(self, moment, number):
        """From now on, this signal ends or stops the rank in a reshard. `for ever`: it hangs there."""
        self.fate = moment, number

    def reshard(self, verify, version):
        try:
            self._send_much()
            signed.gather(None, self.group, purpose="test")
        except Exception as error:
            report = report_loss(error)
            self.group = leave_group(self.group)
            return report
        self.version = version
        return LostPeer("nobody", (0,)) if self.misreports else ReshardReport()

    def misreport(self):
        """From now on, a reshard names missing ranks, as only a new group may."""
        self.misreports = True

    def _send_much(self):
        """Ranks 0 and 2 send each other a long message."""
        moment, number = self.fate
        if moment == "before a message":
            os.kill(os.getpid(), number)
        if moment == "for ever":
            time.sleep(600)
        size, own = self.group.size(), rank_in(self.group)
        lengths = [_LONG_BYTES * ({own, other} == {0, 2}) for other in range(size)]
        sent, received = (torch.full((sum(lengths),), value, dtype=torch.uint8) for value in (1, 0))
        work = dist.all_to_all_single(received, sent, lengths, lengths, self.group, async_op=True)
        if moment == "in a message":
            while not received[_LONG_BYTES // 16]:
                time.sleep(1e-4)
            os.kill(os.getpid(), number)
        cross_world.wait(cross_world.register(work, self.group), self.group)

    def world(self):
        """The name of this rank's world, and a key that all of the run have."""
        return rendezvous.world_name(), rendezvous.derived_key("test")

    def place(self):
        """Ranks in world and on its node, and the sum of one over the world."""
        total = torch.ones(1)
        dist.all_reduce(total)
        return self.rank, os.environ["LOCAL_RANK"], int(total.item())

    def exchange(self):
        """What all ranks of the cross-world group say of themselves, and one number from each of them."""
        size = self.group.size()
        told = signed.gather((rank_in(self.group), os.getpid()), self.group, purpose="test")
        received = torch.empty(size)
        sent = torch.arange(size) + 100.0 * rank_in(self.group)
        dist.all_to_all_single(received, sent, [1] * size, [1] * size, self.group)
        return told, received.tolist(), self.version

    def wait_until_cancelled(self, name):
        """Why this cross-world group was cancelled, once it is."""
        while (reason := cancelled.reason_for(name)) is None:
            time.sleep(0.01)
        return reason

    def pid(self):
        return os.getpid()

    def echo(self, value):
        return self.rank, value

    def fail(self, rank):
        """On this rank of the cross-world group an error; the others meet a collective that it does not come to."""
        if rank_in(self.group) == rank:
            leave_group(self.group)
            raise ValueError("the first cause")
        signed.gather(None, self.group, purpose="test")
