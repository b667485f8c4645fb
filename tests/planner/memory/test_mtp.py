"""The layer for multi-token prediction in a plan: its weights, states and activations are those of a live model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megarl.config.parallel import ParallelConfig
from megarl.families.flops import update_only_flops
from megarl.families.shape import padded_vocab_size, read_model_shape
from megarl.planner.memory.activations import PassSettings, stage_bytes
from megarl.planner.memory.trainer_bytes import trainer_states
from megarl.reshard.layouts.megatron import megatron_layouts
from tests.rank_pool import RankPool

LENGTHS = [96, 64]
ONE = ParallelConfig(1, 1, 1, 1)
SIZES = {
    "num_heads": 4, "num_kv_heads": 2, "hidden_size": 64, "head_dim": 32, "num_mtp_layers": 1, "num_experts": 4,
    "expert_intermediate_size": 32,
}  # fmt: skip
MODELS = {"glm4_moe": 2, "qwen3_5_text": 4}
"""Families and their numbers of layers."""


def measured(folder: str, has_mtp: bool, dtype_name: str, recompute: str) -> tuple[int, int, float]:
    """Return a trained model's bytes: parameters, and the most that autograd holds in a pass; and the pass's FLOPs."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from torch.utils.flop_counter import FlopCounterMode

    from megarl.models.attention import PackedRow
    from megarl.models.configuration import transformer_config
    from megarl.models.drafts.mtp import mtp_head
    from megarl.models.parts import build_policy
    from megarl.models.policy import PolicyModel
    from tools.checks.planner import SavedTensors

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1)
    shape, dtype = read_model_shape(folder).with_draft_layers(has_mtp), getattr(torch, dtype_name)
    config = transformer_config(shape, ONE, dtype=dtype, sequence_parallel=False, overrides={}, recompute=recompute)
    model = build_policy(PolicyModel, config, shape, logprob_chunk_tokens=50).to(dtype)
    tokens = torch.arange(sum(LENGTHS))[None] % shape.vocab_size
    row = PackedRow.from_lengths(LENGTHS, torch.device("cpu"), model.qkv_format)
    saved = SavedTensors(model.parameters())
    if has_mtp:
        head = mtp_head(model)
        assert head is not None
        head.labels = tokens[0]
    with FlopCounterMode(display=False) as counter:
        with saved.hooks():
            found = model(tokens, None, None, labels=tokens, packed_seq_params=row)
        found.sum().backward()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return weights, saved.peak, float(counter.get_total_flops())


@pytest.mark.parametrize(
    ("family", "dtype"), [("glm4_moe", "float32"), ("glm4_moe", "bfloat16"), ("qwen3_5_text", "float32")]
)
def test_a_trained_layer_takes_what_was_planned(
    ranks: RankPool, tiny_model: Callable[..., Path], family: str, dtype: str
) -> None:
    folder = str(tiny_model(family=family, num_layers=MODELS[family], **SIZES))
    counted = [ranks.run(measured, folder, has, dtype, "none", world_size=1)[0] for has in (False, True)]
    itemsize = 4 if dtype == "float32" else 2
    settings = PassSettings(
        row_tokens=sum(LENGTHS),
        chunk_tokens=50,
        itemsize=itemsize,
        sequence_parallel=False,
        spec="local",
        pads_attention=True,
        longest=max(LENGTHS),
    )
    shapes = [read_model_shape(folder).with_draft_layers(has) for has in (False, True)]
    planned = [stage_bytes(shape, ONE, 0, settings) for shape in shapes]
    assert counted[1][1] - counted[0][1] == pytest.approx(planned[1] - planned[0], rel=0.03)
    states = [
        trainer_states(
            megatron_layouts(shape, ONE, padded_vocab_size=padded_vocab_size(shape.vocab_size, 1)), 0,
            itemsize=itemsize, is_distributed=False, optimizer="adam", is_pinned=False,
        )
        for shape in shapes
    ]  # fmt: skip
    weights = counted[1][0] - counted[0][0]
    assert states[1].parameters - states[0].parameters == weights > 0
    numel = weights // itemsize
    assert states[1].gradients - states[0].gradients == 4 * numel
    assert states[1].moments - states[0].moments == 8 * numel
    assert states[1].main_weights - states[0].main_weights == (4 * numel if itemsize == 2 else 0)


def test_the_flops_of_a_trained_layer_are_those_counted_by_torch(
    ranks: RankPool, tiny_model: Callable[..., Path]
) -> None:
    folder = str(tiny_model(family="glm4_moe", num_layers=2, **SIZES))
    counted = [ranks.run(measured, folder, has, "float32", "none", world_size=1)[0][2] for has in (False, True)]
    shape = read_model_shape(folder)
    assert update_only_flops(shape, np.array(LENGTHS)) == 0
    planned = update_only_flops(shape.with_draft_layers(True), np.array(LENGTHS))
    # torch's counter sees no product written into a given tensor, like the head's logits and the gradient of its hidden
    # states, and no fused attention: four heads of 32 channels, scores and their sums, in three passes over half of the
    # pairs of tokens.
    tokens, pairs = sum(LENGTHS), sum(length**2 / 2 for length in LENGTHS)
    unseen = 2 * (2 * 64 * shape.vocab_size * tokens) + 3 * 2 * (4 * 32 + 4 * 32) * pairs
    assert counted[1] - counted[0] == pytest.approx(planned - unseen, rel=1e-9)
