"""The proof of a reshard where no bytes can be compared: log-probs of a fixed prompt, by the trainer and by the engine.

For engines that keep their weights in another form than the checkpoint's.
"""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megarl.reshard.staging import gathered
from megarl.types import MegarlError

NUM_TOKENS = 32

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean |trainer - engine| over the prompt's tokens, in nats, by the type of the weights. Their own rounding
gives some 1e-6 and 1e-2; weights of another model, nats."""


def probe_prompt(vocab_size: int, max_tokens: int) -> NDArray[np.int64]:
    """The prompt: int64 [tokens], `NUM_TOKENS` or `max_tokens`, drawn once and for all from the whole vocabulary."""
    return np.random.default_rng(0).integers(0, vocab_size, min(NUM_TOKENS, max_tokens))


def check_logprobs(
    trainer: NDArray[np.float32] | None,
    engine: NDArray[np.float32] | None,
    *,
    replica: int,
    tolerance: float,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Compare the prompt's log-probs, float32 [tokens] where a rank has them; all ranks of the reshard call this.

    The first entry, before which there is nothing, does not count. Returns the largest engine's mean distance in nats.
    Raises MegarlError, on all ranks the same, for the first rank whose engine is farther than `tolerance`, or not
    finite, from the trainer.
    """
    found = gathered((trainer, engine, replica), group)
    expected = next(logprobs for logprobs, _, _ in found if logprobs is not None)
    gaps: list[float] = []
    for rank, (_, logprobs, number) in enumerate(found):
        if logprobs is None:
            continue
        distances = np.abs(expected[1:].astype(np.float64) - logprobs[1:])
        gap = float(distances.mean())
        # Not "above": NaN must not pass.
        if not gap <= tolerance:
            worst = int(distances.argmax()) + 1
            raise MegarlError(
                f"rank {rank}: after a reshard the log-probs of the engine (replica {number}) are {gap:.3g} nats from "
                f"the trainer's in the mean over {len(distances)} tokens of a fixed prompt, above {tolerance:g}; worst "
                f"is token {worst}: trainer {expected[worst]:.4f}, engine {logprobs[worst]:.4f}. Its weights are not "
                "the trainer's, or their conversion (rollout.vllm) loses more: raise weights.probe_tolerance if it may."
            )
        gaps.append(gap)
    return max(gaps)
