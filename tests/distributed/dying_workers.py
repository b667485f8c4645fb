"""Workers of a run with separate engines, one of which dies in the middle of a reshard."""

from __future__ import annotations

import os

from megarl.reshard import transport
from megarl.worker import engine_worker, trainer_worker
from megarl.worker.reshard import cross_world_reshard


def _choose(via):
    if via == "gloo":
        transport.is_one_machine = lambda is_willing, group: False


class Trainer(trainer_worker.TrainerWorker):
    def __init__(self, rank, world_size, via, recipe, parallel):
        _choose(via)
        super().__init__(rank, world_size, recipe, parallel)


class Engine(engine_worker.EngineWorker):
    def __init__(self, rank, world_size, via, recipe, parallel, replica):
        _choose(via)
        super().__init__(rank, world_size, recipe, parallel, replica)

    def die_in_reshard(self, number):
        """From now on, this signal ends or stops the rank when the first bucket arrives."""

        def die(slots):
            os.kill(os.getpid(), number)

        for kind in (transport.PrivateSlots, transport.SharedSlots):
            kind.arrive = die

    def stop_in_join(self, number):
        """From now on, this signal stops the rank on its way to a cross-world group."""
        cross_world_reshard.join_group = lambda *args, **kwargs: os.kill(os.getpid(), number)

    def fail_in_own_world(self, number):
        """From now on, a collective of the rank's own world fails in a reshard."""

        def fail(tags):
            raise RuntimeError("NCCL error")

        self._engine.wake = fail

    def version(self):
        return self._engine.weight_version
