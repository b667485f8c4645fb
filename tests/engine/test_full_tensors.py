"""Full checkpoint tensors in the engine: its log-probs are those of transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.rank_pool import RankPool

TOKENS = np.random.default_rng(3).integers(1, 431, 24)


def logprobs(folder: str) -> np.ndarray | None:
    """The engine's log-probs of the tokens, float32 [tokens]."""
    from safetensors.torch import load_file

    from megarl.config import RolloutConfig
    from megarl.engine.engine import RolloutEngine

    config = RolloutConfig(kv_cache_gib=0.01)
    engine = RolloutEngine(folder, config, max_model_len=64, dtype="float32", seed=0)
    engine.load_tensors(iter(load_file(f"{folder}/model.safetensors").items()))
    found = engine.prompt_logprobs(TOKENS)
    engine.close()
    return found


def test_experts_and_sinks_of_gpt_oss(ranks: RankPool, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """vLLM's loader copies them past the parameters' own loaders."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    tiny = tiny_model(family="gpt_oss", num_layers=2, num_kv_heads=2, head_dim=32, vocab_size=431)
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        # A new model has no biases of experts, sinks close to zero, and gates below the limit of 7.
        spread = 2.0 if name.endswith(("proj_bias", "sinks")) else 0.2 if ".experts." in name else 0.0
        tensor += spread * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    judge = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = judge(torch.from_numpy(TOKENS)[None]).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, torch.from_numpy(TOKENS)[1:, None])[:, 0].numpy()
    [found] = ranks.run(logprobs, str(folder), world_size=1)
    np.testing.assert_allclose(found[1:], expected, atol=1e-5, rtol=0)
