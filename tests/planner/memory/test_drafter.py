"""States that pipeline stages send to a trained drafter on the last stage, in a plan."""

from __future__ import annotations

import pytest

from megarl.config.parallel import ParallelConfig
from megarl.planner.memory.activations import PassSettings, carried_bytes, pipeline_bytes
from tests.shapes import small_shape

LAYERS = (0, 1, 2)
"""Layers whose inputs the drafter reads."""


@pytest.mark.parametrize(
    ("pp", "vpp", "num_received"),
    [
        # Two layers a chunk: the last chunk receives the inputs of layers 0 and 1.
        (2, 1, [0, 2]),
        # One layer a chunk: chunks 0 and 2 receive 0 and 2 states, chunks 1 and 3 receive 1 and 3.
        (2, 2, [2, 4]),
        (4, 1, [0, 1, 2, 3]),
        (1, 1, [0]),
    ],
)
def test_a_stage_holds_the_states_of_the_stages_before_it(pp: int, vpp: int, num_received: list[int]) -> None:
    shape, parallel = small_shape("qwen3", num_layers=4), ParallelConfig(2, pp, 1, 1, vpp=vpp)
    settings = PassSettings(row_tokens=64, chunk_tokens=64, itemsize=2, sequence_parallel=True, spec="local")
    for stage, number in enumerate(num_received):
        carried = carried_bytes(shape, parallel, stage, settings, LAYERS)
        # In flight are as many rows of each as of the hidden states that a chunk receives.
        assert carried == number * pipeline_bytes(shape, parallel, stage, settings) / vpp
