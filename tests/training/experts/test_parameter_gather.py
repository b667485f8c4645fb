"""After an update the parameters of a mixture of experts are gathered once, and are those of Megatron's own step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from tests.rank_pool import RankPool
from tests.training.state.test_checkpoint import build, recipe_of, update

LAYOUT = ParallelConfig(1, 1, 4, 1, ep=2)


def learnt(recipe: Recipe, by_megatron: bool) -> tuple[dict[str, torch.Tensor], int, int]:
    """Return the weights after two updates, the gathers in the last one, and the number of bucket groups."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.optimizer import ChainedOptimizer

    from megarl.training import optimizer as module

    engine = build(recipe, LAYOUT)
    gather, num_gathers = _ParamAndGradBucketGroup.start_param_sync, 0

    def counted(group: Any, force_sync: bool = False) -> None:
        nonlocal num_gathers
        num_gathers += 1
        gather(group, force_sync)

    def step_of_megatron(parts: list[Any]) -> None:
        ChainedOptimizer(parts).step_with_ready_grads()

    with patch.object(module, "_update_parameters", step_of_megatron if by_megatron else module._update_parameters):
        update(engine, LAYOUT, 0)
        with patch.object(_ParamAndGradBucketGroup, "start_param_sync", counted):
            update(engine, LAYOUT, 1)
    num_groups = sum(len(m.bucket_groups) + len(m.expert_parallel_bucket_groups) for m in engine.models)
    return {name: value.detach().clone() for name, value in engine.parameters.items()}, num_gathers, num_groups


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_are_gathered_once(ranks: RankPool, tiny_model: Callable[..., Path], dtype: str) -> None:
    model = tiny_model(family="qwen3_moe", num_layers=2, vocab_size=512)
    recipe = recipe_of(model, distributed_optimizer=True, ep=2, dtype=dtype)
    own, megatron = (
        ranks.run(learnt, recipe, by_megatron, world_size=LAYOUT.world_size) for by_megatron in (False, True)
    )
    for (weights, num_gathers, num_groups), (others, num_others, _) in zip(own, megatron, strict=True):
        assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
        assert (num_gathers, num_others) == (num_groups, 2 * num_groups) and num_groups > 1
