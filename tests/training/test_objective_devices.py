"""Losses of rows on a GPU, with fake CUDA tensors: a tensor on the host, or the read of a value, fails here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megarl.config import AlgorithmConfig
from megarl.data.token_batch import TokenBatch
from megarl.models.attention import PackedRow
from megarl.rollout.step.rl_batch import assign_token_weights
from megarl.training import objective
from megarl.training.objective import StepNumbers, policy_objective, supervised_loss
from megarl.training.rows.choice import make_microbatch
from megarl.types import TrainingSequence

CUDA = torch.device("cuda", 0)

ALGORITHMS: dict[str, dict[str, Any]] = {
    "clipped": {},
    "gspo": {"policy_loss": "gspo", "clip_low": 0.1, "clip_high": 0.2, "aggregation": "sequence_mean_token_mean"},
    "corrected": {"importance_sampling": "tis"},
    "kl and entropy": {"kl_coefficient": 0.1, "entropy_coefficient": 0.1},
}


def sequence(length: int) -> TrainingSequence:
    mask = np.arange(length) >= 2
    values = np.where(mask, -1, 0).astype(np.float32)
    names = ("advantages", "old_logprobs", "rollout_logprobs", "reference_logprobs")
    return TrainingSequence(np.arange(length), mask, **dict.fromkeys(names, values))


_getitem = torch.Tensor.__getitem__


def taken(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """`tensor[index]`: indexing by tensors asks for a GPU where these functions do not."""
    if not isinstance(index, torch.Tensor):
        return _getitem(tensor, index)
    assert index.device == tensor.device
    return tensor.masked_select(index) if index.dtype == torch.bool else tensor.index_select(0, index)


@pytest.mark.parametrize("name", [*ALGORITHMS, "supervised"])
def test_a_loss_stays_on_the_gpu(cuda_factories: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config = AlgorithmConfig.model_validate(ALGORITHMS.get(name, {}))
    batch = TokenBatch.from_sequences([sequence(5), sequence(7)])
    assign_token_weights(batch, config)
    monkeypatch.setattr(torch.Tensor, "__getitem__", taken)
    monkeypatch.setattr(objective, "whole_row", lambda tensor, row: tensor)
    packed = make_microbatch(batch, multiple=1, qkv_format="packed", device=torch.device("cpu"))
    with FakeTensorMode(shape_env=ShapeEnv()):
        row = replace(
            packed,
            row=PackedRow.from_lengths([5, 7], CUDA, "packed"),
            mask=torch.zeros(12, dtype=torch.bool, device=CUDA),
            per_token={key: torch.zeros(12, dtype=value.dtype, device=CUDA) for key, value in packed.per_token.items()},
        )
        output = torch.zeros(2, 12, device=CUDA)
        loss_of = supervised_loss if name == "supervised" else policy_objective(config)
        # Fake tensors have no values: a loss that reads one of them raises here.
        loss, _, metrics = loss_of(output, row, StepNumbers(config.kl_coefficient))
        assert loss.device == CUDA
        assert {part.device for metric in metrics.values() for part in (metric.number, metric.count)} == {CUDA}
