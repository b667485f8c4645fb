"""Speculative decoding by the model's layer for multi-token prediction (MTP): the policy's tokens, drafted by it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config import RolloutConfig
from megarl.tracking.metrics import values
from megarl.types import Completion, Request, SamplingSettings
from tests.models.drafts.mtp_layer import MtpOracle
from tests.rank_pool import RankPool

PROMPTS = ([7, 11, 13] * 4 + [7], [31, 5, 19, 2, 44])
CASES = [
    pytest.param("glm4_moe", 1, 1, id="tp1"),
    pytest.param("glm4_moe", 2, 3, id="tp2, three drafts", marks=pytest.mark.long),
    pytest.param("deepseek_v3", 1, 2, id="latent attention"),
    pytest.param("qwen3_next", 1, 2, id="delta-nets"),
]
ROUNDING = 5e-5
"""Largest difference of log-probs in float32, in nats: products of several tokens round otherwise than those of one."""
SIZES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32},
    "deepseek_v3": {"num_layers": 2, "experts_per_token": 4},
    "qwen3_next": {"num_layers": 4, "num_kv_heads": 2, "head_dim": 32},
}


def loaded_engine(model_path: str, tp: int, vllm: dict[str, Any]) -> Any:
    from safetensors.torch import load_file

    from megarl.engine.engine import RolloutEngine

    config = RolloutConfig(tp=tp, kv_cache_gib=0.05, max_concurrent_requests=64, vllm=vllm)
    engine = RolloutEngine(model_path, config, max_model_len=64, dtype="float32", seed=3)
    stored = load_file(f"{model_path}/model.safetensors").items()
    # The engine samples text only: it has no vision tower.
    weights = [(name, tensor) for name, tensor in stored if not name.startswith("model.visual.")]
    engine.model.load_weights(weights)  # pyright: ignore[reportCallIssue]
    return engine


class Feeding:
    """Drafts of the tokens that follow: first none of them right, then one, two, and so on."""

    def __init__(self, tokens: list[int]) -> None:
        self.is_on, self._tokens, self._known, self._step = False, tokens, 1, 0

    def replaced(self, proposed: torch.Tensor) -> torch.Tensor:
        """Return other drafts [1, drafts] in place of the layer's own."""
        count = proposed.shape[1]
        num_right = self._step % (count + 1)
        following = [*self._tokens[self._known : self._known + count], *[0] * count][:count]
        drafts = [token if place < num_right else (token + 1) % 100 for place, token in enumerate(following)]
        self._step, self._known = self._step + 1, self._known + num_right + 1
        return torch.tensor([drafts], dtype=proposed.dtype)


def sampled(model_path: str, tp: int, num_drafts: int) -> dict[str, Any]:
    """Sample on one rank, first without drafts, then with them. Only leaders return completions."""
    drafter = {"method": "mtp", "num_speculative_tokens": num_drafts}
    found: dict[str, Any] = {}
    for name, vllm in {"plain": {}, "drafts": {"speculative_config": drafter}}.items():
        engine = loaded_engine(model_path, tp, vllm)
        drafts: list[list[list[int]]] = []
        whole = found["plain"]["whole"].get("whole") if found else None
        feeding = Feeding(whole.token_ids.tolist() if whole else [])
        if name == "drafts":
            proposer: Any = engine._worker.model_runner.drafter
            propose = proposer.propose

            def noting(
                *args: Any, drafts: Any = drafts, propose: Any = propose, feeding: Feeding = feeding, **kwargs: Any
            ) -> Any:
                proposed = propose(*args, **kwargs)
                drafts.append(proposed.tolist())
                return feeding.replaced(proposed) if feeding.is_on else proposed

            proposer.propose = noting

        def run(requests: list[Request], engine: Any = engine) -> dict[str, Completion]:
            done = engine.advance(requests if engine.is_leader else (), (), float("inf"))
            return {completion.request_id: completion for completion in done}

        result: dict[str, Any] = {"lone": run([request("lone", 0, SamplingSettings(30, 0.0))])}
        result["drafts"] = list(drafts)
        # To the engine's last position: there are no drafts beyond.
        result["whole"] = run([request("whole", 0, SamplingSettings(64 - len(PROMPTS[0]), 0.0))])
        if name == "drafts":
            engine.metrics()
            feeding.is_on = True
            result["fed"] = run([request("fed", 0, SamplingSettings(64 - len(PROMPTS[0]), 0.0))])
            feeding.is_on = False
            result["fed metrics"] = values(engine.metrics())
        greedy, warm = SamplingSettings(40, 0.0), SamplingSettings(24, 1.0)
        # Greedy requests and others share steps, and the two have kernels of their own.
        both = [request(f"greedy{n}", n, greedy) for n in (0, 1)]
        result["both"] = run([*both, *(request(f"warm{seed}", seed % 2, warm, seed) for seed in range(4))])
        result["metrics"] = values(engine.metrics())
        own = run([request("own", 0, SamplingSettings(40, 1.0), 5)])
        tokens = own["own"].token_ids if own else np.zeros(40, np.int64)
        scored = engine.prompt_logprobs(np.concatenate([PROMPTS[0], tokens]).astype(np.int64))
        if scored is not None:
            result["difference"] = np.abs(scored[len(PROMPTS[0]) :] - own["own"].rollout_logprobs).max()
        engine.close()
        found[name] = result
    return found


