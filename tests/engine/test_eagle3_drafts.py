"""A published EAGLE-3 drafter in an engine without weights: read from its own files, and never written by a reshard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.config import RolloutConfig
from megarl.tracking.metrics import values
from megarl.types import Completion, Request, SamplingSettings
from tests.models.drafts.eagle3 import make_eagle3
from tests.rank_pool import RankPool

PROMPTS = ([7, 11, 13] * 4 + [7], [31, 5, 19, 2, 44])
SIZES: dict[str, Any] = {"num_layers": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "initializer_range": 0.1}


def sampled(model_path: str, drafter: str, tp: int) -> dict[str, Any]:
    """Sample greedily on one rank, without drafts and with them. Then note the drafter after new policy weights."""
    from megarl.engine.engine import RolloutEngine

    eagle = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 3}
    stored = load_file(f"{model_path}/model.safetensors")
    found: dict[str, Any] = {}
    for name, vllm in {"plain": {}, "drafts": {"speculative_config": eagle}}.items():
        config = RolloutConfig(tp=tp, kv_cache_gib=0.05, max_concurrent_requests=64, vllm=vllm)
        engine = RolloutEngine(model_path, config, max_model_len=64, dtype="float32", seed=3)
        engine.model.load_weights(stored.items())  # pyright: ignore[reportCallIssue]
        greedy = SamplingSettings(40, 0.0)
        requests = [Request(str(n), np.array(prompt, np.int32), greedy, n) for n, prompt in enumerate(PROMPTS)]
        done: list[Completion] = engine.advance(requests if engine.is_leader else (), (), float("inf"))
        found[name] = {completion.request_id: completion for completion in done}
        found[f"{name} metrics"] = values(engine.metrics()) if engine.is_leader else {}
        if name == "drafts":
            proposer: Any = engine._worker.model_runner.drafter
            engine.load_tensors((name, 2 * tensor) for name, tensor in stored.items())
            parts = proposer.model
            found["written"] = {name for name, _ in engine.model.named_parameters() if "drafter" in name}
            found["head"] = parts.lm_head.weight.detach().clone()
            found["projection"] = parts.model.fc.weight.detach().clone()
            found["embedding"] = parts.model.embed_tokens.weight.detach().clone()
            found["offsets"] = None if parts.draft_id_to_target_id is None else parts.draft_id_to_target_id.clone()
        engine.close()
    return found


@pytest.mark.parametrize(
    ("drafted", "own_embedding", "tp"),
    [
        pytest.param(100, False, 1, id="100 tokens of the policy's"),
        pytest.param(None, True, 1, id="all tokens, own embedding", marks=pytest.mark.long),
        pytest.param(100, True, 2, id="tp2", marks=pytest.mark.long),
    ],
)
def test_tokens_are_the_policys_and_the_drafter_that_of_its_files(
    ranks: RankPool, tiny_model: Callable[..., Path], tmp_path: Path, drafted: int | None, own_embedding: bool, tp: int
) -> None:
    model = tiny_model(**SIZES)
    drafter = make_eagle3(tmp_path / "drafter", model, draft_vocab_size=drafted, own_embedding=own_embedding)
    found = ranks.run(sampled, str(model), str(drafter), tp, world_size=tp)[0]
    for name, plain in found["plain"].items():
        drafts = found["drafts"][name]
        assert drafts.token_ids.tolist() == plain.token_ids.tolist()
        np.testing.assert_allclose(drafts.rollout_logprobs, plain.rollout_logprobs, atol=1e-5, rtol=0)
    metrics = found["drafts metrics"]
    assert 0 <= metrics["perf/drafts_accepted"] < 1 and 1 <= metrics["perf/accepted_length"] < 4
    assert "perf/accepted_length" not in found["plain metrics"] and found["written"] == set()
    stored, policy = load_file(drafter / "model.safetensors"), load_file(model / "model.safetensors")
    rows = len(stored["lm_head.weight"]) // tp
    assert torch.equal(found["head"][:rows], stored["lm_head.weight"][:rows])
    assert torch.equal(found["projection"], stored["fc.weight"])
    # Without an embedding of its own it reads the policy's, with every update of it.
    embedding = stored.get("embed_tokens.weight", 2 * policy["model.embed_tokens.weight"])
    size = len(embedding) // tp
    assert torch.equal(found["embedding"][:size], embedding[:size])
    assert drafted is None or torch.equal(found["offsets"], stored["d2t"])


NUM_DRAWS, VOCABULARY, PROMPT = 2000, 415, [31, 5, 19, 2, 44]
FALSE_ALARMS = 1e-4
"""Probability that one of these tests fails for a right sampler, over all seeds."""
EARLY = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}


def drawn(model_path: str, frozen: str, new_head: torch.Tensor) -> dict[str, Any]:
    """Draw three tokens at temperature 1 many times: without drafts, with a drafter's files, with a new head of it."""
    from megarl.engine.engine import RolloutEngine
    from megarl.engine.parts.choice import EngineFeatures
    from megarl.engine.parts.drafts import TrainedDrafts

    stored = load_file(f"{model_path}/model.safetensors")
    eagle = {"speculative_config": {"method": "eagle3", "model": frozen, "num_speculative_tokens": 2}}
    outcome: dict[str, Any] = {}
    for vllm, cases in (({}, ["plain"]), (eagle, ["frozen", "trained"])):
        config = RolloutConfig(kv_cache_gib=0.1, max_concurrent_requests=250, vllm=vllm)
        features = EngineFeatures(trains_drafter=True)
        engine = RolloutEngine(model_path, config, max_model_len=16, dtype="float32", seed=3, features=features)
        engine.model.load_weights(stored.items())  # pyright: ignore[reportCallIssue]
        for case in cases:
            if case == "trained":
                part = engine.find_part(TrainedDrafts)
                assert part is not None and part.written is not None
                names = {name for name, _ in part.written.named_parameters()}
                assert "lm_head.weight" in names and not any("embed" in name or "target" in name for name in names)
                with torch.no_grad():
                    part.written.load_weights([("lm_head.weight", new_head)])
            # Each case has seeds of its own: a seed's first draws would be equal with and without drafts.
            first_seed = 10_000 * len(outcome)
            requests = [
                Request(str(n), np.array(PROMPT, np.int32), SamplingSettings(3, 1.0), first_seed + n)
                for n in range(NUM_DRAWS)
            ]
            tokens = [completion.token_ids for completion in engine.advance(requests, (), float("inf"))]
            outcome[case] = {"tokens": tokens, "metrics": values(engine.metrics())}
        engine.close()
    return outcome


