"""A worker that meets ranks of other groups on a bridge."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist

from megarl.platform import device, rendezvous, signed
from megarl.platform.bridge import close_bridge, open_bridge, rank_in
from megarl.platform.left_collective import PeerGoneError


class Bridging:
    """A rank in the world of its group, and on a bridge between groups once it has joined one."""

    def __init__(self, rank, world_size):
        self.rank = rank
        device.init_world(60.0)
        self.bridge = None
        self.stops = self.is_faulty = False

    def join(self, meeting, topology, version):
        if self.bridge is not None:
            close_bridge(self.bridge)
        if self.stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            self.bridge = open_bridge(meeting, self.rank, 60.0)
        except PeerGoneError as error:
            self.bridge = None
            return {"lost": str(error), "missing": error.missing}
        self.version = version
        return {"lost": "a fault of its own"} if self.is_faulty else {}

    def stop_in_join(self):
        self.stops = True

    def leave_every_bridge(self):
        self.is_faulty = True

    def reshard(self, verify, version):
        signed.gather(None, self.bridge, purpose="test")
        self.version = version
        return {}

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
