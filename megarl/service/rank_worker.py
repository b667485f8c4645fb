"""Worker class of a rank of a service: trainer and engine alternate, and the trainer has many models' adapters."""

from __future__ import annotations

from typing import Any

from megarl.service.rank_adapters import Adapters
from megarl.worker.colocated import Worker


class ServiceWorker(Worker):
    """Worker of a rank of a service: it trains and samples. The driver calls `adapters` by name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapters = Adapters(self.policy, self.parallel)
