"""Temporary memory of a forward and a backward pass, in closed form for small models."""

from __future__ import annotations

from dataclasses import replace

from megarl.config.parallel import ParallelConfig
from megarl.planner.memory.activations import PassSettings, backward_bytes, forward_bytes, layer_bytes, widths
from tests.shapes import small_shape

ONE_RANK = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
SETTINGS = PassSettings(
    row_tokens=32, chunk_tokens=32, itemsize=2, sequence_parallel=False, spec="local", expert_load=1.0
)
DENSE, EXPERTS = small_shape(), small_shape("qwen3_moe")
"""Both have 8 channels. The first has 16 in its feed-forward layers, the second 2 experts a token with 8 each."""


def test_a_dense_models_passes() -> None:
    # Gate, up, their product, the activated gate and up with its offset; then the layer's input and output.
    assert backward_bytes(DENSE, ONE_RANK, SETTINGS) == 32 * (5 * 16 + 2 * 8) * 2
    assert backward_bytes(DENSE, ONE_RANK, replace(SETTINGS, fuses_activation=True)) == 32 * (3 * 16 + 2 * 8) * 2
    # Residual in and out, the hidden states, and four tensors of the feed-forward layer.
    assert forward_bytes(DENSE, ONE_RANK, SETTINGS) == 32 * (2 * 8 + 8 + 4 * 16) * 2


def test_passes_of_experts() -> None:
    # Each token counts for both of its experts.
    assert backward_bytes(EXPERTS, ONE_RANK, SETTINGS) == 2 * 32 * (5 * 8 + 2 * 8) * 2 + 2 * 32 * 8 * 2
    assert forward_bytes(EXPERTS, ONE_RANK, SETTINGS) == 32 * (2 * 8 + 8) * 2 + 2 * 32 * (4 * 8 + 2 * 8) * 2


def test_the_widest_of_dense_layers_and_layers_with_experts_counts() -> None:
    mixed = small_shape("glm4_moe")
    wide = replace(mixed, intermediate_size=64)
    experts = 2 * 32 * (5 * 8 + 2 * 8) * 2 + 2 * 32 * 8 * 2
    assert backward_bytes(mixed, ONE_RANK, SETTINGS) == experts > 32 * (5 * 16 + 2 * 8) * 2
    assert backward_bytes(wide, ONE_RANK, SETTINGS) == 32 * (5 * 64 + 2 * 8) * 2 > experts


def test_tensor_parallelism_splits_channels_and_residuals() -> None:
    two_ranks = ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2)
    split = replace(SETTINGS, sequence_parallel=True)
    assert forward_bytes(DENSE, two_ranks, SETTINGS) == 32 * (2 * 8 + 8 + 4 * 8) * 2
    assert forward_bytes(DENSE, two_ranks, split) == 32 * (8 + 8 + 4 * 8) * 2


def test_context_parallelism_in_float32_saves_the_projection_of_all_heads() -> None:
    """In 16 bits, context parallelism copies queries, keys and values out of it, so it is freed.

    All other saved tensors have bytes in proportion to the itemsize, or are float32 for each itemsize.
    """

    def excess(cp: int) -> float:
        parallel, kind = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1, cp=cp), DENSE.layers[0]
        settings = replace(SETTINGS, row_tokens=32 * cp)
        wide = layer_bytes(DENSE, parallel, replace(settings, itemsize=4), kind)
        return wide - 2 * layer_bytes(DENSE, parallel, settings, kind)

    width = widths(DENSE, ONE_RANK)
    assert excess(2) - excess(1) == 32 * (width.query + 2 * width.key) * 4
