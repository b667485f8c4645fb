"""Workers of a run with separate engines, whose weights are sent while the trainers go on."""

from __future__ import annotations

import hashlib
import os
import time

import dying_workers
from weight_updates import update

from megarl.reshard import transport


def _hash(tensors):
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors):
        digest.update(name.encode() + tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _append(file, line):
    with open(file, "a") as stream:
        stream.write(f"{line}\n")


class Trainer(dying_workers.Trainer):
    def note_order(self, file):
        """From now on, this file gets a line with the rank when it sends its first bucket of a reshard."""
        for kind in (transport.PrivateSlots, transport.SharedSlots):

            def noted(slots, exchange, claim=kind.claim):
                if exchange == 0:
                    _append(file, f"trainer {self.rank} sends")
                return claim(slots, exchange)

            kind.claim = noted

    def learn(self):
        update(self, self.parallel)

    def weights_hash(self):
        return _hash(self.policy.parameters.items())

    def fail_in_reshard(self):
        """From now on, the first trainer has an error of its own in each reshard."""

        def fail(**settings):
            raise ValueError("an error of its own")

        if self.rank == 0:
            self.cross_world_reshard.rank_reshard.run = fail


class Engine(dying_workers.Engine):
    def __init__(self, rank, world_size, via, recipe, parallel, replica):
        self.replica = replica
        super().__init__(rank, world_size, via, recipe, parallel, replica)

    def note_order(self, file):
        """From now on, this file gets a line when the engine, which has paused, takes part in a reshard."""
        reshard = self.reshard

        def noted(*args):
            _append(file, f"engine {self.replica} paused")
            return reshard(*args)

        self.reshard = noted

    def wait_in_reshard(self, file):
        """From now on, each bucket is taken only once this file is there."""
        for kind in (transport.PrivateSlots, transport.SharedSlots):

            def late(slots, arrive=kind.arrive):
                while not os.path.exists(file):
                    time.sleep(0.01)
                return arrive(slots)

            kind.arrive = late

    def weights_hash(self):
        return _hash(self._engine.model.named_parameters())
