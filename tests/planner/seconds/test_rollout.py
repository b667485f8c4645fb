"""Seconds of a rollout against steps of an engine that are typed in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megarl.families.published import PUBLISHED
from megarl.families.shape import ModelShape, shape_from_config
from megarl.planner.memory.engine_bytes import cache_block_bytes
from megarl.planner.seconds.constants import Constants
from megarl.planner.seconds.gpus import GpuSpeeds
from megarl.planner.seconds.lengths import log_normal, recorded_lengths
from megarl.planner.seconds.rollout import EngineLayout, RolloutCost
from megarl.planner.seconds.work import model_work

EQUAL = recorded_lengths([1000.0] * 4, limit=1000, prompt_tokens=0.0, source="typed in")


@pytest.fixture
def fixed(dense: ModelShape, gpu: GpuSpeeds, bare: Constants) -> RolloutCost:
    """Decoding steps that take 10 ms, whatever is decoded: memory and matrix products take no time."""
    fast = replace(gpu, memory=1e30, flops=1e30)
    return RolloutCost(work=model_work(dense), gpu=fast, constants=replace(bare, engine_step_seconds=0.01))


def _engines(num: int = 1, requests: int = 64, tokens: float = 1e9) -> EngineLayout:
    return EngineLayout(tp=1, num_engines=num, max_requests=requests, cache_tokens=tokens)


def test_equal_completions_take_a_step_for_each_token(fixed: RolloutCost) -> None:
    found = fixed.rollout_seconds(_engines(), EQUAL, num_samples=64, samples_per_prompt=1)
    assert found.seconds == pytest.approx(10.0) and found.full == 0 and found.requests == 64


def test_waiting_requests_take_further_rounds(fixed: RolloutCost) -> None:
    found = fixed.rollout_seconds(_engines(), EQUAL, num_samples=256, samples_per_prompt=1)
    # Three rounds of 64 while others wait; the fourth has begun at different times, so nearly a round is left.
    assert found.full == pytest.approx(30.0) and found.tail == pytest.approx(10.0, rel=0.05)
    assert not found.limited_by_cache


def test_a_small_cache_limits_the_requests(fixed: RolloutCost) -> None:
    # An active request has 500 tokens on average: 16 of them fit.
    found = fixed.rollout_seconds(_engines(tokens=8000.0), EQUAL, num_samples=64, samples_per_prompt=1)
    assert found.requests == pytest.approx(16) and found.limited_by_cache
    assert found.full == pytest.approx(30.0)


def test_the_longest_completion_is_the_floor_of_a_rollout(fixed: RolloutCost) -> None:
    lengths = log_normal(mean=500, limit=4000, prompt_tokens=0.0)
    seconds = [
        fixed.rollout_seconds(_engines(num=num), lengths, num_samples=2048, samples_per_prompt=8).seconds
        for num in (1, 8, 64, 512)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(0.01 * lengths.longest(2048), rel=0.02)


def test_engines_ahead_overlap_the_tails_of_steps(fixed: RolloutCost) -> None:
    lengths = log_normal(mean=500, limit=4000, prompt_tokens=0.0)
    arguments = dict(num_samples=64, samples_per_prompt=8)
    one, eight = (fixed.steady_seconds(_engines(), lengths, staleness=n, **arguments) for n in (1, 8))
    assert one.seconds == pytest.approx(fixed.rollout_seconds(_engines(), lengths, **arguments).seconds)
    assert eight.seconds < 0.7 * one.seconds


def test_a_step_reads_weights_and_cache_once(dense: ModelShape, gpu: GpuSpeeds, bare: Constants) -> None:
    cost = RolloutCost(work=model_work(dense), gpu=gpu, constants=bare)
    one, many = cost.step_seconds(1, requests=np.array([1.0, 8.0]), context=np.array([0.0, 1000.0]))
    work = model_work(dense)
    read = 2 * (work.layer_weights + dense.vocab_size * dense.hidden_size)
    assert one == pytest.approx(read / gpu.memory)
    # 40 layers, 8 heads of 128 channels, keys and values, two bytes each.
    assert many - one == pytest.approx(8 * 1000 * 40 * 2 * 8 * 128 * 2 / gpu.memory)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-14B", "openai/gpt-oss-20b", "Qwen/Qwen3-Next-80B-A3B-Instruct"])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_step_reads_the_cache_that_the_memory_plan_counts(
    name: str, tp: int, gpu: GpuSpeeds, bare: Constants
) -> None:
    shape = shape_from_config(dict(PUBLISHED[name]))
    cost = RolloutCost(work=model_work(shape), gpu=replace(gpu, flops=1e30, nvlink=1e30), constants=bare)
    # 100 tokens are within every window.
    empty, filled = cost.step_seconds(tp, requests=np.array([8.0, 8.0]), context=np.array([0.0, 100.0]))
    planned = cache_block_bytes(shape, tp, block_tokens=1, itemsize=2)
    assert filled - empty == pytest.approx(8 * 100 * planned / gpu.memory)


def test_layers_read_no_more_than_their_window(gpu: GpuSpeeds, bare: Constants) -> None:
    # gpt-oss-20b: every other of 24 layers has a window of 128 tokens; 8 heads of 64 channels, keys and values.
    shape = shape_from_config(dict(PUBLISHED["openai/gpt-oss-20b"]))
    cost = RolloutCost(work=model_work(shape), gpu=replace(gpu, flops=1e30), constants=bare)
    empty, filled = cost.step_seconds(1, requests=np.array([1.0, 1.0]), context=np.array([0.0, 4000.0]))
    assert filled - empty == pytest.approx((12 * 4000 + 12 * 128) * 2 * 8 * 64 * 2 / gpu.memory)
    # Qwen3-Next: one of four layers attends.
    assert model_work(shape_from_config(dict(PUBLISHED["Qwen/Qwen3-Next-80B-A3B-Instruct"]))).num_attention_layers == 12


def test_few_requests_choose_few_experts(experts: ModelShape, gpu: GpuSpeeds, bare: Constants) -> None:
    cost = RolloutCost(work=model_work(experts), gpu=gpu, constants=bare)
    share = cost._chosen_share(np.array([1.0, 1e6]))
    assert share == pytest.approx([8 / 128, 1.0])


def test_engines_over_nodes_have_the_latency_of_the_network(dense: ModelShape, gpu: GpuSpeeds, bare: Constants) -> None:
    slow = replace(bare, reduce_seconds=1e-5, network_reduce_seconds=1e-4)
    cost = RolloutCost(
        work=model_work(dense), gpu=replace(gpu, memory=1e30, flops=1e30, nvlink=1e30, network=1e30), constants=slow
    )
    near, far = (float(cost.step_seconds(tp, requests=np.array([1.0]), context=np.array([0.0]))[0]) for tp in (8, 16))
    assert near == pytest.approx(2 * 40 * 1e-5) and far == pytest.approx(2 * 40 * 1e-4)


def test_float32_engines_read_and_send_twice_the_bytes(dense: ModelShape, gpu: GpuSpeeds, bare: Constants) -> None:
    # Matrix products take no time, so bytes alone decide.
    fast = replace(gpu, flops=1e30)
    requests, context = np.array([8.0]), np.array([1000.0])
    short, long = (
        RolloutCost(
            work=model_work(dense),
            gpu=fast,
            constants=bare,
            item_bytes=item,
            activation_bytes=item,
            cache_item_bytes=item,
        ).step_seconds(2, requests=requests, context=context)
        for item in (2, 4)
    )
    assert float(long[0]) == pytest.approx(2 * float(short[0]))
