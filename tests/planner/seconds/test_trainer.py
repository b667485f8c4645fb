"""Seconds of a trainer's updates against FLOPs, bytes and schedules that are typed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from megarl.families.flops import forward_flops
from megarl.families.shape import ModelShape
from megarl.planner.seconds.constants import Constants
from megarl.planner.seconds.gpus import GpuSpeeds
from megarl.planner.seconds.trainer import CauseSeconds, Layouts, Recomputed, TrainerCost
from megarl.planner.seconds.work import model_work

LENGTHS = np.full(64, 4096.0)
TOKENS = float(LENGTHS.sum())


def _update(
    cost: TrainerCost,
    *layouts: Mapping[str, int],
    again: float = 0.0,
    row_tokens: float = 16384.0,
    keeps_logits: bool = True,
) -> CauseSeconds:
    at = Layouts.of(*layouts)
    share = np.full(len(layouts), again)
    return cost.update_seconds(
        at,
        Recomputed(attention=share, feed_forward=share),
        tokens=TOKENS,
        updates=1,
        row_tokens=np.full(len(layouts), row_tokens),
        keeps_logits=keeps_logits,
    )


@pytest.fixture
def cost(dense: ModelShape, gpu: GpuSpeeds, bare: Constants) -> TrainerCost:
    work = model_work(dense)
    return TrainerCost(work=work, gpu=gpu, constants=bare, score_flops=work.score_flops(LENGTHS))


def test_weights_are_those_of_the_published_model(dense: ModelShape, experts: ModelShape) -> None:
    # As on the models' pages: 14.8 and 30.5 billion.
    assert model_work(dense).weights == pytest.approx(14.8e9, rel=0.005)
    assert model_work(experts).weights == pytest.approx(30.5e9, rel=0.005)
    assert model_work(dense).expert_weights == 0 < model_work(experts).expert_weights


def test_one_rank_computes_three_forward_passes(cost: TrainerCost, dense: ModelShape, gpu: GpuSpeeds) -> None:
    parts = _update(cost, {})
    flops = forward_flops(dense, LENGTHS.astype(np.int64))
    # 1.03: the slowest data-parallel rank.
    assert float(parts.compute[0]) == pytest.approx(1.03 * 3 * flops / gpu.flops)
    assert all(float(np.sum(value)) == 0 for value in (parts.bubble, parts.tensor_exchange, parts.gradients))


def test_recomputed_layers_are_a_third_more_without_the_head(cost: TrainerCost, dense: ModelShape) -> None:
    once, again = (_update(cost, {}, again=share) for share in (0.0, 1.0))
    head = 2.0 * dense.hidden_size * dense.vocab_size * TOKENS / cost.gpu.flops
    expected = (float(once.compute[0]) / 1.03 - 3 * head) / 3
    assert float(again.compute[0] - once.compute[0]) == pytest.approx(1.03 * expected)


def test_logits_computed_again_are_a_fourth_product_of_the_head(cost: TrainerCost, dense: ModelShape) -> None:
    # The last of three stages of 40 layers has one layer less, which saves its three passes, not a fourth.
    kept, again = (_update(cost, {}, {"pp": 3}, keeps_logits=keeps) for keeps in (True, False))
    head = 2.0 * dense.hidden_size * dense.vocab_size * TOKENS / cost.gpu.flops
    assert again.compute - kept.compute == pytest.approx(1.03 * head)


def test_a_pipeline_waits_for_its_other_stages(cost: TrainerCost) -> None:
    # 64 * 4096 tokens in rows of 16k, filled to 0.95, are 17 rows: 18 with two chunks of a stage.
    parts = _update(cost, {"pp": 4}, {"pp": 4, "vpp": 2})
    passes = parts.seconds - parts.bubble - parts.optimizer
    assert parts.bubble / passes == pytest.approx([3 / 17, 3 / 2 / 20])


def test_adam_on_the_host_moves_gradients_and_weights(cost: TrainerCost, gpu: GpuSpeeds) -> None:
    half = replace(cost, gpu=replace(gpu, pcie=5e10, host_memory=3e10), host_share=0.5)
    parts = _update(half, {})
    # 30 bytes a parameter through memory; on the host 4 bytes of gradient go there, and 2 of the weight come back.
    second = 0.5 * 30 / 4e12 + 0.5 * (30 / 3e10 + 6 / 5e10)
    assert float(parts.optimizer[0]) == pytest.approx(cost.work.weights * second)


def test_groups_over_nodes_exchange_at_the_network_speed(cost: TrainerCost) -> None:
    parts = _update(cost, {"tp": 8}, {"tp": 16})
    near, far = (float(value) for value in parts.tensor_exchange)
    assert far / near == pytest.approx((15 / 16) / (7 / 8) * 8)


def test_experts_over_nodes_send_more_slowly(experts: ModelShape, gpu: GpuSpeeds, bare: Constants) -> None:
    work = model_work(experts)
    cost = TrainerCost(
        work=work, gpu=gpu, constants=replace(bare, expert_half_tokens=100.0), score_flops=work.score_flops(LENGTHS)
    )
    parts = _update(cost, *({"ep": ep, "dp": 32} for ep in (1, 8, 32)))
    exchange = [float(value) for value in np.broadcast_to(parts.expert_exchange, 3)]
    assert exchange[0] == 0 < exchange[1] < exchange[2]
    # More ranks send their tokens to one expert, so its products are longer and more efficient.
    assert float(parts.compute[0]) > float(parts.compute[1]) > float(parts.compute[2])


def test_a_pass_without_gradients_takes_a_third(cost: TrainerCost) -> None:
    at = Layouts.of({"tp": 2, "dp": 4})
    row_tokens = np.array([16384.0])
    scoring = cost.scoring_seconds(at, tokens=TOKENS, row_tokens=row_tokens)
    update = cost.update_seconds(
        at, Recomputed(attention=np.zeros(1), feed_forward=np.zeros(1)), tokens=TOKENS, updates=1, row_tokens=row_tokens
    )
    assert float(update.compute[0] / scoring.compute[0]) == pytest.approx(3)


def test_float32_numbers_are_twice_as_many_bytes(cost: TrainerCost) -> None:
    split = {"tp": 2, "cp": 2, "dp": 2}
    short, long = (_update(at, split) for at in (cost, replace(cost, item_bytes=4)))
    for name in ("tensor_exchange", "context_exchange"):
        assert float(getattr(long, name)[0]) == pytest.approx(2 * float(getattr(short, name)[0])), name
    # A float32 gradient and a new value: 8 bytes in place of 6.
    assert float(long.gradients[0]) == pytest.approx(8 / 6 * float(short.gradients[0]))
    assert float(long.compute[0]) == float(short.compute[0])
