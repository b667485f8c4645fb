"""Passes of the trainer without waits of the host for the device, and with the same results as with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.types import TrainingSequence
from tests.host_waits import host_waits
from tests.rank_pool import RankPool
from tests.token_batches import row_batches
from tests.training.test_training_engine import build, make_updates, recipe_of, rows_of


def with_experts(engine: Any, batches: list[TokenBatch]) -> list[TokenBatch]:
    """Return the batches with experts as an engine would have chosen them, stored by this rank."""
    from megarl.training.routed_experts import StoredExperts, make_route_feed

    random = np.random.default_rng(dist.get_rank())
    shape, stored = engine.shape, StoredExperts(dist.get_rank(), dist.get_world_size())
    engine.feeds.append(make_route_feed(stored, engine))

    def choices(num_tokens: int) -> np.ndarray:
        scores = random.random((num_tokens, shape.num_layers, shape.num_experts))
        return scores.argsort(-1)[..., : shape.top_k]

    return [
        replace(batch, experts=np.array([stored.store(choices(length)) for length in batch.lengths]))
        for batch in batches
    ]


@contextmanager
def as_megatron_does() -> Iterator[None]:
    """Context in which stages send shapes, and layers of experts count their tokens on the device."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    import megarl.training.model as model
    import megarl.training.routed_experts as routed_experts

    def communicator(config: Any, *_: Any) -> P2PCommunicator:
        return P2PCommunicator(model.parallel_state.get_pipeline_model_parallel_group(), config)

    with (
        patch.object(routed_experts, "takes_known_counts", lambda config: False),
        patch.object(model, "StageCommunicator", communicator),
    ):
        yield


def counted(recipe: Recipe, parallel: ParallelConfig, sequences: list[TrainingSequence], known: bool) -> dict[str, Any]:
    """Log-probs and gradients of one rank, and the reads of its tensors' values in a pass and in an update.

    With `known` False, as Megatron does.
    """
    engine, _, _ = build(recipe, parallel)
    rows = row_batches(sequences, rows_of(recipe, parallel, sequences))
    if recipe.trainer.router_replay:
        rows = with_experts(engine, rows)
    with nullcontext() if known else as_megatron_does():
        with host_waits() as passed:
            logprobs = engine.forward(rows)
        with host_waits() as updated:
            engine.update(rows)
    gradients = {name: parameter.main_grad.numpy().copy() for name, parameter in engine.parameters.items()}
    return {"logprobs": logprobs, "gradients": gradients, "pass": passed, "update": updated, "num_rows": len(rows)}


CASES = [
    pytest.param("qwen3", ParallelConfig(1, 2, 1, 1), id="pp2"),
    pytest.param("qwen3", ParallelConfig(2, 2, 1, 1, vpp=2), id="tp2 pp2 vpp2"),
    pytest.param("qwen3_moe", ParallelConfig(1, 2, 2, 1, ep=2), id="pp2 ep2"),
    pytest.param("qwen3_moe", ParallelConfig(2, 1, 2, 1, ep=2, etp=2), id="tp2 ep2 etp2"),
]
OF_THE_HOST = {
    "core/utils.py:local_multi_tensor_l2_norm": "only without the fused kernel of Transformer Engine or apex",
    "moe/experts.py:forward": "tokens per expert are in host memory with known counts",
    "moe/moe_utils.py:sort_chunks_by_idxs": "sizes of chunks are in host memory with known counts",
    "moe/moe_utils.py:permute": "only without Transformer Engine's fused permutation",
    "experts/dispatch.py:preprocess": "known counts are in host memory",
    "training/routed_experts.py:count_by_expert": "counts of all rows and layers are in host memory",
    "optimizer/optimizer.py:step_with_ready_grads": "torch's Adam counts steps in host memory",
    "tensor_parallel/random.py:fork": "checks the state of the CPU's random numbers",
}
"""Reads of tensors that a GPU run has in host memory, or that its kernels avoid, with the reason."""
OF_A_PASS = {
    ("cpu", "training/model.py:unpack_outputs"): "log-probs of all rows",
    ("numpy", "training/model.py:unpack_outputs"): "the same",
}
OF_AN_UPDATE = {
    ("tolist", "rows/metrics.py:read_metrics"): "metrics of all rows",
    ("tolist", "training/optimizer_step.py:_reduce_flags"): "whether the loss is finite, and a token trained",
    ("item", "optimizer/clip_grads.py:get_grad_norm_fp32"): "norm of the dense gradients and of the experts'",
}


def waits(places: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    return {at: number for at, number in places.items() if at[1] not in OF_THE_HOST}


@pytest.mark.parametrize(("family", "parallel"), CASES)
def test_the_host_waits_a_fixed_number_of_times(
    ranks: RankPool, tiny_model: Callable[..., Path], family: str, parallel: ParallelConfig
) -> None:
    """The number depends neither on layers nor on rows, and no result changes by a bit."""
    sizes = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48, "vocab_size": 431}
    folder = tiny_model(family=family, num_layers=4, initializer_range=0.15, **sizes)
    settings = {"router_replay": family == "qwen3_moe", "distributed_optimizer": False}
    recipe = recipe_of(folder, "rl", max_tokens_per_microbatch=16, **settings)
    sequences = make_updates(recipe, 431)[0]
    mine, theirs = (
        ranks.run(counted, recipe, parallel, sequences, known, world_size=parallel.world_size)
        for known in (True, False)
    )
    for own, other in zip(mine, theirs, strict=True):
        assert all(np.array_equal(own["gradients"][name], value) for name, value in other["gradients"].items())
        assert (own["logprobs"] is None) == (other["logprobs"] is None)
        for one, another in zip(own["logprobs"] or (), other["logprobs"] or (), strict=True):
            assert np.array_equal(one, another)
        assert own["num_rows"] > 2
        found = waits(own["pass"])
        assert found.keys() <= OF_A_PASS.keys() and set(found.values()) <= {1}, found
        found = waits(own["update"])
        assert found.keys() <= OF_AN_UPDATE.keys() and set(found.values()) <= {1, 2}, found
        # Megatron's own way waits at places that are missing here.
        assert waits(other["pass"]).keys() - waits(own["pass"]).keys()
