"""After training updates, the engine's live parameters equal, bit for bit, what vLLM's own loader makes of the export.

The oracle is vLLM: the trainer's weights leave through the exported checkpoint and `load_weights`, or through the plan
and the transport; both ways must write the same bytes on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megarl.config import Recipe
from megarl.parallel_layout import ParallelLayout
from megarl.testing import RankPool
from megarl.types import TrainingSequence

MODELS = {
    "qwen3 kv below tp, tied, odd vocabulary": dict(family="qwen3", num_kv_heads=1, vocab_size=433),
    "qwen3 kv equal tp, untied": dict(family="qwen3", num_kv_heads=2, tie_word_embeddings=False),
    "qwen2 kv above tp, tied": dict(family="qwen2", num_kv_heads=4),
    "llama kv equal tp, untied, odd vocabulary": dict(
        family="llama", num_kv_heads=2, tie_word_embeddings=False, vocab_size=421
    ),
    "mistral kv above tp, untied": {"family": "mistral", "num_kv_heads": 4, "tie_word_embeddings": False},
}
CASES = [
    pytest.param(ParallelLayout(tp=2, pp=1, dp=1, rollout_tp=2), "qwen3 kv below tp, tied, odd vocabulary"),
    pytest.param(ParallelLayout(tp=1, pp=2, dp=1, rollout_tp=2), "llama kv equal tp, untied, odd vocabulary"),
    pytest.param(ParallelLayout(tp=1, pp=2, dp=1, rollout_tp=2), "qwen3 kv below tp, tied, odd vocabulary"),
    pytest.param(ParallelLayout(tp=1, pp=1, dp=2, rollout_tp=2), "qwen2 kv above tp, tied"),
    pytest.param(ParallelLayout(tp=2, pp=1, dp=1, rollout_tp=1), "qwen3 kv equal tp, untied"),
    pytest.param(ParallelLayout(tp=2, pp=2, dp=1, rollout_tp=2), "qwen3 kv equal tp, untied"),
    pytest.param(ParallelLayout(tp=1, pp=2, dp=2, rollout_tp=2, order="tp-cp-ep-pp-dp"), "mistral kv above tp, untied"),
    pytest.param(
        ParallelLayout(tp=2, pp=1, dp=2, rollout_tp=4, deal=(2, 2)), "qwen3 kv below tp, tied, odd vocabulary"
    ),
    pytest.param(ParallelLayout(tp=2, pp=1, dp=2, rollout_tp=4), "llama kv equal tp, untied, odd vocabulary"),
    pytest.param(
        ParallelLayout(tp=4, pp=1, dp=1, rollout_tp=2, deal=(2, 2)), "qwen3 kv below tp, tied, odd vocabulary"
    ),
]


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    with ExitStack() as stack:
        yield cache(lambda world_size: stack.enter_context(RankPool(world_size)))


def train_reshard_and_compare(recipe: Recipe, layout: ParallelLayout, exported: str) -> list[str]:
    """One update on random tokens, one reshard; the names of live parameters that differ from the loader's."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file

    from megarl.weights.layouts.vllm import load_full_tensors
    from megarl.workers.worker import Worker

    worker = Worker(dist.get_rank(), layout.world_size, recipe, layout)
    assert worker.engine is not None and worker.reshard_plan is not None
    assert worker.reshard_plan.is_computed, "vLLM's layout is not as computed"
    rng = np.random.default_rng(layout.coordinates(dist.get_rank()).dp)
    trained = np.arange(17) > 0
    row = [
        TrainingSequence(
            token_ids=rng.integers(0, worker.shape.vocab_size, 17),
            loss_mask=trained,
            token_weights=np.where(trained, 1 / 16, 0).astype(np.float32),
        )
    ]
    worker.update([row])
    live = dict(worker.engine.model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in live.items()}
    addresses = {name: parameter.data_ptr() for name, parameter in live.items()}
    worker.reshard()
    written = {name: parameter.detach().clone() for name, parameter in live.items()}
    assert any(not torch.equal(before[name], written[name]) for name in live), "the update changed nothing"
    assert addresses == {name: parameter.data_ptr() for name, parameter in worker.engine.model.named_parameters()}
    worker.export(Path(exported))
    with torch.no_grad():
        for parameter in live.values():
            parameter.fill_(float("nan"))
    load_full_tensors(worker.engine.model, load_file(f"{exported}/model.safetensors").items())
    different = [name for name, parameter in live.items() if not torch.equal(parameter, written[name])]
    worker.close()
    return different


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_live_parameters_equal_what_the_loader_makes(
    layout: ParallelLayout,
    model: str,
    pool_of: Callable[[int], RankPool],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "reshard",
            "loop": "sft",
            "model": {"path": str(tiny_model(num_layers=2, **MODELS[model])), "dtype": "float32"},
            "data": {"train": "unused", "validation": {"unused": "unused"}, "max_prompt_tokens": 32},
            "cluster": {"ranks_per_node": layout.world_size},
            "trainer": {"tp": layout.tp, "pp": layout.pp, "max_tokens_per_microbatch": 64},
            "optimizer": {"learning_rate": 1e-2},
            "rollout": {"tp": layout.rollout_tp, "kv_cache_gib": 0.05, "sampling": {"max_new_tokens": 16}},
            # Smaller than the model: several buckets travel.
            "weights": {"bucket_mib": 1},
        }
    )
    results = pool_of(layout.world_size).run(
        train_reshard_and_compare, recipe, layout, str(tmp_path / "hf"), timeout_seconds=300
    )
    assert results == [[]] * layout.world_size
