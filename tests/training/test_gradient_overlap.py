"""Gradients that are reduced during the backward pass are those that are reduced after it, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.training import gradient_reduction
from tests.rank_pool import RankPool
from tests.training.state.test_checkpoint import build, recipe_of, update

LAYOUTS = {
    "dp2": ParallelConfig(1, 1, 2, 1),
    "pp2 dp2": ParallelConfig(1, 2, 2, 1),
    "pp2 vpp2 dp2": ParallelConfig(1, 2, 2, 1, vpp=2),
    "tp2 dp2": ParallelConfig(2, 1, 2, 1),
    "ep2 dp2": ParallelConfig(1, 1, 2, 1, ep=2),
}


def learnt(recipe: Recipe, parallel: ParallelConfig) -> dict[str, Any]:
    """Three updates, in buckets of few parameters: gradients, weights, and what was under way at the end of each.

    Gradients that are scattered are left out: which of them a rank has depends on the buckets.
    """
    from megarl.training import training_engine as module

    small = partial(module.DistributedDataParallelConfig, bucket_size=4096)
    with patch.object(module, "DistributedDataParallelConfig", small):
        engine = build(recipe, parallel)
    groups = [
        group for model in engine.models for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups)
    ]
    reduce = gradient_reduction._sum_gradients
    under_way: list[list[bool]] = []
    gradients: list[dict[str, torch.Tensor]] = []

    def noted(*args: Any, **kwargs: Any) -> None:
        under_way.append([group.grad_reduce_handle is not None for group in groups])
        reduce(*args, **kwargs)
        found: Any = {} if recipe.trainer.distributed_optimizer else engine.parameters
        gradients.append({name: parameter.main_grad.clone() for name, parameter in found.items()})

    with patch.object(gradient_reduction, "_sum_gradients", noted):
        steps = [update(engine, parallel, step) for step in range(3)]
    return {
        "norms": [step["train/grad_norm"].number for step in steps if step],
        "gradients": gradients,
        "weights": {name: value.detach().clone() for name, value in engine.parameters.items()},
        "under_way": under_way,
    }


def unclipped(recipe: Recipe) -> Recipe:
    """The norm of scattered gradients is summed in another order, and all that is clipped by it rounded otherwise."""
    return recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"clip_grad_norm": 0.0})})


@pytest.mark.parametrize(
    ("name", "is_scattered"),
    [("dp2", False), ("dp2", True), ("pp2 dp2", False), ("pp2 vpp2 dp2", True), ("tp2 dp2", True), ("ep2 dp2", False)],
)
def test_gradients_are_bit_equal(
    ranks: RankPool, tiny_model: Callable[..., Path], name: str, is_scattered: bool
) -> None:
    parallel = LAYOUTS[name]
    family = "qwen3_moe" if parallel.ep > 1 else "qwen3"
    # Most of so many experts have no token in a row.
    model = tiny_model(family=family, num_layers=parallel.pp * parallel.vpp, vocab_size=512, num_experts=64)
    sizes = {axis: getattr(parallel, axis) for axis in ("tp", "pp", "vpp", "ep")}
    # Rows of few tokens: there are several microbatches.
    settings = {"max_tokens_per_microbatch": 32, "distributed_optimizer": is_scattered, **sizes}
    recipes = [unclipped(recipe_of(model, overlap_grad_reduce=overlap, **settings)) for overlap in (False, True)]
    world = parallel.world_size
    after, during = (ranks.run(learnt, recipe, parallel, world_size=world) for recipe in recipes)
    for mine, other in zip(during, after, strict=True):
        assert mine["norms"] == pytest.approx(other["norms"], rel=1e-5)
        for some, others in zip(mine["gradients"], other["gradients"], strict=True):
            assert is_scattered or some.keys() == mine["weights"].keys()
            assert all(torch.equal(value, others[parameter]) for parameter, value in some.items())
        for parameter, value in mine["weights"].items():
            torch.testing.assert_close(value, other["weights"][parameter], rtol=1e-6, atol=1e-6, msg=parameter)
        assert not any(any(update) for update in other["under_way"])
        # The first update shows what gradients there are; from then on each bucket is sent as soon as it is whole.
        assert [all(update) for update in mine["under_way"]] == [False, True, True]
    assert parallel.pp > 1 or len(during[0]["under_way"][0]) > 2, "several buckets"


@pytest.mark.parametrize(
    ("num_experts", "expert_ranks", "expected"),
    [(0, range(4), False), (4, range(4), True), (4, range(2), False)],
    ids=["dense", "experts' ranks on two nodes", "on one node"],
)
def test_gradients_of_experts_may_cross_nodes_alone(
    monkeypatch: pytest.MonkeyPatch, num_experts: int, expert_ranks: range, expected: bool
) -> None:
    """Tensor-parallel ranks without expert-tensor parallelism are data-parallel for experts."""
    monkeypatch.setattr(gradient_reduction, "get_process_group_ranks", list)
    groups = SimpleNamespace(
        get_data_parallel_group=lambda with_context_parallel: range(2),
        get_expert_data_parallel_group=lambda: expert_ranks,
    )
    monkeypatch.setattr(gradient_reduction, "parallel_state", groups)
    shape: Any = SimpleNamespace(num_experts=num_experts)
    settings = SimpleNamespace(overlap_grad_reduce=None)
    recipe: Any = SimpleNamespace(trainer=settings, cluster=SimpleNamespace(ranks_per_node=2))
    assert gradient_reduction.overlaps_backward(recipe, shape) is expected


def overlaps(recipe: Recipe, parallel: ParallelConfig) -> tuple[bool, bool]:
    engine = build(recipe, parallel)
    return engine.overlaps_reduction, engine.config.no_sync_func is not None


@pytest.mark.parametrize(("layout", "expected"), [("dp2", True), ("tp2 dp2", True), ("tp2", False)])
def test_it_is_so_where_gradients_cross_nodes(
    ranks: RankPool, tiny_model: Callable[..., Path], layout: str, expected: bool
) -> None:
    """Nodes of one rank, but where two tensor-parallel ones share one."""
    sizes = {**LAYOUTS, "tp2": ParallelConfig(2, 1, 1, 1)}[layout]
    recipe = recipe_of(tiny_model(num_layers=1), tp=sizes.tp)
    nodes = recipe.cluster.model_copy(update={"ranks_per_node": sizes.tp, "nodes": sizes.dp})
    recipe = recipe.model_copy(update={"cluster": nodes})
    assert ranks.run(overlaps, recipe, sizes, world_size=sizes.world_size) == [(expected, expected)] * sizes.world_size
    alone = nodes.model_copy(update={"ranks_per_node": 4, "nodes": 1})
    recipe = recipe.model_copy(update={"cluster": alone})
    assert ranks.run(overlaps, recipe, sizes, world_size=sizes.world_size) == [(False, False)] * sizes.world_size
