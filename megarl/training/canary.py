"""The canary: checksums of all module outputs for one fixed batch, computed twice by each data-parallel replica."""

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
"""Maximum length of a canary sequence. Products of this size use the kernels of training; the pass stays cheap."""


def canary_rows(model: TrainingEngine) -> list[TokenBatch]:
    """Return the canary batch: the smallest number of rows, each a sequence of random tokens. They depend on the
    recipe's seed only.
    """
    recipe = model.recipe
    length = min(_MAX_TOKENS, recipe.trainer.max_tokens_per_forward or recipe.trainer.max_tokens_per_microbatch)
    # 2: the stream of the canary, apart from other uses of the seed.
    random = np.random.default_rng([recipe.seed, 2])
    tokens = random.integers(0, model.shape.vocab_size, (model.parallel.rows_multiple, length))
    mask = np.arange(length) > 0
    return [TokenBatch.from_sequences([TrainingSequence(token_ids=row, loss_mask=mask)]) for row in tokens]


def compute_canary(model: TrainingEngine) -> CanaryReport:
    """Compute the canary batch twice in evaluation mode. A collective over the trainer's ranks."""
    began = time.monotonic()
    rows = canary_rows(model)
    first, second = _outputs(model, rows), _outputs(model, rows)
    return CanaryReport(first, [output.number for output in second], time.monotonic() - began)


def _outputs(model: TrainingEngine, rows: list[TokenBatch]) -> list[Output]:
    trace = ModuleTrace(model.chunks, checksum)
    with trace.recording():
        model.forward(rows)
    return trace.outputs()
