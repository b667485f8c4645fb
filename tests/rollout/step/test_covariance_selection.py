"""Clip-Cov and KL-Cov over a step of several segments, updates and orders of its samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megarl.rollout.step.covariance_selection import draw_token_numbers, select_by_covariance
from megarl.rollout.step.rl_batch import RLBatch
from megarl.training.objective import StepNumbers, policy_objective
from megarl.training.rows.choice import make_microbatch
from tests.rollout.batches import batch_of, recipe, segmented

MASKS = [("--xxx", "--xx"), ("-xx-x",), ("-x-xx", "-x"), ("--xxxx",)]
"""Segments of four trajectories; trained tokens are marked x."""
NUM_CASES = 50


def step_batch(case: int, order: list[int] | None = None) -> RLBatch:
    """A step's batch with random tokens, log-probs and advantages, its trajectories in this order."""
    random = np.random.default_rng(case)
    batches = []
    for number, masks in enumerate(MASKS):
        trajectory = segmented(number, 0, 1.0, *masks)
        for segment in trajectory.segments:
            segment.token_ids[:] = random.integers(0, 99, len(segment))
        batch = batch_of([trajectory])
        count = len(batch.token_ids)
        advantage = random.normal()
        batch.per_token |= {
            "old_logprobs": np.where(batch.loss_mask, np.log(random.uniform(0.01, 1, count)), 0).astype(np.float32),
            "advantages": np.where(batch.loss_mask, advantage, 0).astype(np.float32),
            "values": random.normal(0, 0.4, count).astype(np.float32),
        }
        batches.append((trajectory, batch))
    joined = [batches[number] for number in order or range(len(MASKS))]
    batch = RLBatch.from_groups([[trajectory] for trajectory, _ in joined])
    for name in ("old_logprobs", "advantages", "values"):
        batch.per_token[name] = np.concatenate([part.per_token[name] for _, part in joined])
    return batch


def recipe_of(**algorithm: Any) -> Any:
    return recipe(algorithm=algorithm, train={"prompts_per_step": 4, "samples_per_prompt": 1, "updates_per_step": 2})


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "kl_cov", "kl_cov_share": 0.2, "kl_cov_coefficient": 0.7},
        {"preset": "clip_cov", "clip_cov_share": 0.3, "clip_cov_range": (0.05, 2.0)},
    ],
    ids=["kl_cov", "clip_cov"],
)
def test_losses_of_all_updates_are_those_of_the_step_in_float64(algorithm: dict[str, Any]) -> None:
    """The choice is over the step, not over an update: the oracle has the whole step at once."""
    changed = recipe_of(**algorithm)
    for case in range(NUM_CASES):
        batch = step_batch(case)
        metrics = select_by_covariance(batch, changed, 3)
        mask = batch.loss_mask
        old, advantages = (batch.per_token[name].astype(np.float64) for name in ("old_logprobs", "advantages"))
        parts = (old - old[mask].mean()) * (advantages - advantages[mask].mean())
        if "kl_cov" in algorithm["preset"]:
            count = max(1, int(0.2 * mask.sum()))
            is_chosen = mask & (parts >= np.sort(parts[mask])[-count])
            assert metrics == {"covariance/penalised_share": pytest.approx(is_chosen.sum() / mask.sum())}
        else:
            candidates = np.flatnonzero(mask & (parts > 0.05) & (parts < 2.0))
            draws = draw_token_numbers(batch, (changed.seed, 3))
            chosen = sorted(candidates, key=lambda token: draws[token])[: max(1, int(0.3 * mask.sum()))]
            is_chosen = np.isin(np.arange(len(mask)), chosen)
            assert metrics == {"covariance/dropped_share": pytest.approx(is_chosen.sum() / mask.sum())}
        batch.per_token["returns"] = is_chosen.astype(np.float32)
        for minibatch in batch.minibatches(changed, 3):
            row = make_microbatch(minibatch, multiple=1, qkv_format="packed", device=torch.device("cpu"))
            moved = row.per_token["values"] * row.mask
            policy = (row.per_token["old_logprobs"] + moved).requires_grad_()
            output = torch.stack([policy, torch.zeros_like(policy)])
            loss, _, _ = policy_objective(changed.algorithm)(output, row, StepNumbers(0.0))
            p, o, a, w, c = (
                values.double()
                for values in (policy.detach(), *(row.per_token[name] for name in (
                    "old_logprobs", "advantages", "token_weights", "returns",
                )))
            )  # fmt: skip
            p.requires_grad_()
            ratio = (p - o).exp()
            if "kl_cov" in algorithm["preset"]:
                of_tokens = -ratio * a + 0.7 * c * (p - o).abs()
            else:
                of_tokens = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) * (1 - c)
            expected = (w * of_tokens).sum()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
            gradients = [
                torch.autograd.grad(value, leaf)[0].double() for value, leaf in ((loss, policy), (expected, p))
            ]
            torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_the_drawn_tokens_do_not_depend_on_the_order_of_samples() -> None:
    """Another number of ranks may return groups in another order."""
    changed = recipe_of(clip_cov_share=0.3, clip_cov_range=(-9.0, 9.0))
    order = [2, 0, 3, 1]
    one, other = step_batch(5), step_batch(5, order)
    for batch in (one, other):
        select_by_covariance(batch, changed, 3)
    by_sample = [np.split(batch.per_token["importance_weights"], batch.cu_samples[1:-1]) for batch in (one, other)]
    assert any((part == 0).any() and part.any() for part in by_sample[0])
    assert [by_sample[1][order.index(number)].tolist() for number in range(4)] == [
        part.tolist() for part in by_sample[0]
    ]
    again = step_batch(5)
    select_by_covariance(again, changed, 4)
    assert again.per_token["importance_weights"].tolist() != one.per_token["importance_weights"].tolist()


def test_equal_sequences_have_draws_of_their_own() -> None:
    batch = batch_of([segmented(0, 0, 1.0, "-xxx"), segmented(0, 1, 0.0, "-xxx")])
    draws = draw_token_numbers(batch, (1, 2))
    assert np.array_equal(batch.token_ids[:4], batch.token_ids[4:]) and not np.intersect1d(draws[:4], draws[4:]).size


def test_dropped_tokens_lose_the_weight_of_a_correction() -> None:
    batch = step_batch(1)
    batch.per_token["importance_weights"] = np.full(len(batch.token_ids), 1.5, np.float32)
    metrics = select_by_covariance(batch, recipe_of(clip_cov_share=0.25, clip_cov_range=(-9.0, 9.0)), 0)
    weights = batch.per_token["importance_weights"]
    count = int(0.25 * batch.loss_mask.sum())
    assert (weights == 0).sum() == count and set(weights.tolist()) == {0.0, 1.5}
    assert metrics["covariance/dropped_share"] == pytest.approx(count / batch.loss_mask.sum())
    assert select_by_covariance(batch, recipe_of(), 0) == {}
