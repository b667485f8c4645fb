"""The plain CPU path of mixture-of-experts layers, against Hugging Face's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rank_pool import RankPool
from tools.make_tiny_model import make_tokenizer

PROMPT = (7, 11, 13, 17, 19)


def sample_moe(model_path: str, tp: int, fields: dict[str, Any]) -> dict[str, Any]:
    """One rank: weights written by their recorded pieces, then a greedy completion."""
    from safetensors.torch import load_file

    from megarl.config import RolloutConfig
    from megarl.engine.engine import RolloutEngine
    from megarl.reshard.layouts.vllm import record_layout
    from megarl.types import Request, SamplingSettings

    preloaded = os.environ.get("LD_PRELOAD")
    config = RolloutConfig(tp=tp, kv_cache_gib=0.01, max_concurrent_requests=4, vllm=fields)
    engine = RolloutEngine(model_path, config, max_model_len=64, dtype="float32", seed=0)
    assert os.environ.get("LD_PRELOAD") == preloaded, "programs that this process starts would load vLLM's libraries"
    tensors = load_file(f"{model_path}/model.safetensors")
    live = {name: parameter.data for name, parameter in engine.model.named_parameters()}
    for piece in record_layout(engine.model, {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}):
        source = tensors[piece.box.name][tuple(map(slice, piece.box.start, piece.box.stop))]
        live[piece.storage].view(-1).as_strided(piece.box.shape, piece.strides, piece.offset).copy_(source)
    request = Request("r", np.array(PROMPT, np.int32), SamplingSettings(8, 0.0), 0)
    completions = engine.advance([request] if engine.is_leader else (), (), float("inf"))
    engine.close()
    return {c.request_id: (c.token_ids, c.rollout_logprobs) for c in completions}


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=80,
        moe_intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(5)
    model = Qwen3MoeForCausalLM(config).eval()
    folder: Path = tmp_path_factory.mktemp("moe")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), model


@pytest.mark.parametrize(
    "fields",
    [pytest.param({}, id="experts_split"), pytest.param({"enable_expert_parallel": True}, id="experts_spread")],
)
def test_experts_equal_hugging_faces(fields: dict[str, Any], moe_model: tuple[str, Any], ranks: RankPool) -> None:
    path, model = moe_model
    leader, follower = ranks.run(sample_moe, path, 2, fields, world_size=2)
    assert follower == {}
    token_ids, logprobs = leader["r"]
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == token_ids.tolist()
    expected = logits.log_softmax(-1)[torch.arange(len(token_ids)), torch.from_numpy(token_ids)]
    np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-5, rtol=0)
