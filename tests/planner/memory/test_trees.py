"""Activations of rows stored as trees of prefixes: what autograd saves is what was planned for the stored tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.families.shape import read_model_shape
from megarl.planner.memory.activations import PassSettings, stage_bytes
from megarl.types import TrainingSequence
from tests.rank_pool import RankPool

LAYOUTS = {"one rank": ParallelConfig(1, 1, 1, 1), "cp2": ParallelConfig(1, 1, 1, 1, cp=2)}
CHUNK_TOKENS = 64


def group(prompt_tokens: int, answer_tokens: int, answers: int = 4) -> TokenBatch:
    random = np.random.default_rng(2)
    prompt = random.integers(1, 100, prompt_tokens)
    rows = [np.concatenate([prompt, random.integers(1, 100, answer_tokens)]) for _ in range(answers)]
    return TokenBatch.from_sequences([TrainingSequence(ids, np.arange(len(ids)) >= len(prompt)) for ids in rows])


def saved_bytes(folder: str, parallel: ParallelConfig, batch: TokenBatch, dtype_name: str) -> list[tuple[int, int]]:
    """Return stored tokens and the most bytes that autograd holds, without and with sharing."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megarl.models.configuration import transformer_config
    from megarl.models.policy import PolicyModel
    from megarl.training.rows.choice import make_microbatch
    from tools.checks.planner import SavedTensors

    parallel_state.initialize_model_parallel(1, 1, context_parallel_size=parallel.cp, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    shape, dtype = read_model_shape(folder), getattr(torch, dtype_name)
    config = transformer_config(shape, parallel, dtype=dtype, sequence_parallel=False, overrides={})
    model = PolicyModel(config, shape, logprob_chunk_tokens=CHUNK_TOKENS).to(dtype)
    found = []
    for batch.shares_prefixes in (False, True):
        rank: Any = {"cp": parallel.cp, "cp_rank": parallel_state.get_context_parallel_rank()}
        row = make_microbatch(batch, multiple=1, qkv_format=model.qkv_format, device=torch.device("cpu"), **rank)
        saved = SavedTensors(model.parameters())
        with saved.hooks():
            model(row.input_ids, None, None, labels=row.labels, packed_seq_params=row.row)
        found.append((row.input_ids.numel() * parallel.cp, saved.peak))
    parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize(("dtype_name", "itemsize"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_stored_tokens_take_what_was_planned(
    ranks: RankPool, tiny_model: Callable[..., Path], name: str, dtype_name: str, itemsize: int
) -> None:
    folder, parallel = str(tiny_model(num_layers=4, num_kv_heads=2, vocab_size=433)), LAYOUTS[name]
    batch = group(prompt_tokens=200, answer_tokens=56)
    for rank in ranks.run(saved_bytes, folder, parallel, batch, dtype_name, world_size=parallel.world_size):
        (represented, apart), (stored, shared) = rank
        assert (represented, stored) == (1024, 424)
        settings = PassSettings(
            row_tokens=stored,
            chunk_tokens=CHUNK_TOKENS,
            itemsize=itemsize,
            sequence_parallel=False,
            spec="local",
            shares_prefixes=True,
        )
        assert shared == pytest.approx(stage_bytes(read_model_shape(folder), parallel, 0, settings), rel=0.03)
        assert shared < 0.5 * apart
