"""Sequences for tests of losses that look some tokens ahead."""

from __future__ import annotations

import numpy as np

from megarl.types import TrainingSequence


def make_sequences() -> list[TrainingSequence]:
    """Prompts and answers of odd lengths, some with an untrained part, one of two tokens; uneven weights."""
    random = np.random.default_rng(3)
    sequences = []
    for length, prompt in ((13, 4), (2, 1), (21, 1), (9, 8), (17, 5), (6, 2)):
        mask = np.arange(length) >= prompt
        mask[7:9] = False
        weights = (random.uniform(0.2, 1.0, length) / 40).astype(np.float32)
        sequences.append(TrainingSequence(random.integers(1, 200, length), mask, token_weights=weights))
    return sequences
