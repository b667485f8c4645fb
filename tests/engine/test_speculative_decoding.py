"""Speculative decoding by n-grams: the tokens of the policy, with its log-probs, in fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import RolloutConfig
from megarl.tracking.metrics import values
from megarl.types import Completion, Request, SamplingSettings
from tests.rank_pool import RankPool

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
PROMPT = [7, 11, 13] * 4 + [7]
LAYOUTS = [pytest.param(1, 1, id="tp1"), pytest.param(2, 2, id="tp2")]


def sampled(model_path: str, tp: int) -> dict[str, Any]:
    """Sample on one rank, first without drafts, then with them. Only leaders return completions."""
    from safetensors.torch import load_file

    from megarl.engine.engine import RolloutEngine

    found: dict[str, Any] = {}
    for name, vllm in {"plain": {}, "drafts": {"speculative_config": NGRAM}}.items():
        config = RolloutConfig(tp=tp, kv_cache_gib=0.05, max_concurrent_requests=64, vllm=vllm)
        engine = RolloutEngine(model_path, config, max_model_len=128, dtype="float32", seed=3)
        engine.model.load_weights(load_file(f"{model_path}/model.safetensors").items())  # pyright: ignore[reportCallIssue]

        def run(requests: list[Request], engine: Any = engine) -> dict[str, Completion]:
            done = engine.advance(requests if engine.is_leader else (), (), float("inf"))
            return {completion.request_id: completion for completion in done}

        greedy, warm = SamplingSettings(40, 0.0), SamplingSettings(24, 1.0, repetition_penalty=1.2)
        both = [request("greedy", greedy), *(request(f"warm{seed}", warm, seed) for seed in range(4))]
        # Greedy requests and others share steps, and the two have kernels of their own.
        result: dict[str, Any] = {"both": run(both), "metrics": values(engine.metrics())}
        own = run([request("own", SamplingSettings(40, 1.0), 5)])
        tokens = own["own"].token_ids if own else np.zeros(40, np.int64)
        scored = engine.prompt_logprobs(np.concatenate([PROMPT, tokens]).astype(np.int64))
        if scored is not None:
            result["difference"] = np.abs(scored[len(PROMPT) :] - own["own"].rollout_logprobs).max()
        engine.close()
        found[name] = result
    return found


def request(name: str, sampling: SamplingSettings, seed: int = 0) -> Request:
    return Request(name, np.array(PROMPT, np.int32), sampling, seed)


@pytest.fixture(scope="module")
def outcome(tiny_model: Callable[..., Path], ranks: RankPool) -> Callable[[int, int], dict[str, Any]]:
    """The leader's results by world size and tp."""
    model = str(tiny_model(num_layers=2, num_kv_heads=2, initializer_range=0.1))
    return cache(lambda n, tp: ranks.run(sampled, model, tp, world_size=n)[0])


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_greedy_tokens_are_the_same_with_drafts(world_size, tp, outcome) -> None:
    plain, drafts = (outcome(world_size, tp)[name]["both"]["greedy"] for name in ("plain", "drafts"))
    assert drafts.token_ids.tolist() == plain.token_ids.tolist()
    np.testing.assert_allclose(drafts.rollout_logprobs, plain.rollout_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_logprobs_are_those_of_the_policy(world_size, tp, outcome) -> None:
    found = outcome(world_size, tp)
    assert found["drafts"]["difference"] < 1e-5 and found["plain"]["difference"] < 1e-5


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_accepted_drafts_are_counted(world_size, tp, outcome) -> None:
    found = outcome(world_size, tp)
    assert "perf/drafts_accepted" not in found["plain"]["metrics"]
    metrics = found["drafts"]["metrics"]
    assert 0 < metrics["perf/drafts_accepted"] < 1 and 1 < metrics["perf/accepted_length"] < 4


@pytest.mark.parametrize("draft_probs", [None, (0.1, 0.2, 0.3, 0.4)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_have_the_distribution_of_the_policy(draft_probs, temperature) -> None:
    """20,000 requests with two drafts each, through vLLM's own rejection sampler."""
    from megarl.platform import libraries

    libraries.prepare_vllm()
    from vllm.v1.sample import rejection_sampler

    torch.manual_seed(11)
    num, vocabulary = 20_000, 4
    logits = torch.tensor([0.3, -0.5, 1.1, 0.2]).expand(2 * num, vocabulary).clone()
    expected = (logits[0] / temperature).softmax(0)
    drafter = torch.tensor(draft_probs) if draft_probs else torch.eye(vocabulary)[3]
    drafts = torch.multinomial(drafter, 2 * num, replacement=True).int()
    temperatures = torch.full((num,), temperature)
    metadata = SimpleNamespace(
        temperature=temperatures, all_greedy=False, all_random=True, generators={}, top_k=None, top_p=None
    )
    cumulated = torch.arange(2, 2 * num + 1, 2, dtype=torch.int32)
    target = rejection_sampler.apply_sampling_constraints(logits, cumulated, metadata)
    bonus = torch.multinomial(expected, num, replacement=True).int()[:, None]
    tokens = rejection_sampler.rejection_sample(
        drafts,
        [2] * num,
        2,
        cumulated,
        drafter.expand(2 * num, vocabulary).contiguous() if draft_probs else None,
        target,
        bonus,
        metadata,
    )
    first, second = tokens[:, 0], tokens[:, 1][tokens[:, 1] >= 0]
    for drawn in (first, second):
        shares = torch.bincount(drawn.long(), minlength=vocabulary) / len(drawn)
        # Five standard deviations of a share among this many draws.
        limit = 5 * (expected * (1 - expected) / len(drawn)).sqrt()
        assert ((shares - expected).abs() < limit).all(), (shares, expected)
