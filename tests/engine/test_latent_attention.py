"""vLLM's latent attention on a CPU: log-probs of transformers, and tensors derived from written weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rank_pool import RankPool

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
TOKENS = np.random.default_rng(0).integers(3, 400, size=90)


def written_and_scored(folder: str, tp: int) -> dict[str, Any]:
    """Write the folder's weights into the live parameters and score TOKENS.

    Returns their log-probs [tokens] and the names of derived tensors stored apart from their weights.
    """
    from safetensors.torch import load_file

    from megarl.config import RolloutConfig
    from megarl.engine.engine import RolloutEngine
    from megarl.reshard.layouts.vllm import record_layout, zero_padding

    config = RolloutConfig(tp=tp, kv_cache_gib=0.05, max_concurrent_requests=4)
    engine = RolloutEngine(folder, config, max_model_len=128, dtype="float32", seed=0)
    tensors = load_file(f"{folder}/model.safetensors")
    live = dict(engine.model.named_parameters())
    for parameter in live.values():
        parameter.data.fill_(torch.nan)
    for piece in record_layout(engine.model, {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}):
        source = tensors[piece.box.name][tuple(map(slice, piece.box.start, piece.box.stop))]
        live[piece.storage].data.view(-1).as_strided(piece.box.shape, piece.strides, piece.offset).copy_(source)
    zero_padding(engine.model)
    derived = {name: parameter for name, parameter in live.items() if name.endswith((".W_UV", ".W_UK_T"))}
    weights = {live[name].untyped_storage().data_ptr() for name in live if name.endswith("kv_b_proj.weight")}
    found = {
        "logprobs": engine.prompt_logprobs(TOKENS),
        "num_derived": len(derived),
        "apart": [name for name, tensor in derived.items() if tensor.untyped_storage().data_ptr() not in weights],
        "unwritten": [name for name, parameter in live.items() if parameter.isnan().any()],
    }
    engine.close()
    return found


@pytest.mark.parametrize(
    ("tp", "shape", "rope"),
    [
        pytest.param(2, {"experts_per_token": 4}, YARN, id="yarn, two ranks"),
        pytest.param(1, {"experts_per_token": 4, "query_rank": None}, None, id="plain rope, no query latent"),
    ],
)
def test_logprobs_are_transformers(
    tiny_model: Callable[..., Path], ranks: RankPool, tmp_path: Path, tp: int, shape: dict[str, Any], rope: Any
) -> None:
    from transformers import AutoModelForCausalLM

    made = tiny_model(
        family="deepseek_v3", num_layers=2, hidden_size=64, max_position_embeddings=128, initializer_range=0.1, **shape
    )
    folder = tmp_path / "model"
    folder.mkdir()
    for file in made.iterdir():
        (folder / file.name).symlink_to(file)
    if rope is not None:
        config = json.loads((made / "config.json").read_text()) | {"rope_parameters": rope}
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config))
    [found, *_] = ranks.run(written_and_scored, str(folder), tp, world_size=tp)
    assert found["unwritten"] == [] and found["apart"] == [] and found["num_derived"] == 4
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.from_numpy(TOKENS)
    with torch.no_grad():
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(found["logprobs"][1:]), expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1
