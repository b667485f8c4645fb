"""Activations of attention with output gates: what autograd saves in addition is what was planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.parallel import ParallelConfig
from megarl.families.parts import GroupedQuery
from megarl.families.shape import ModelShape, read_model_shape
from megarl.planner.memory.activations import PassSettings, layer_bytes
from tests.rank_pool import RankPool

LENGTHS = [96, 64]
ONE = ParallelConfig(1, 1, 1, 1)


def gated(folder: str, has_gate: bool) -> ModelShape:
    shape = read_model_shape(folder)
    assert isinstance(shape.attention, GroupedQuery)
    return replace(shape, attention=replace(shape.attention, has_output_gate=has_gate))


def saved_bytes(folder: str, has_gate: bool, dtype_name: str) -> int:
    """Return the most bytes that autograd holds in a forward pass of a model with random weights."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megarl.models.attention import PackedRow
    from megarl.models.configuration import transformer_config
    from megarl.models.policy import PolicyModel
    from tools.checks.planner import SavedTensors

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1)
    shape, dtype = gated(folder, has_gate), getattr(torch, dtype_name)
    config = transformer_config(shape, ONE, dtype=dtype, sequence_parallel=False, overrides={})
    model = PolicyModel(config, shape, logprob_chunk_tokens=50).to(dtype)
    tokens = torch.arange(sum(LENGTHS))[None]
    row = PackedRow.from_lengths(LENGTHS, torch.device("cpu"), model.qkv_format)
    saved = SavedTensors(model.parameters())
    with saved.hooks():
        model(tokens, None, None, labels=tokens, packed_seq_params=row)
    return saved.peak


@pytest.mark.parametrize(("dtype_name", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_gates_take_what_was_planned(
    ranks: RankPool, tiny_model: Callable[..., Path], dtype_name: str, itemsize: int
) -> None:
    folder = str(tiny_model(num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=64, head_dim=32))
    counted = [ranks.run(saved_bytes, folder, gate, dtype_name, world_size=1)[0] for gate in (False, True)]
    settings = PassSettings(
        row_tokens=sum(LENGTHS),
        chunk_tokens=50,
        itemsize=itemsize,
        sequence_parallel=False,
        spec="local",
        pads_attention=True,
        longest=max(LENGTHS),
    )
    planned = [
        2 * layer_bytes(shape, ONE, settings, shape.layers[0])
        for shape in (gated(folder, gate) for gate in (False, True))
    ]
    assert counted[1] - counted[0] == pytest.approx(planned[1] - planned[0], rel=0.01)
