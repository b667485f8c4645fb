"""Parts of a service that its request handlers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megarl.service.background import Background
from megarl.service.handlers.sessions import Sessions
from megarl.service.queueing.ledger import Ledger
from megarl.service.storage.checkpoints import Checkpoints
from megarl.service.storage.published import PublishedWeights
from megarl.service.trainer import Trainer


@dataclass(eq=False)
class RequestHandlers:
    """Base class of handlers that turn requests of one kind into calls of the trainer."""

    _trainer: Trainer
    _checkpoints: Checkpoints
    _sessions: Sessions
    _ledger: Ledger
    _published: PublishedWeights
    _background: Background
    _clock: Callable[[], float]
