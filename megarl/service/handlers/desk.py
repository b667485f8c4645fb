"""The service's desk: handlers for each kind of request, and everything that ends by time."""

from __future__ import annotations

import time
from collections.abc import Callable

from megarl.service.background import Background
from megarl.service.handlers.models import Models
from megarl.service.handlers.sampling import Sampling
from megarl.service.handlers.saves import Saves
from megarl.service.handlers.sessions import Sessions
from megarl.service.handlers.training_calls import TrainingCalls
from megarl.service.queueing.admission import QueueLimits
from megarl.service.queueing.ledger import Ledger
from megarl.service.storage.checkpoints import Checkpoints
from megarl.service.storage.published import PublishedWeights
from megarl.service.trainer import ServedModel, Trainer

# SDK 0.38 sends a heartbeat every 10 seconds, so only a lost client is silent for this long.
SILENT_SECONDS = 600.0
"""Seconds without requests until a session ends. Its models and published weights then leave the memory."""
# Between two steps a client's loop samples for minutes. A rank reads a state of 2 GB in seconds.
IDLE_SECONDS = 1800.0
"""Default seconds without requests until a model moves from host memory to disk."""


class Desk:
    """Front end of the training service. A request is answered at once with the id of a future, and runs as a trainer
    call.

    Every id in a request is checked against the owner of its key. Another owner's id gets the same answer as an unknown
    one.
    """

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: Checkpoints,
        report: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        limits: QueueLimits | None = None,
        *,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self.served: ServedModel = trainer.served
        self.checkpoints, self._clock, self._idle_seconds = checkpoints, clock, idle_seconds
        self.report = report
        """Called with errors of the service."""
        self.ledger = Ledger(report, clock, limits)
        self.sessions = Sessions(clock)
        published_weights = PublishedWeights(trainer, checkpoints)
        shared_parts = (trainer, checkpoints, self.sessions, self.ledger, published_weights, Background(), clock)
        self.models, self.training = Models(*shared_parts), TrainingCalls(*shared_parts)
        self.saves, self.sampling = Saves(*shared_parts), Sampling(*shared_parts)

    def finish_session(self, session_id: str, owner: str) -> None:
        """End a session, and free its memory soon. Saved checkpoints stay."""
        self.models.end_session(self.sessions.find(session_id, owner))

    async def expire(self) -> None:
        """End silent sessions, move idle models to disk, forget old results, and delete expired checkpoints."""
        now = self._clock()
        # First the work that needs no turn of the trainer: a long call of one model must not delay the ledger's other
        # models.
        self.ledger.expire_results()
        for session in self.sessions.silent_since(now - SILENT_SECONDS):
            self.models.end_session(session)
        await self.models.move_idle_models(now - self._idle_seconds)
        self.checkpoints.delete_expired()

    async def close(self) -> None:
        await self.ledger.close()
