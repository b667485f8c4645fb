"""Losses of whole trajectories: all segments of one have one ratio, also over context-parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import AlgorithmConfig, CriticConfig, Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.rollout.step.advantages import keep_highest_entropies
from megarl.rollout.step.rl_batch import assign_token_weights
from megarl.training.model import ModelShard
from megarl.training.objective import StepNumbers, critic_objective, mismatch_metrics, policy_objective
from megarl.training.rows.choice import make_microbatch
from megarl.training.rows.metrics import name_metrics, read_metrics
from megarl.types import ConfigError, TrainingSequence
from tests.rank_pool import RankPool
from tests.rollout.batches import rl_batch
from tests.shapes import small_shape

LOG_RATIOS = [[0.3, 0.3, 0.0], [-0.1, 0.0], [-0.2, -0.2]]
"""Ratios of the trained tokens of three segments. The first two are one trajectory, whose mean is a tenth."""
SAMPLES = np.array([0, 0, 1])
ADVANTAGES = [1.0, 1.0, -1.0]
ALGORITHM = {
    "policy_loss": "gspo", "clip_low": 0.1, "clip_high": 0.2, "aggregation": "sequence_mean_token_mean",
}  # fmt: skip
RATIO = 1.1051709
"""exp(0.1). By segments it would be exp(0.2) and exp(-0.05)."""


def segment(log_ratios: list[float], advantage: float, prompt: int) -> TrainingSequence:
    """The log-ratios travel as the engine's log-probs do; the log-probs of before are -1."""
    length = prompt + len(log_ratios)
    mask = np.arange(length) >= prompt
    values = np.concatenate([np.zeros(prompt), log_ratios]).astype(np.float32)
    return TrainingSequence(
        np.arange(length),
        mask,
        advantages=np.where(mask, advantage, 0).astype(np.float32),
        old_logprobs=np.full(length, -1, np.float32),
        values=values,
    )


