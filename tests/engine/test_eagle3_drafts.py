"""A published EAGLE-3 drafter in an engine without weights: read from its own files, and never written by a reshard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.config import RolloutConfig
from megarl.tracking.metrics import values
from megarl.types import Completion, Request, SamplingSettings
from tests.eagle3 import make_eagle3
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
