"""Updates that the tests of the reshard make of a trainer's weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.types import TrainingSequence


def update(worker: Any, parallel: ParallelConfig) -> None:
    """One optimizer step on two rows of random tokens, other ones on each data-parallel replica."""
    rng = np.random.default_rng(parallel.coordinates(worker.rank).dp)
    trained = np.arange(17) > 0
    rows = [
        TokenBatch.from_sequences(
            [
                TrainingSequence(
                    token_ids=rng.integers(0, worker.policy.shape.vocab_size, 17),
                    loss_mask=trained,
                    token_weights=np.where(trained, 1 / 16, 0).astype(np.float32),
                    advantages=trained.astype(np.float32),
                )
            ]
        )
        for _ in range(2)
    ]
    worker.policy.onload()
    worker.policy.update(rows)