def loss_on_rank(cp: int, algorithm: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of the loss, its metrics, and the gradient of each of its trained tokens."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=cp, create_gloo_process_groups=False)
    config = AlgorithmConfig.model_validate(algorithm)
    parts = zip(LOG_RATIOS, ADVANTAGES, (2, 5, 1), strict=True)
    batch = TokenBatch.from_sequences([segment(*part) for part in parts])
    batch.samples = SAMPLES
    assign_token_weights(batch, config)
    row = make_microbatch(
        batch, multiple=1, qkv_format="packed", device=torch.device("cpu"), cp=cp, cp_rank=dist.get_rank()
    )
    policy_logprobs = (row.per_token["values"] - 1).requires_grad_()
    output = torch.stack([policy_logprobs, torch.zeros_like(policy_logprobs)])
    loss, _, unread = policy_objective(config)(output, row, StepNumbers(0.0))
    metrics = name_metrics(read_metrics([unread])[0])
    loss.backward()
    assert policy_logprobs.grad is not None
    return {
        "loss": loss.item(),
        "ratio": metrics["train/ratio"].number * int(row.mask.sum()),
        "kl_update": metrics["kl/update"].number * int(row.mask.sum()),
        "slopes": list(
            zip(row.per_token["advantages"][row.mask].tolist(), policy_logprobs.grad[row.mask].tolist(), strict=True)
        ),
    }


def test_tokens_of_lower_entropy_have_kl_and_entropy_bonus_alone() -> None:
    """Against the formula in float64: the denominator is that of all tokens."""
    random = np.random.default_rng(5)
    lengths, prompt, share = (7, 4, 9), 2, 0.3
    config = AlgorithmConfig(kl_coefficient=0.2, entropy_coefficient=0.05, entropy_top_share=share)
    drawn = {name: random.normal(-2, 0.4, sum(lengths)).astype(np.float32) for name in ("policy", "old", "reference")}
    drawn |= {name: random.gamma(1.0, 1.0, sum(lengths)).astype(np.float32) for name in ("entropies", "later")}
    drawn["advantages"] = random.normal(0, 1, sum(lengths)).astype(np.float32)
    parts = {name: np.split(values, np.cumsum(lengths)[:-1]) for name, values in drawn.items()}
    batch = rl_batch(*["-" * prompt + "x" * (length - prompt) for length in lengths])
    batch.entropies = drawn["entropies"]
    batch.per_token |= {
        "old_logprobs": drawn["old"], "reference_logprobs": drawn["reference"], "advantages": drawn["advantages"],
        "values": drawn["policy"], "returns": drawn["later"],
    }  # fmt: skip
    metrics = keep_highest_entropies(batch, config)
    assign_token_weights(batch, config)
    row = make_microbatch(batch, multiple=1, qkv_format="packed", device=torch.device("cpu"))
    # The entropies of the update's own pass are others than those before the step that chose.
    output = torch.stack([row.per_token["values"].requires_grad_(), row.per_token["returns"]])
    loss, _, _ = policy_objective(config)(output, row, StepNumbers(config.kl_coefficient))
    value = {name: np.concatenate([own[prompt:] for own in of]).astype(np.float64) for name, of in parts.items()}
    count = len(value["policy"])
    threshold = np.sort(value["entropies"])[count - int(np.ceil(share * count))]
    ratio = np.exp(value["policy"] - value["old"])
    clipped = np.minimum(ratio * value["advantages"], np.clip(ratio, 0.8, 1.2) * value["advantages"])
    difference = value["reference"] - value["policy"]
    expected = -clipped * (value["entropies"] >= threshold) + 0.2 * (np.exp(difference) - difference - 1)
    assert loss.item() == pytest.approx((expected - 0.05 * value["later"]).sum() / count, rel=1e-5)
    assert metrics == pytest.approx(
        {"entropy/threshold": threshold, "entropy/trained_share": np.ceil(share * count) / count}
    )


RECIPROCAL = """
def loss(policy_logprobs, old_logprobs, advantages):
    ratios = (policy_logprobs - old_logprobs).exp()
    return -ratios * advantages + 0.01 * ratios / advantages, {"ratio": ratios.detach()}
"""
"""A loss with an infinite value and slope on tokens with advantage zero, as untrained ones have."""
OVERFLOWING = """
def loss(policy_logprobs, old_logprobs, advantages):
    inverse = (old_logprobs - policy_logprobs).exp()
    return -advantages * policy_logprobs + 0.01 * inverse, {}
"""
"""A loss with an infinite value and slope on a token that the policy no longer writes."""


@pytest.mark.parametrize("supervised", [False, True], ids=["", "with conversations"])
@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param({"policy_loss": "own.py:loss"}, id="own loss"),
        pytest.param({"kl_coefficient": 0.2, "kl_estimator": "k2"}, id="k2"),
        pytest.param({"kl_coefficient": 0.2, "kl_estimator": "k1"}, id="k1"),
        pytest.param({"entropy_coefficient": 0.1}, id="entropies"),
    ],
)
def test_what_is_not_trained_stays_out_of_the_gradient(
    algorithm: dict[str, Any], supervised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of the trained tokens alone: of a batch whose other tokens hold numbers in place of NaN."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(RECIPROCAL)
    config = AlgorithmConfig.model_validate(algorithm)
    mask = np.array([0, 0, 1, 1, 0, 1, 1], bool)
    is_policy = mask & (np.arange(7) < 6) if supervised else mask
    random = np.random.default_rng(3)
    names = ["old_logprobs", "reference_logprobs", "rollout_logprobs", "advantages", "importance_weights"]
    names += ["policy", "entropies"]
    values = {name: random.uniform(-2, -1, 7).astype(np.float32) for name in names}

    def gradient(elsewhere: float) -> torch.Tensor:
        batch = TokenBatch.from_sequences([TrainingSequence(np.arange(7), mask)])
        # A model's outputs stay numbers: NaN there would reach the gradient of its own layers.
        filled = {name: np.where(is_policy, array, np.float32(elsewhere)) for name, array in values.items()}
        filled["advantages"] = np.where(is_policy, values["advantages"], np.float32(1.0 if elsewhere == 1.0 else 0.0))
        batch.per_token |= filled | {name: values[name] for name in ("policy", "entropies")}
        if supervised:
            batch.per_token["supervised"] = (mask & ~is_policy).astype(np.float32)
        assign_token_weights(batch, config)
        row = make_microbatch(batch, multiple=1, qkv_format="packed", device=torch.device("cpu"))
        output = torch.stack([row.per_token["policy"], row.per_token["entropies"]]).requires_grad_()
        loss, _, _ = policy_objective(config)(output, row, StepNumbers(config.kl_coefficient))
        loss.backward()
        assert output.grad is not None and np.isfinite(loss.item())
        return output.grad

    found = gradient(np.nan)
    torch.testing.assert_close(found, gradient(1.0), rtol=0, atol=0)
    # Position t of a row predicts token t + 1.
    is_trained = torch.from_numpy(np.append(mask[1:], False))
    assert found[0].any() and not found[:, ~is_trained].any()


LEFT = {"policy": [-1.0, -2.0, -300.0], "old": [-1.2, -1.7, -1.0], "reference": [-1.1, -1.9, -299.0]}
"""Log-probs of the trained tokens of three samples. The policy no longer writes the third one."""


def overflow_on_rank(algorithm: dict[str, Any], weights: list[float] | None) -> tuple[float, list[float]]:
    """The loss of three samples with one trained token each, and the tokens' gradients."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    config = AlgorithmConfig(kl_coefficient=0.2, kl_estimator="k2", **algorithm)
    batch = TokenBatch.from_sequences([TrainingSequence(np.arange(2), np.array([False, True]))] * 3)
    columns = {"policy": LEFT["policy"], "old_logprobs": LEFT["old"], "reference_logprobs": LEFT["reference"]}
    # The engine's log-probs are those of before the update, except in the rejected sample.
    columns |= {"advantages": [0.5, -0.5, -1.0], "rollout_logprobs": [-1.2, -1.7, -9.0]}
    columns |= {} if weights is None else {"importance_weights": weights}
    batch.per_token |= {name: np.repeat(np.array(values, np.float32), 2) for name, values in columns.items()}
    assign_token_weights(batch, config)
    row = make_microbatch(batch, multiple=1, qkv_format="packed", device=torch.device("cpu"))
    output = torch.stack([row.per_token["policy"], torch.zeros(6)]).requires_grad_()
    loss, _, _ = policy_objective(config)(output, row, StepNumbers(config.kl_coefficient))
    loss.backward()
    assert output.grad is not None
    # Position t of a row predicts token t + 1.
    return loss.item(), output.grad[0, ::2].tolist()


@pytest.mark.parametrize(
    ("algorithm", "weights"),
    [
        pytest.param({"off_policy_limit": 20.0}, None, id="sequences that the policy left"),
        pytest.param({}, [1.0, 1.0, 0.0], id="weight zero"),
        pytest.param({"importance_sampling": "icepop"}, None, id="rejected in the update"),
    ],
)
def test_tokens_without_a_policy_loss_keep_an_infinite_one_from_the_others(
    ranks: RankPool, algorithm: dict[str, Any], weights: list[float] | None, tmp_path: Path
) -> None:
    """The last sample's loss overflows. It has the KL penalty alone; the other samples have their own gradients."""
    (tmp_path / "own.py").write_text(OVERFLOWING)
    algorithm = {"policy_loss": f"{tmp_path}/own.py:loss", **algorithm}
    [(loss, gradient)] = ranks.run(overflow_on_rank, algorithm, weights, world_size=1)
    policy, old = np.array(LEFT["policy"]), np.array(LEFT["old"])
    penalties = 0.2 * (policy - LEFT["reference"])
    own = -np.array([0.5, -0.5]) - 0.01 * np.exp(old[:2] - policy[:2])
    assert np.isfinite(loss) and gradient == pytest.approx((penalties + np.append(own, 0.0)) / 3, rel=1e-5)


WRITING = """
def loss(policy_logprobs, old_logprobs, advantages{further}):
    old, weights = {old}, {weights}
    old += 0.5
    weights *= 2.0
    ratios = (policy_logprobs - old).exp()
    return -ratios * weights, {{"ratio": ratios.detach()}}
"""
"""A loss that writes into its arguments, or into copies of them."""


def terms_on_rank(algorithm: dict[str, Any], has_old: bool) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient and metrics of one row with a KL penalty, importance weights and log-probs of its own."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    random = np.random.default_rng(3)
    mask = np.array([0, 0, 1, 1, 0, 1, 1], bool)
    names = ["reference_logprobs", "rollout_logprobs", "policy", "entropies", *(["old_logprobs"] if has_old else [])]
    batch = TokenBatch.from_sequences([TrainingSequence(np.arange(7), mask)])
    batch.per_token |= {name: random.uniform(-2, -1, 7).astype(np.float32) for name in names}
    batch.per_token["advantages"] = np.where(mask, random.uniform(-1, 1, 7), 0).astype(np.float32)
    config = AlgorithmConfig.model_validate(algorithm)
    assign_token_weights(batch, config)
    row = make_microbatch(batch, multiple=1, qkv_format="packed", device=torch.device("cpu"))
    output = torch.stack([row.per_token["policy"], row.per_token["entropies"]]).requires_grad_()
    loss, _, unread = policy_objective(config)(output, row, StepNumbers(config.kl_coefficient))
    loss.backward()
    assert output.grad is not None and output.grad[0].any()
    return (
        loss.item(),
        output.grad,
        {name: metric.number for name, metric in name_metrics(read_metrics([unread])[0]).items()},
    )


@pytest.mark.parametrize("further", ["", ", cu_seqlens, mask"], ids=["of tokens", "of sequences"])
@pytest.mark.parametrize("has_old", [True, False], ids=["old log-probs", "the update's own"])
@pytest.mark.parametrize("limit", [None, 0.1], ids=["", "off_policy_limit"])
def test_a_loss_that_writes_into_its_arguments_changes_no_other_term(
    ranks: RankPool, further: str, has_old: bool, limit: float | None, tmp_path: Path
) -> None:
    """KL, importance weights and metrics are those of a loss that writes into copies."""
    (tmp_path / "own.py").write_text(WRITING.format(further=further, old="old_logprobs", weights="advantages"))
    copies = {"old": "old_logprobs.clone()", "weights": "advantages.clone()"}
    (tmp_path / "careful.py").write_text(WRITING.format(further=further, **copies))
    algorithm = {"kl_coefficient": 0.2, "kl_unbiased": True, "importance_sampling": "tis", "off_policy_limit": limit}
    written, careful = (
        ranks.run(terms_on_rank, algorithm | {"policy_loss": f"{tmp_path / file}:loss"}, has_old, world_size=1)[0]
        for file in ("own.py", "careful.py")
    )
    assert written[0] == careful[0] and torch.equal(written[1], careful[1]) and written[2] == careful[2]


def test_returns_of_tokens_that_are_not_trained_stay_out_of_the_critic_s_gradient() -> None:
    mask = np.array([0, 1, 0, 1], bool)
    batch = TokenBatch.from_sequences([TrainingSequence(np.arange(4), mask)])
    batch.per_token |= {name: np.where(mask, 2.0, np.nan).astype(np.float32) for name in ("values", "returns")}
    assign_token_weights(batch, AlgorithmConfig(aggregation="token_mean"))
    row = make_microbatch(batch, multiple=1, qkv_format="packed", device=torch.device("cpu"))
    output = torch.ones(1, 4).requires_grad_()
    critic_objective(CriticConfig(path="c", clip=None))(output, row, StepNumbers(0.0))[0].backward()
    assert output.grad is not None and output.grad.tolist() == [[-0.5, 0, -0.5, 0]]


@pytest.mark.parametrize(
    ("result", "settings", "fault"),
    [
        ("policy_logprobs", {}, r"a tensor \[5\] of"),
        ("policy_logprobs, {}", {"skip_ratio": 20.0}, "no metric 'ratio', which algorithm.skip_ratio reads"),
    ],
)
def test_a_loss_of_the_user_s_own_that_returns_another_form_is_named(
    result: str, settings: dict[str, Any], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(f"def bare(policy_logprobs, old_logprobs, advantages):\n    return {result}\n")
    config = AlgorithmConfig(policy_loss="own.py:bare", **settings)
    batch = TokenBatch.from_sequences([segment(LOG_RATIOS[0], 1.0, 2)])
    assign_token_weights(batch, config)
    row = make_microbatch(batch, multiple=1, qkv_format="packed", device=torch.device("cpu"))
    logprobs = row.per_token["values"].requires_grad_()
    with pytest.raises(ConfigError, match=rf"^algorithm\.policy_loss = own\.py:bare: the function returned {fault}"):
        policy_objective(config)(torch.stack([logprobs, logprobs]), row, StepNumbers(0.0))


@pytest.mark.parametrize("cp", [1, 2])
def test_a_trajectory_that_the_policy_left_is_dropped_as_a_whole(ranks: RankPool, cp: int) -> None:
    """The first one has a positive advantage. The mean of the second, 0.2, is above the limit of 0.15."""
    algorithm = {"policy_loss": "unclipped", "aggregation": "sequence_mean_token_mean", "off_policy_limit": 0.15}
    kept, dropped = (
        ranks.run(loss_on_rank, cp, algorithm | {"off_policy_limit": limit}, world_size=cp) for limit in (0.25, 0.15)
    )
    loss_of_second = np.exp(-0.2) / 2
    assert sum(part["loss"] for part in kept) - sum(part["loss"] for part in dropped) == pytest.approx(
        loss_of_second, abs=1e-6
    )
    slopes = sorted(slope for part in dropped for slope in part["slopes"])
    assert slopes[:2] == [(-1.0, 0.0)] * 2 and all(slope < 0 for _, slope in slopes[2:])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_kl_with_the_ratio_and_a_penalty_on_drift_are_those_of_their_definitions(estimator: str) -> None:
    """In float64, over 50 cases of several minibatches with samples of several segments; gradients by autograd."""
    config = AlgorithmConfig.model_validate(
        {"kl_coefficient": 0.3, "kl_unbiased": True, "kl_estimator": estimator, "policy_loss": "unclipped"}
    )
    names = ("policy", "old_logprobs", "reference_logprobs", "advantages")
    for case in range(50):
        random = np.random.default_rng(case)
        for _ in range(1 + case % 3):
            lengths = random.integers(2, 9, size=4)
            batch = TokenBatch.from_sequences(
                [TrainingSequence(np.arange(length), random.random(length) < 0.8) for length in lengths]
            )
            batch.samples, total = np.array([0, 0, 1, 2]), int(lengths.sum())
            batch.per_token |= {name: random.normal(-2, 0.4, total).astype(np.float32) for name in names}
            penalties = np.where(random.random(total) < 0.3, 0.5, 0.0)
            batch.per_token["log_ratio_penalties"] = penalties.astype(np.float32)
            assign_token_weights(batch, config)
            row = make_microbatch(batch, multiple=1, qkv_format="packed", device=torch.device("cpu"))
            row.per_token.update({name: values.double() for name, values in row.per_token.items()})
            ours = torch.stack([row.per_token["policy"], torch.zeros(total)]).requires_grad_()
            loss, _, _ = policy_objective(config)(ours, row, StepNumbers(config.kl_coefficient))
            theirs = row.per_token["policy"].clone().requires_grad_()
            expected = theirs.new_zeros(())
            for place in row.mask.nonzero()[:, 0].tolist():
                values = {name: row.per_token[name][place].item() for name in row.per_token}
                ratio = (theirs[place] - values["old_logprobs"]).exp()
                distance = values["reference_logprobs"] - theirs[place]
                divergence = -distance if estimator == "k1" else distance.exp() - distance - 1
                of_token = -ratio * values["advantages"] + 0.3 * ratio * divergence
                of_token = of_token + values["log_ratio_penalties"] * (theirs[place] - values["old_logprobs"]).abs()
                expected = expected + values["token_weights"] * of_token
            gradients = [torch.autograd.grad(value, leaf)[0] for value, leaf in ((loss, ours), (expected, theirs))]
            torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(gradients[0][0], gradients[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("cp", [1, 2])
def test_the_ratio_of_gspo_is_the_trajectory_s(ranks: RankPool, cp: int) -> None:
    found = ranks.run(loss_on_rank, cp, ALGORITHM, world_size=cp)
    # The first trajectory is within the clip, minus its ratio; the second, exp(-0.2), is held at 0.9.
    assert sum(part["loss"] for part in found) == pytest.approx((-RATIO + 0.9) / 2, abs=1e-6)
    assert sum(part["ratio"] for part in found) == pytest.approx(5 * RATIO + 2 * 0.8187308, abs=1e-5)
    # exp(d) - 1 - d of the log-ratios d = 0.3 (twice), -0.1 and -0.2 (twice), and of two that are 0.
    assert sum(part["kl_update"] for part in found) == pytest.approx(
        2 * 0.0498588 + 0.0048374 + 2 * 0.0187308, abs=1e-6
    )
    slopes = sorted(slope for part in found for slope in part["slopes"])
    # A fifth of the trajectory's half of the loss for each of its tokens; none for tokens that are clipped.
    assert slopes == [(-1.0, 0.0)] * 2 + [(1.0, pytest.approx(-RATIO / 10, abs=1e-6))] * 5


@pytest.mark.parametrize(("coefficient", "is_trained"), [(0.0, False), (0.01, True)])
def test_entropies_have_gradients_where_the_loss_has_them(coefficient: float, is_trained: bool) -> None:
    fields = {"name": "n", "loop": "rl", "model": {"path": "m"}, "data": {"train": "d"}}
    shard = object.__new__(ModelShard)
    shard.recipe = Recipe.model_validate(fields | {"algorithm": {"entropy_coefficient": coefficient}})
    shard.parallel, shard.shape, shard.device = ParallelConfig(1, 1, 1, 1), small_shape(), torch.device("cpu")
    assert shard._head_settings()["trains_entropy"] is is_trained


def test_shares_of_measured_and_bit_equal_tokens_count_tokens_with_a_loss() -> None:
    nan = float("nan")
    trainer, engine = (
        torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]),
        torch.tensor([-1.0, -2.0, -3.25, nan, nan, -6.0]),
    )
    is_counted = torch.tensor([True, True, True, True, False, False])
    found = {
        name: metric.number for name, metric in read_metrics([mismatch_metrics(trainer, engine, is_counted)])[0].items()
    }
    assert found["logprob_gap/measured"] == 3 / 4
    assert found["logprob_gap/bit_equal"] == pytest.approx(2 / 3)
    assert found["logprob_gap/max"] == 0.25
