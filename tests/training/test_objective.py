"""Losses of whole trajectories: all segments of one have one ratio, also over context-parallel ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import AlgorithmConfig
from megarl.data.batch import TokenBatch
from megarl.rollout.weights import assign_token_weights
from megarl.testing import RankPool
from megarl.types import TrainingSequence

LOG_RATIOS = [[0.3, 0.3, 0.0], [-0.1, 0.0], [-0.2, -0.2]]
"""Of the trained tokens of three segments; the first two are one trajectory, whose mean is a tenth."""
SAMPLES = np.array([0, 0, 1])
ADVANTAGES = [1.0, 1.0, -1.0]
ALGORITHM = {
    "policy_loss": "gspo", "clip_low": 0.1, "clip_high": 0.2, "aggregation": "sequence_mean_token_mean",
}  # fmt: skip
RATIO = 1.1051709
"""exp(0.1). By segments it would be exp(0.2) and exp(-0.05)."""


def segment(log_ratios: list[float], advantage: float, prompt: int) -> TrainingSequence:
    """The log-ratios travel as the engine's log-probs do; the log-probs of before are -1."""
    length = prompt + len(log_ratios)
    mask = np.arange(length) >= prompt
    values = np.concatenate([np.zeros(prompt), log_ratios]).astype(np.float32)
    return TrainingSequence(
        np.arange(length),
        mask,
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        old_logprobs=np.full(length, -1, np.float32),
        values=values,
    )


def loss_on_rank(cp: int, algorithm: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of the loss, its metrics, and the gradient of each of its trained tokens."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megarl.training.batch import pack_row
    from megarl.training.objective import StepNumbers, policy_objective

    parallel_state.initialize_model_parallel(context_parallel_size=cp, create_gloo_process_groups=False)
    config = AlgorithmConfig.model_validate(algorithm)
    parts = zip(LOG_RATIOS, ADVANTAGES, (2, 5, 1), strict=True)
    batch = TokenBatch.from_sequences([segment(*part) for part in parts])
    batch.samples = SAMPLES
    assign_token_weights(batch, config)
    row = pack_row(batch, multiple=1, qkv_format="packed", device=torch.device("cpu"), cp=cp, cp_rank=dist.get_rank())
    policy_logprobs = (row.per_token["values"] - 1).requires_grad_()
    output = torch.stack([policy_logprobs, torch.zeros_like(policy_logprobs)])
    loss, _, metrics = policy_objective(config)(output, row, StepNumbers(0.0))
    loss.backward()
    assert policy_logprobs.grad is not None
    return {
        "loss": loss.item(),
        "ratio": metrics["train/ratio"].number * int(row.mask.sum()),
        "kl_update": metrics["kl/update"].number * int(row.mask.sum()),
        "slopes": list(
            zip(row.per_token["advantages"][row.mask].tolist(), policy_logprobs.grad[row.mask].tolist(), strict=True)
        ),
    }


@pytest.mark.parametrize("cp", [1, 2])
def test_the_ratio_of_gspo_is_the_trajectory_s(ranks: RankPool, cp: int) -> None:
    found = ranks.run(loss_on_rank, cp, ALGORITHM, world_size=cp)
    # The first trajectory is within the clip, minus its ratio; the second, exp(-0.2), is held at 0.9.
    assert sum(part["loss"] for part in found) == pytest.approx((-RATIO + 0.9) / 2, abs=1e-6)
    assert sum(part["ratio"] for part in found) == pytest.approx(5 * RATIO + 2 * 0.8187308, abs=1e-5)
    # exp(d) - 1 - d of the log-ratios d = 0.3 (twice), -0.1 and -0.2 (twice), and of two that are 0.
    assert sum(part["kl_update"] for part in found) == pytest.approx(
        2 * 0.0498588 + 0.0048374 + 2 * 0.0187308, abs=1e-6
    )
    slopes = sorted(slope for part in found for slope in part["slopes"])
    # A fifth of the trajectory's half of the loss for each of its tokens; none for tokens that are clipped.
    assert slopes == [(-1.0, 0.0)] * 2 + [(1.0, pytest.approx(-RATIO / 10, abs=1e-6))] * 5
