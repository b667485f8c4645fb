"""An EAGLE-3 drafter trained with the policy: its loss, its gradients and its files. The policy does not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.tracking.metrics import merge, values
from tests.models.drafts.eagle3 import make_eagle3
from tests.rank_pool import RankPool
from tests.token_batches import own_rows
from tests.training.state.test_checkpoint import build
from tests.training.uneven_sequences import make_sequences

STEPS, DECAY = 3, 0.8
SIZES: dict[str, Any] = dict(
    hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, num_layers=8, initializer_range=0.2, intermediate_size=48
)
LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {}, "tensor": {"tp": 2}, "context": {"cp": 2}, "data": {"dp": 2}, "stages": {"pp": 2},
    "virtual stages": {"pp": 2, "vpp": 2}, "stages, data": {"pp": 2, "dp": 2}, "stages, tensor": {"pp": 2, "tp": 2},
    "stages, context": {"pp": 2, "cp": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def policy(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(**SIZES)


@pytest.fixture(scope="module")
def drafter(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_eagle3(tmp_path_factory.mktemp("eagle3") / "drafter", policy)


def recipe_of(policy: Path, drafter: Path, rate: float | None, **trainer: Any) -> Recipe:
    learning = {"drafter_learning_rate": rate, "drafter_step_decay": DECAY} if rate else {}
    return Recipe.model_validate(
        {
            "name": "drafter",
            "loop": "sft",
            "model": {"path": str(policy), "dtype": "float32"},
            "data": {"train": "unused", "validation": {"held_out": "unused"}},
            "rollout": {
                "vllm": {
                    "speculative_config": {
                        "method": "eagle3", "model": str(drafter), "num_speculative_tokens": STEPS,
                    }
                }
            },
            "trainer": {"max_tokens_per_microbatch": 48, **learning, **trainer},
            "optimizer": {"learning_rate": 1e-3, "schedule": "constant", "clip_grad_norm": 0.1},
        }
    )  # fmt: skip


def update_with_a_fault(recipe: Recipe, parallel: ParallelConfig) -> tuple[bool, bool, bool]:
    """Update once with a drafter's gradient of NaN: whether it was applied, was seen, and changed weights."""
    engine = build(recipe, parallel)
    before = {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}
    [faulty] = [parameter for name, parameter in engine.parameters.items() if name.endswith("drafter.norm.weight")]
    # Only one rank of two has the fault. The loss stays finite.
    if dist.get_rank() == 0:
        faulty.register_hook(lambda gradient: gradient * float("nan"))
    outcome = engine.update([TokenBatch.from_sequences(make_sequences()[:2])]).outcome
    is_changed = any(not torch.equal(before[name], parameter) for name, parameter in engine.parameters.items())
    return outcome.applied, outcome.not_finite, is_changed


def updated(recipe: Recipe, parallel: ParallelConfig, num_updates: int) -> dict[str, Any]:
    """One rank's log-probs, then its metrics, gradients and weights of the last update, and the policy's gradients."""
    engine = build(recipe, parallel)
    batch = TokenBatch.from_sequences(make_sequences())
    rows = own_rows(batch.lengths, parallel, recipe.trainer.max_tokens_per_microbatch)
    own = [batch.select(row) for row in rows]
    logprobs = engine.forward(own)
    metrics = [engine.update(own).metrics for _ in range(num_updates)]
    parameters: dict[str, Any] = engine.parameters
    return {
        "logprobs": logprobs,
        "metrics": metrics,
        "gradients": {name: parameter.main_grad.clone() for name, parameter in parameters.items()},
        "weights": {name: parameter.detach().clone() for name, parameter in parameters.items()},
        "rates": sorted({group["lr"] for group in engine.optimizer.param_groups}),
    }