def request(name: str, prompt: int, sampling: SamplingSettings, seed: int = 0) -> Request:
    return Request(name, np.array(PROMPTS[prompt], np.int32), sampling, seed)


@pytest.fixture(scope="module")
def folder_of(tiny_model: Callable[..., Path]) -> Callable[[str], Path]:
    # A wide spread of weights makes decided predictions: rounding does not change the most probable token.
    return lambda family: tiny_model(family=family, num_mtp_layers=1, initializer_range=0.1, **SIZES[family])


@pytest.fixture(scope="module")
def outcome(folder_of: Callable[[str], Path], ranks: RankPool) -> Callable[[str, int, int], dict[str, Any]]:
    """The leader's results by family, tp and number of drafts."""
    return cache(
        lambda family, tp, num_drafts: ranks.run(sampled, str(folder_of(family)), tp, num_drafts, world_size=tp)[0]
    )


@pytest.mark.parametrize(("family", "tp", "num_drafts"), CASES)
def test_greedy_tokens_are_the_same_with_drafts(
    family: str, tp: int, num_drafts: int, outcome: Callable[..., Any]
) -> None:
    found = outcome(family, tp, num_drafts)
    for run, name in (("both", "greedy0"), ("both", "greedy1"), ("whole", "whole")):
        plain, drafts = (found[kind][run][name] for kind in ("plain", "drafts"))
        assert drafts.token_ids.tolist() == plain.token_ids.tolist()
        np.testing.assert_allclose(drafts.rollout_logprobs, plain.rollout_logprobs, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(("family", "tp", "num_drafts"), CASES)
def test_tokens_after_accepted_drafts_are_the_same(
    family: str, tp: int, num_drafts: int, outcome: Callable[..., Any]
) -> None:
    """Every number of drafts of a step is accepted in turn: states of earlier tokens must be those of the last one."""
    found = outcome(family, tp, num_drafts)
    plain, fed = found["plain"]["whole"]["whole"], found["drafts"]["fed"]["fed"]
    assert fed.token_ids.tolist() == plain.token_ids.tolist()
    np.testing.assert_allclose(fed.rollout_logprobs, plain.rollout_logprobs, atol=ROUNDING, rtol=0)
    assert found["drafts"]["fed metrics"]["perf/accepted_length"] == pytest.approx(1 + num_drafts / 2, abs=0.2)


@pytest.mark.parametrize(("family", "tp", "num_drafts"), CASES)
def test_logprobs_are_those_of_the_policy(family: str, tp: int, num_drafts: int, outcome: Callable[..., Any]) -> None:
    found = outcome(family, tp, num_drafts)
    assert found["drafts"]["difference"] < ROUNDING and found["plain"]["difference"] < ROUNDING


@pytest.mark.parametrize(("family", "tp", "num_drafts"), CASES)
def test_drafts_are_counted(family: str, tp: int, num_drafts: int, outcome: Callable[..., Any]) -> None:
    found = outcome(family, tp, num_drafts)
    assert "perf/drafts_accepted" not in found["plain"]["metrics"]
    metrics = found["drafts"]["metrics"]
    assert 0 <= metrics["perf/drafts_accepted"] < 1 and 1 <= metrics["perf/accepted_length"] < 1 + num_drafts


@pytest.mark.parametrize(("family", "tp", "num_drafts"), CASES)
def test_first_drafts_are_those_of_the_layer(
    family: str, tp: int, num_drafts: int, outcome: Callable[..., Any], folder_of: Callable[[str], Path]
) -> None:
    """Every step's first draft is the layer's most probable token after the tokens so far, by transformers' modules."""
    found = outcome(family, tp, num_drafts)["drafts"]
    tokens = [*PROMPTS[0], *found["lone"]["lone"].token_ids.tolist()]
    with torch.no_grad():
        best = MtpOracle(folder_of(family), torch.float32).predicted(torch.tensor(tokens)).argmax(-1).tolist()
    known = len(PROMPTS[0]) + 1
    assert len(found["drafts"]) > 20
    for ((first, *others),) in found["drafts"]:
        if known >= len(tokens):
            break
        # The layer at position t saw token t + 1, the newest one known.
        assert first == best[known - 2]
        accepted = 0
        for draft in (first, *others):
            if known + accepted >= len(tokens) or draft != tokens[known + accepted]:
                break
            accepted += 1
        known += accepted + 1


def drawn(model_path: str, by_tensors: bool) -> dict[str, Any]:
    """Tokens drawn with three drafts a step, and the metrics of greedy requests before."""
    engine = loaded_engine(model_path, 1, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}})
    if by_tensors:
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.fill_(torch.nan)
        engine.load_tensors(load_file(f"{model_path}/model.safetensors").items())
    engine.advance([request("greedy", 0, SamplingSettings(30, 0.0))], (), float("inf"))
    metrics = values(engine.metrics())
    warm = SamplingSettings(30, 1.0)
    done = engine.advance([request(f"{seed}", seed % 2, warm, seed) for seed in range(120)], (), float("inf"))
    drawn_metrics = values(engine.metrics())
    engine.close()
    chains = [[PROMPTS[int(one.request_id) % 2][-1], *one.token_ids.tolist()] for one in done]
    return {"greedy": metrics, "chains": chains, "metrics": drawn_metrics}


