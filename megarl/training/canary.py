"""Canary: a check for faulty GPUs. Each data-parallel replica computes a fixed batch twice and compares checksums."""

from __future__ import annotations

import time

import numpy as np

from megarl.data.token_batch import TokenBatch
from megarl.reshard.checks.fingerprint import checksum
from megarl.tracking.model_outputs import CanaryReport, Output
from megarl.training.module_trace import ModuleTrace
from megarl.training.training_engine import TrainingEngine
from megarl.types import TrainingSequence

_MAX_TOKENS = 256
"""Maximum tokens of a canary sequence: enough to use the kernels of training, and cheap."""


def canary_rows(model: TrainingEngine) -> list[TokenBatch]:
    """Return the canary's fixed batch of random tokens: as few rows as the parallel sizes allow, one sequence each."""
    recipe = model.recipe
    num_tokens = min(_MAX_TOKENS, recipe.trainer.max_tokens_per_forward or recipe.trainer.max_tokens_per_microbatch)
    # 2 makes the canary's random stream differ from other streams with this seed.
    random = np.random.default_rng([recipe.seed, 2])
    tokens = random.integers(0, model.shape.vocab_size, (model.parallel.rows_multiple, num_tokens))
    is_predicted = np.arange(num_tokens) > 0
    return [TokenBatch.from_sequences([TrainingSequence(token_ids=row, loss_mask=is_predicted)]) for row in tokens]


def compute_canary(model: TrainingEngine) -> CanaryReport:
    """Compute the canary batch twice in evaluation mode; return checksums of all module outputs and the seconds.

    A collective over the trainer's ranks.
    """
    start = time.monotonic()
    rows = canary_rows(model)
    first_outputs, second_outputs = _record_outputs(model, rows), _record_outputs(model, rows)
    return CanaryReport(first_outputs, [output.number for output in second_outputs], time.monotonic() - start)


def _record_outputs(model: TrainingEngine, rows: list[TokenBatch]) -> list[Output]:
    module_trace = ModuleTrace(model.chunks, checksum)
    with module_trace.recording():
        model.forward(rows)
    return module_trace.outputs()
