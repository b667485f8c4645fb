"""Steps of an engine: how often the host waits for the device does not depend on the number of layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megarl.config import RolloutConfig
from tests.engine.test_engine import SAMPLED, request
from tests.host_waits import host_waits
from tests.rank_pool import RankPool

OF_A_STEP = {
    ("tolist", "worker/cpu_model_runner.py:_to_list"): "sampled tokens",
    ("cpu", "v1/outputs.py:tolists"): "log-probs of sampled tokens: ids, values, ranks",
    ("numpy", "v1/outputs.py:tolists"): "the same",
    ("numpy", "worker/gpu_model_runner.py:_prepare_inputs"): "lengths, in host memory",
    ("numpy", "worker/gpu_model_runner.py:_build_attention_metadata"): "lengths, in host memory",
}
"""Reads of tensors in one step, with what is read."""


def step(model_path: str) -> dict[tuple[str, str], int]:
    """Return the reads of tensors' values in a step of four running requests."""
    from safetensors.torch import load_file

    from megarl.engine.engine import RolloutEngine

    config = RolloutConfig(tp=1, kv_cache_gib=0.05, max_concurrent_requests=32)
    engine = RolloutEngine(model_path, config, max_model_len=128, dtype="float32", seed=3)
    engine.model.load_weights(load_file(f"{model_path}/model.safetensors").items())
    engine.advance([request(f"{number}", (7, 11, 13), SAMPLED, number) for number in range(4)], (), 0.0)
    with host_waits() as places:
        engine.advance([], (), 0.0)
    return dict(places)


def test_the_host_waits_a_fixed_number_of_times(ranks: RankPool, tiny_model: Callable[..., Path]) -> None:
    few, many = (
        ranks.run(step, str(tiny_model(num_layers=layers)), world_size=1)[0] for layers in (2, 4)
    )  # fmt: skip
    assert few == many
    assert few.keys() <= OF_A_STEP.keys() and ("tolist", "worker/cpu_model_runner.py:_to_list") in few
    assert max(few.values()) <= 3