@pytest.fixture(scope="module")
def outcome(ranks: RankPool, policy: Path, drafter: Path) -> Callable[..., dict[str, Any]]:
    """Values of the last rank after updates, with merged metrics of each update."""

    def run(layout: str, rate: float | None, num_updates: int = 1, **trainer: Any) -> dict[str, Any]:
        parallel = replace(ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1), **LAYOUTS[layout])
        # The gradients of a distributed optimizer are complete on no rank.
        recipe = recipe_of(policy, drafter, rate, **{"distributed_optimizer": False, **trainer})
        parts = ranks.run(updated, recipe, parallel, num_updates, world_size=parallel.world_size)
        metrics = [values(merge(part["metrics"][n] for part in parts)) for n in range(num_updates)]
        logprobs = [row for part in parts for row in part["logprobs"] or ()]
        # The last rank is on the last pipeline stage.
        return {**parts[-1], "parts": parts, "metrics": metrics, "logprobs": logprobs}

    return cache(run)


def naive_layer(w: Mapping[str, torch.Tensor], embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The last output [hidden_size] of the drafter's layer over embeddings and states [tokens, hidden_size]."""
    heads, kv_heads, dim = SIZES["num_heads"], SIZES["num_kv_heads"], SIZES["head_dim"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]

    x = torch.cat([norm(embeddings, "midlayer.input_layernorm"), norm(states, "midlayer.hidden_norm")], -1)
    count = len(x)
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=x.dtype) / dim)
    angles = torch.arange(count, dtype=x.dtype)[:, None] * frequencies

    def project(name: str, num: int, rotates: bool) -> torch.Tensor:
        y = (x @ w[f"midlayer.self_attn.{name}.weight"].T).view(count, num, dim).transpose(0, 1)
        if not rotates:
            return y
        pairs = torch.view_as_complex(torch.stack(y.chunk(2, -1), -1))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
        return torch.cat([turned[..., 0], turned[..., 1]], -1)

    q, k, v = project("q_proj", heads, True), project("k_proj", kv_heads, True), project("v_proj", kv_heads, False)
    k, v = (y.repeat_interleave(heads // kv_heads, 0) for y in (k, v))
    shares = (torch.einsum("hd,hkd->hk", q[:, -1], k) / dim**0.5).softmax(-1)
    attended = torch.einsum("hk,hkd->hd", shares, v).flatten()
    hidden = states[-1] + w["midlayer.self_attn.o_proj.weight"] @ attended
    y = norm(hidden, "midlayer.post_attention_layernorm")
    gate, up = (w[f"midlayer.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
    return hidden + w["midlayer.mlp.down_proj.weight"] @ (F.silu(gate) * up)


def oracle(policy: Path, drafter: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean KL and the gradients of the weighted sum, in float64: each draft from the tokens that precede it."""
    stored = load_file(drafter / "model.safetensors")
    names = [name for name in stored if name not in ("d2t", "t2d")]
    w = {name: stored[name].double().requires_grad_() for name in names}
    token_ids = stored["d2t"] + torch.arange(len(stored["d2t"]))
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64, attn_implementation="eager")
    total, losses = torch.zeros((), dtype=torch.float64), []
    for sequence in make_sequences():
        tokens = torch.from_numpy(sequence.token_ids).long()
        with torch.no_grad():
            output = model(tokens[None], output_hidden_states=True)
            targets = output.logits[0][:, token_ids].log_softmax(-1)
            embedded = model.get_input_embeddings()(tokens)
            layers = torch.cat([output.hidden_states[number][0] for number in (2, 4, 5)], -1)
        combined = layers @ w["fc.weight"].T
        assert sequence.token_weights is not None
        for place in range(len(tokens)):
            states = list(combined[: place + 1])
            for step in range(STEPS):
                if place + 2 + step >= len(tokens):
                    break
                inputs = embedded[1 : place + 2 + step]
                hidden = naive_layer(w, inputs, torch.stack(states))
                states.append(hidden)
                normed = hidden / (hidden.square().mean() + 1e-6).sqrt() * w["norm.weight"]
                drafted = (w["lm_head.weight"] @ normed).log_softmax(-1)
                target = targets[place + 1 + step]
                if sequence.loss_mask[place + 2 + step]:
                    loss = (target.exp() * (target - drafted)).sum()
                    weight = float(sequence.token_weights[place + 2 + step])
                    total = total + DECAY**step * weight * loss
                    losses.append(loss.item())
    total.backward()
    return float(np.mean(losses)), {name: value.grad for name, value in w.items() if value.grad is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_policy_is_the_same_bit_for_bit(outcome: Callable[..., dict[str, Any]], layout: str) -> None:
    alone, together = (outcome(layout, rate) for rate in (None, 0.01))
    assert len(alone["logprobs"]) > 1
    for one, other in zip(alone["logprobs"], together["logprobs"], strict=True):
        np.testing.assert_array_equal(one, other)
    # The gradient's norm, and so its clipping, counts the policy alone.
    for name in ("train/grad_norm", "train/loss", "train/learning_rate"):
        assert alone["metrics"][0][name] == together["metrics"][0][name] > 0
    for one, other in zip(alone["parts"], together["parts"], strict=True):
        for key in ("gradients", "weights"):
            own = {name: value for name, value in other[key].items() if "drafter." not in name}
            assert own.keys() == one[key].keys()
            for name, value in own.items():
                assert torch.equal(value, one[key][name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_float64(
    outcome: Callable[..., dict[str, Any]], policy: Path, drafter: Path, layout: str
) -> None:
    """In every layout, on every rank."""
    reached = outcome(layout, 0.01)
    loss, expected = cached_oracle(policy, drafter)
    [metrics] = reached["metrics"]
    assert metrics["drafter/loss"] == pytest.approx(loss, rel=1e-6) and loss > 0.1
    # Gradients in `main_grad` are clipped in place like the policy's.
    scale = min(1.0, 0.1 / (metrics["train/grad_norm"] + 1e-6))
    last_stage = [part for part in reached["parts"] if any("drafter." in name for name in part["gradients"])]
    assert len(last_stage) == len(reached["parts"]) // LAYOUTS[layout].get("pp", 1)
    for part in last_stage:
        gradients = {
            name.partition("drafter.")[2]: value for name, value in part["gradients"].items() if "drafter." in name
        }
        assert gradients.keys() == expected.keys()
        errors = {name: gradients[name].double() / scale - value for name, value in expected.items()}
        whole, of_errors = (torch.cat([x.flatten() for x in parts.values()]) for parts in (expected, errors))
        assert of_errors.norm() < 1e-6 * whole.norm()
        # The smallest tensors have gradients a hundred times below the largest, with the same roundings of float32.
        for name, value in expected.items():
            assert errors[name].norm() < 3e-6 * value.norm(), name


@cache
def cached_oracle(policy: Path, drafter: Path) -> tuple[float, dict[str, torch.Tensor]]:
    return oracle(policy, drafter)


@pytest.mark.parametrize("trainer", [{"recompute": "full"}, {"distributed_optimizer": True}], ids=str)
def test_the_drafter_learns_with_a_rate_of_its_own(outcome: Callable[..., dict[str, Any]], trainer: Any) -> None:
    plain, other = outcome("data", 0.01, 6), outcome("data", 0.01, 6, **trainer)
    losses = [metrics["drafter/loss"] for metrics in plain["metrics"]]
    assert losses[-1] < 0.8 * losses[0]
    assert plain["rates"] == [0.001, 0.01]
    for name, value in plain["weights"].items():
        torch.testing.assert_close(other["weights"][name], value, atol=2e-5, rtol=0)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_gradient_of_the_drafter_that_is_not_finite_skips_the_update(
    ranks: RankPool, policy: Path, drafter: Path, distributed: bool
) -> None:
    recipe = recipe_of(policy, drafter, 1e-2, distributed_optimizer=distributed)
    parallel = ParallelConfig(tp=1, pp=1, dp=2, rollout_tp=1)
    results = ranks.run(update_with_a_fault, recipe, parallel, world_size=2)
    assert results == [(False, True, False)] * 2