@pytest.mark.parametrize("by_tensors", [False, True], ids=["loader", "full tensors"])
def test_accepted_drafts_leave_the_distribution_as_it_is(
    by_tensors: bool, ranks: RankPool, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """A model whose next token depends on the last one alone, and whose MTP layer knows its most probable token."""
    shutil.copytree(folder_of("glm4_moe"), tmp_path / "bigram")
    file = tmp_path / "bigram" / "model.safetensors"
    tensors = load_file(file)
    hidden = tensors["model.norm.weight"].shape[0]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.layers.2.enorm.weight"].fill_(1)
    tensors["model.layers.2.shared_head.norm.weight"].copy_(tensors["model.norm.weight"])
    tensors["model.layers.2.eh_proj.weight"].copy_(torch.eye(hidden, 2 * hidden))
    # With a deviation of 4 the most probable of 415 tokens has about half of the probability.
    embedding = torch.nn.functional.rms_norm(tensors["model.embed_tokens.weight"].double(), (hidden,))
    logits = (embedding * tensors["model.norm.weight"].double()) @ tensors["lm_head.weight"].double().T
    scale = 4 / logits.std()
    for name in ("lm_head.weight", "model.layers.2.shared_head.head.weight"):
        tensors[name] *= scale.float()
    save_file(tensors, file)
    [found] = ranks.run(drawn, str(tmp_path / "bigram"), by_tensors, world_size=1)
    assert found["greedy"]["perf/drafts_accepted"] > 0.9 and found["greedy"]["perf/accepted_length"] > 3.5
    assert 0.1 < found["metrics"]["perf/drafts_accepted"] < 0.9
    logprobs = (logits * scale).log_softmax(-1)
    pairs = torch.tensor([pair for chain in found["chains"] for pair in pairwise(chain)])
    before, after = pairs.unbind(1)
    own, probabilities = logprobs[before], logprobs[before].exp()
    # Both sums have mean zero for tokens of the distribution: log-prob plus entropy, and whether a draft was right.
    for value in (own, torch.nn.functional.one_hot(own.argmax(-1), own.shape[1]).double()):
        mean = (probabilities * value).sum(-1)
        variance = (probabilities * value.square()).sum(-1) - mean.square()
        difference = value.gather(1, after[:, None])[:, 0] - mean
        assert len(pairs) > 2000 and difference.sum().abs() < 5 * variance.sum().sqrt()
