"""Model FLOPs against closed forms, and against what torch counts in transformers' own models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megarl.families.flops import forward_flops, matrix_flops, sequence_flops
from megarl.families.shape import read_model_shape, shape_from_config

SIZES = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 7, "intermediate_size": 11, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 5, "vocab_size": 13,
}  # fmt: skip


def test_the_flops_of_a_small_model_are_those_counted_by_hand() -> None:
    shape = shape_from_config(SIZES)
    # Queries and output 7 x 20 each, keys and values 7 x 10 each, three matrices of 7 x 11; in the end 7 x 13.
    assert matrix_flops(shape) == 2 * (3 * (280 + 140 + 231) + 91)
    # Four heads of five channels, twice, for half of the pairs of tokens, in three layers.
    assert sequence_flops(shape).pair_flops == ((0, 4 * 3 * 20),)
    assert forward_flops(shape, np.array([2, 17])) == 19 * 4088 + 120 * (4 + 289)
    assert matrix_flops(shape.with_value_head()) == 2 * (3 * 651 + 7)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_they_are_what_torch_counts_in_transformers_model(tiny_model: Callable[..., Path], family: str) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    folder = tiny_model(family=family)
    # All pairs of tokens are computed, where causal attention needs half of them; experts one by one.
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    length = 48
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None])
    shape = read_model_shape(folder)
    [(_, pair_flops)] = sequence_flops(shape).pair_flops
    expected = length * matrix_flops(shape) + pair_flops * length**2
    # The angles of the rotary embeddings are a product too.
    assert counter.get_total_flops() == pytest.approx(expected, rel=2e-3)


def test_windows_limit_the_pairs_of_tokens() -> None:
    config = SIZES | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    shape = shape_from_config(config)
    # Half of the square up to four tokens; then four pairs for each further token.
    pairs = 2 + (8 + 4 * 13)
    assert forward_flops(shape, np.array([2, 17])) == 19 * matrix_flops(shape) + 4 * 3 * 20 * pairs
