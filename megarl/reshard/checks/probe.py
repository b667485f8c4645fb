"""Check of a reshard by log-probs: trainer and engine compute the log-probs of a fixed prompt.

Engines that convert weights need it: their bytes cannot be compared with the trainer's.
"""

from __future__ import annotations

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megarl.reshard.staging import gather_values
from megarl.types import MegarlError

# Enough tokens for a stable mean, at the cost of one short prefill.
NUM_TOKENS = 32

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""Maximum mean |trainer - engine| over the prompt's tokens in nats, by dtype of the weights. Rounding alone gives about
1e-6 (float32) and 1e-2 (bfloat16), weights of another model several nats.
"""


def probe_prompt(vocab_size: int, max_tokens: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, vocab_size, min(NUM_TOKENS, max_tokens))


def check_logprobs(
    trainer: NDArray[np.float32] | None,
    engine: NDArray[np.float32] | None,
    *,
    replica: int,
    tolerance: float,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Compare the prompt's log-probs of `trainer` and `engine`, float32 [tokens]. A rank without log-probs passes None.

    A collective over the reshard's ranks. The first entry is ignored, because no token precedes it. Returns the largest
    mean distance of any engine, in nats. Raises MegarlError on all ranks, naming the first rank with a distance above
    `tolerance` or not finite.
    """
    values_by_rank = gather_values((trainer, engine, replica), group)
    trainer_logprobs = next(logprobs for logprobs, _, _ in values_by_rank if logprobs is not None)
    mean_distances: list[float] = []
    for rank, (_, engine_logprobs, replica_number) in enumerate(values_by_rank):
        if engine_logprobs is None:
            continue
        distances = np.abs(trainer_logprobs[1:].astype(np.float64) - engine_logprobs[1:])
        mean_distance = float(distances.mean())
        # `not mean_distance <= tolerance` also catches NaN; `mean_distance > tolerance` would let it pass.
        if not mean_distance <= tolerance:
            worst_token = int(distances.argmax()) + 1
            raise MegarlError(
                f"rank {rank}: after a reshard, the log-probs of the engine (replica {replica_number}) differ from the "
                f"trainer's by {mean_distance:.3g} nats in the mean over {len(distances)} tokens of a fixed prompt. At "
                f"most {tolerance:g} is allowed. The worst token is number {worst_token}: trainer "
                f"{trainer_logprobs[worst_token]:.4f}, engine "
                f"{engine_logprobs[worst_token]:.4f}. Either the engine has other weights, or their conversion "
                "(rollout.vllm) loses more precision. In the second case, raise weights.probe_tolerance."
            )
        mean_distances.append(mean_distance)
    return max(mean_distances)
