"""A model with other fields of config.json: trainer, engine and transformers agree on it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import Recipe, RolloutConfig
from megarl.config.override import apply_override
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.families.shape import padded_vocab_size, read_model_shape
from megarl.types import TrainingSequence
from tests.rank_pool import RankPool

OVERRIDE = {"rope_theta": 300.0, "rms_norm_eps": 1e-3, "max_position_embeddings": 256}
LONG_CONTEXT = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "max_position_embeddings": 64,
}
WINDOW = {"sliding_window": 12}
TOKENS = np.random.default_rng(3).integers(1, 431, 60)


def logprobs(model: str, override: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, int]:
    """The engine's and the trainer's log-probs of the tokens, and the engine's positions."""
    from safetensors.torch import load_file

    from megarl.checkpoint import safetensors
    from megarl.engine.engine import RolloutEngine
    from megarl.reshard.layouts.megatron import megatron_layouts
    from megarl.training.model import FrozenModel

    config = RolloutConfig(kv_cache_gib=0.05)
    engine = RolloutEngine(model, config, max_model_len=64, dtype="float32", seed=0, override=override)
    engine.model.load_weights(load_file(f"{model}/model.safetensors").items())
    sampled = engine.prompt_logprobs(TOKENS)
    assert sampled is not None
    positions = engine.model.config.max_position_embeddings

    recipe = Recipe.model_validate(
        {"name": "r", "loop": "rl", "model": {"path": model, "dtype": "float32"}, "data": {"train": "t"}}
    )
    shape = read_model_shape(model, override)
    parallel = ParallelConfig(1, 1, 1, 1)
    [pieces] = megatron_layouts(shape, parallel, padded_vocab_size=padded_vocab_size(shape.vocab_size, 1))
    trainer = FrozenModel(recipe, parallel, shape, lambda parameters: safetensors.load(model, pieces, parameters))
    row = TokenBatch.from_sequences([TrainingSequence(TOKENS, np.arange(len(TOKENS)) > 0)])
    found = trainer.forward([row])
    assert found is not None
    engine.close()
    return sampled, found[0], positions


@pytest.mark.parametrize("override", [{}, OVERRIDE], ids=["as the file says", "changed"])
def test_trainer_and_engine_take_the_changed_fields(
    ranks: RankPool, tiny_model: Callable[..., Path], override: dict[str, Any]
) -> None:
    model = tiny_model(num_layers=2, vocab_size=431, initializer_range=0.1)
    check_against_transformers(ranks, model, override)


@pytest.mark.parametrize("override", [{}, LONG_CONTEXT], ids=["window", "window and yarn"])
def test_trainer_and_engine_have_windows(
    ranks: RankPool, tiny_model: Callable[..., Path], tmp_path: Path, override: dict[str, Any]
) -> None:
    """Mistral's windows are fields of the file, not of the recipe."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model(family="mistral", num_layers=2, vocab_size=431, initializer_range=0.1), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | WINDOW))
    check_against_transformers(ranks, model, override)


def test_trainer_and_engine_route_by_biased_sigmoids(ranks: RankPool, tiny_model: Callable[..., Path]) -> None:
    """GLM-4.5: a dense layer, then one with experts, half of the channels rotated."""
    model = tiny_model(family="glm4_moe", num_layers=2, vocab_size=431, initializer_range=0.1)
    check_against_transformers(ranks, model, {})


def check_against_transformers(ranks: RankPool, model: Path, override: dict[str, Any]) -> None:
    """Compare the log-probs of engine, trainer and transformers; other fields must give others."""
    from transformers import AutoConfig, AutoModelForCausalLM

    [(sampled, trained, positions)] = ranks.run(logprobs, str(model), override, world_size=1)
    assert np.abs(sampled - trained).max() <= 1e-5
    expected = {}
    for name, fields in (("given", override), ("other", {} if override else OVERRIDE)):
        config = AutoConfig.from_pretrained(model)
        changed = AutoConfig.for_model(**apply_override(config.to_dict(), fields))
        if name == "given":
            assert positions == changed.max_position_embeddings
        judge = AutoModelForCausalLM.from_pretrained(model, config=changed, dtype=torch.float32)
        with torch.no_grad():
            logits = judge(torch.from_numpy(TOKENS)[None]).logits[0, :-1]
        expected[name] = logits.log_softmax(-1).gather(1, torch.from_numpy(TOKENS)[1:, None])[:, 0].numpy()
    np.testing.assert_allclose(trained[1:], expected["given"], atol=1e-5, rtol=0)
    assert np.abs(trained[1:] - expected["other"]).max() > 1e-2