def test_drafts_do_not_change_the_distribution_of_tokens(
    ranks: RankPool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Chi-square tests of the second and third token, which may be drafts: with a drafter against without one, and the
    second token against its exact distribution. The false-alarm rate of each is `FALSE_ALARMS`.
    """
    model = tiny_model(**SIZES | {"num_layers": 3, "initializer_range": 0.4})
    expected = second_token_probabilities(model)
    likely = expected.argsort()[::-1].tolist()

    def head_of(hidden_size: int, tokens: list[int]) -> torch.Tensor:
        # One of the two tokens always has the largest logit: random drafts would hardly ever be accepted.
        head = torch.zeros(VOCABULARY, hidden_size)
        head[tokens[0], 0], head[tokens[1], 0] = 1.0, -1.0
        return head

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = head_of(tensors["lm_head.weight"].shape[1], likely[:2])

    frozen = make_eagle3(tmp_path / "frozen", model, draft_vocab_size=None, config=EARLY, change=change)
    hidden_size = load_file(frozen / "model.safetensors")["lm_head.weight"].shape[1]
    outcome = ranks.run(drawn, str(model), str(frozen), head_of(hidden_size, likely[2:4]), world_size=1)[0]
    for name in ("frozen", "trained"):
        # Enough drafts are accepted for the test to see them.
        assert outcome[name]["metrics"]["perf/drafts_accepted"] > 0.01
        for place in (1, 2):
            counts, plain = (counts_of(outcome[case]["tokens"], place) for case in (name, "plain"))
            assert two_sample_probability(counts, plain) > FALSE_ALARMS, (name, place)
        counts = counts_of(outcome[name]["tokens"], 1)
        assert goodness_of_fit(counts, expected) > FALSE_ALARMS, name
        # The test sees a sampler that draws the likeliest token 10 times too often in a hundred.
        wrong = counts.copy()
        wrong[likely[0]] += 0.1 * NUM_DRAWS
        assert goodness_of_fit(wrong, expected) < FALSE_ALARMS


def second_token_probabilities(model: Path) -> np.ndarray:
    """The exact marginal distribution of the second token after the prompt: [vocabulary]."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        first = policy(torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
        rows = torch.tensor([[*PROMPT, token] for token in range(len(first))])
        return (first @ policy(rows).logits[:, -1].softmax(-1)).numpy()


def counts_of(tokens: list[np.ndarray], place: int) -> np.ndarray:
    return np.bincount([row[place] for row in tokens if len(row) > place], minlength=VOCABULARY).astype(float)


def goodness_of_fit(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """The probability of a larger chi-square. Tokens expected less than 10 times share a bin."""
    expected = probabilities * counts.sum()
    rare = expected < 10
    observed, wanted = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    return chi_square_tail(((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1)


def two_sample_probability(first: np.ndarray, second: np.ndarray) -> float:
    """The probability of a larger chi-square for two samples of one distribution."""
    rare = first + second < 20
    table = np.stack([np.append(x[~rare], x[rare].sum()) for x in (first, second)])
    table = table[:, table.sum(0) > 0]
    wanted = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    return chi_square_tail(((table - wanted) ** 2 / wanted).sum(), table.shape[1] - 1)


def chi_square_tail(chi_square: float, num_degrees: int) -> float:
    return float(torch.special.gammaincc(torch.tensor(num_degrees / 2.0), torch.tensor(chi_square / 2.0).float()))
