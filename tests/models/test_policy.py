"""Megatron's model against Hugging Face's: logits at one rank, log-probs however the model is split."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.families.shape import read_model_shape
from megarl.training.rows.choice import make_microbatch
from megarl.types import TrainingSequence
from tests.rank_pool import RankPool
from tests.rounding import allowed_error

LENGTHS = [7, 1, 300, 12]
TEMPERATURE = 0.7
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALED = [
    pytest.param(LLAMA3 | {"original_max_position_embeddings": 8192}, id="llama3"),
    pytest.param(LLAMA3 | {"factor": 3.0, "low_freq_factor": 2.0, "original_max_position_embeddings": 60}, id="short"),
    pytest.param(YARN, id="yarn"),
    pytest.param(YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.7}, id="all"),
    pytest.param(YARN | {"mscale": 0.707, "mscale_all_dim": 1.3}, id="yarn, mscale"),
    pytest.param({"rope_type": "linear", "factor": 4.0}, id="linear"),
]
"""Scaled rotary embeddings; the longest sequence has 300 tokens."""


def sequences(vocab_size: int) -> list[TrainingSequence]:
    tokens = np.random.default_rng(2).integers(vocab_size, size=sum(LENGTHS))
    tokens[:2] = 0, vocab_size - 1
    parts = np.split(tokens, np.cumsum(LENGTHS)[:-1])
    return [TrainingSequence(token_ids=part, loss_mask=np.ones(len(part), bool)) for part in parts]


def build(folder: str, parallel: ParallelConfig) -> Any:
    """This rank's stage of the model, its weights read from the folder."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megarl.checkpoint import safetensors
    from megarl.families.shape import padded_vocab_size
    from megarl.models.configuration import transformer_config
    from megarl.models.policy import PolicyModel, RowSettings
    from megarl.reshard.layouts.megatron import megatron_layouts

    shape = read_model_shape(folder)
    parallel_state.initialize_model_parallel(parallel.tp, parallel.pp, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1)
    config = transformer_config(shape, parallel, dtype=torch.float32, sequence_parallel=parallel.tp > 1, overrides={})
    model = PolicyModel(config, shape, logprob_chunk_tokens=50)
    model.row_settings = RowSettings(TEMPERATURE)
    layouts = megatron_layouts(shape, parallel, padded_vocab_size=padded_vocab_size(shape.vocab_size, parallel.tp))
    pieces = layouts[dist.get_rank()]
    # Biases of routers are buffers.
    safetensors.load(folder, pieces, {**dict(model.named_parameters()), **dict(model.named_buffers())})
    return model.eval()


@torch.no_grad()
def logits_and_logprobs(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [tokens, padded vocabulary], log-probs and entropies [2, tokens] of the row, on one rank."""
    from megatron.core.models.gpt import GPTModel

    model = build(folder, ParallelConfig(1, 1, 1, 1))
    batch = make_microbatch(
        TokenBatch.from_sequences(sequences(model.num_local_tokens)),
        multiple=1,
        qkv_format=model.qkv_format,
        device=torch.device("cpu"),
    )
    inputs = {"position_ids": None, "attention_mask": None, "packed_seq_params": batch.row}
    logprobs = model(batch.input_ids, labels=batch.labels, **inputs)
    model._postprocess = MethodType(GPTModel._postprocess, model)
    return model(batch.input_ids, labels=None, **inputs).squeeze(0), logprobs


@torch.no_grad()
def split_logprobs(folder: str, parallel: ParallelConfig) -> torch.Tensor | None:
    """Log-probs and entropies of the row on the last stage; stages run one after the other, by hand."""
    from megatron.core import parallel_state

    model = build(folder, parallel)
    vocab_size = read_model_shape(folder).vocab_size
    row = TokenBatch.from_sequences(sequences(vocab_size))
    batch = make_microbatch(row, multiple=parallel.tp, qkv_format=model.qkv_format, device=torch.device("cpu"))
    if not parallel_state.is_pipeline_first_stage():
        tokens = batch.input_ids.numel() // parallel.tp
        hidden = torch.empty(tokens, 1, model.config.hidden_size)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    out = model(batch.input_ids, None, None, labels=batch.labels, packed_seq_params=batch.row)
    if not parallel_state.is_pipeline_last_stage():
        dist.send(out.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        return None
    return out[:, : sum(LENGTHS)]


@torch.no_grad()
def hugging_face_logits(folder: Path, vocab_size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    return torch.cat([model(torch.from_numpy(s.token_ids)[None]).logits[0] for s in sequences(vocab_size)])


def with_rope(folder: Path, target: Path, rope: dict[str, Any]) -> Path:
    return with_fields(folder, target, {"rope_parameters": rope, "max_position_embeddings": 512})


def with_fields(folder: Path, target: Path, fields: dict[str, Any]) -> Path:
    """A copy of a model folder with changed fields of config.json."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))
    return target


MODELS = [
    pytest.param({"family": "llama", "num_kv_heads": 4, "tie_word_embeddings": False}, id="llama untied"),
    pytest.param({"family": "llama", "tie_word_embeddings": True}, id="llama tied"),
    pytest.param({"family": "qwen2", "tie_word_embeddings": False}, id="qwen2 untied"),
    pytest.param({"family": "qwen2", "tie_word_embeddings": True}, id="qwen2 tied"),
    pytest.param({"family": "qwen3", "tie_word_embeddings": False, "head_dim": 24}, id="qwen3 untied"),
    pytest.param({"family": "qwen3", "tie_word_embeddings": True, "vocab_size": 431}, id="qwen3 tied"),
]
SIZES = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 96, "initializer_range": 0.15}


@pytest.fixture(scope="module")
def made(tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    def make(shape: dict[str, Any]) -> Path:
        return tiny_model(**(SIZES | {"num_kv_heads": 2} | shape))

    return make


def logprobs_and_entropies(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = (logits / TEMPERATURE).log_softmax(-1)
    return distribution.gather(1, labels[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


def compare_with_hugging_face(ranks: RankPool, folder: Path) -> torch.Tensor:
    """Logits, log-probs and entropies, but for rounding; returns Hugging Face's logits."""
    [(logits, (logprobs, entropies))] = ranks.run(logits_and_logprobs, str(folder), world_size=1)
    vocab_size = read_model_shape(folder).vocab_size
    expected = hugging_face_logits(folder, vocab_size)
    assert expected.shape == (sum(LENGTHS), vocab_size) and logits.shape[1] > vocab_size
    in_float32 = hugging_face_logits(folder, vocab_size, torch.float32)
    allowed = allowed_error(in_float32, expected)
    torch.testing.assert_close(logits[:, :vocab_size].double(), expected, rtol=0, atol=allowed)
    labels = torch.cat([torch.from_numpy(np.append(s.token_ids[1:], 0)) for s in sequences(vocab_size)])
    oracles = [logprobs_and_entropies(found, labels) for found in (in_float32, expected)]
    for got, rounded, exact in zip((logprobs, entropies), *oracles, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=allowed_error(rounded, exact))
    return expected


@pytest.mark.parametrize("shape", MODELS)
def test_logits_are_hugging_faces(ranks: RankPool, made: Callable[..., Path], shape: dict[str, Any]) -> None:
    assert compare_with_hugging_face(ranks, made(shape)).std() > 0.3


@pytest.mark.parametrize("rope", SCALED)
def test_scaled_rotary_embeddings(
    ranks: RankPool, made: Callable[..., Path], tmp_path: Path, rope: dict[str, Any]
) -> None:
    folder = made({"family": "llama", "tie_word_embeddings": True})
    scaled = with_rope(folder, tmp_path / "scaled", {"rope_theta": 10000.0} | rope)
    expected = compare_with_hugging_face(ranks, scaled)
    assert (expected - hugging_face_logits(folder, expected.size(1))).abs().max() > 1e-2


def test_a_factor_of_the_rotated_channels_scales_no_others(
    ranks: RankPool, made: Callable[..., Path], tmp_path: Path
) -> None:
    """tools/checks/families.py proves all scalings of all families."""
    folder = made({"family": "qwen3_5_text", "num_layers": 4, "initializer_range": 0.1})
    rope = YARN | {"rope_theta": 10000.0, "attention_factor": 1.7, "partial_rotary_factor": 0.5}
    compare_with_hugging_face(ranks, with_rope(folder, tmp_path / "scaled", rope))


def test_dynamic_scaling_starts_beyond_the_positions(
    ranks: RankPool, made: Callable[..., Path], tmp_path: Path
) -> None:
    folder = made({"family": "llama", "tie_word_embeddings": True})
    rope = {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0}
    compare_with_hugging_face(ranks, with_rope(folder, tmp_path / "scaled", rope))


def test_other_rope_theta(ranks: RankPool, made: Callable[..., Path], tmp_path: Path) -> None:
    folder = made({"family": "qwen3", "tie_word_embeddings": True, "vocab_size": 431})
    compare_with_hugging_face(ranks, with_rope(folder, tmp_path / "theta", {"rope_type": "default", "rope_theta": 1e6}))


WINDOW = {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 0, "layer_types": None}


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_sliding_windows(ranks: RankPool, made: Callable[..., Path], tmp_path: Path, family: str) -> None:
    folder = made({"family": family, "tie_word_embeddings": True})
    windowed = with_fields(folder, tmp_path / "windowed", WINDOW)
    expected = compare_with_hugging_face(ranks, windowed)
    full = with_fields(folder, tmp_path / "full", WINDOW | {"sliding_window": 400})
    assert (expected - hugging_face_logits(full, expected.size(1))).abs().max() > 1e-2


@pytest.mark.parametrize("shape", [MODELS[2], MODELS[5]])
def test_splitting_the_model_changes_nothing(ranks: RankPool, made: Callable[..., Path], shape: dict[str, Any]) -> None:
    folder = str(made(shape))
    [(_, expected)] = ranks.run(logits_and_logprobs, folder, world_size=1)
    for tp, pp in ((2, 1), (1, 2), (2, 2)):
        case = f"tp{tp} pp{pp}"
        results = ranks.run(split_logprobs, folder, ParallelConfig(tp, pp, 1, 1), world_size=tp * pp)
        last = [result for result in results if result is not None]
        assert len(last) == tp, case
        for got in last:
            assert (got - expected).abs().max() <= 1e-5, case


def test_a_rank_whose_rows_are_all_padding_adds_nothing(
    ranks: RankPool, made: Callable[..., Path], tmp_path: Path
) -> None:
    """The padded head has 64 rows, 32 on each rank. The 30 rows of the vocabulary are all on the first rank."""
    whole = made({"family": "qwen3", "tie_word_embeddings": True, "vocab_size": 431})
    folder = with_fields(whole, tmp_path / "small", {"vocab_size": 30, "bos_token_id": 1, "eos_token_id": 2})
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:30].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    expected = compare_with_hugging_face(ranks, folder)
    assert expected.shape[1] == 30
    [(_, logprobs)] = ranks.run(logits_and_logprobs, str(folder), world_size=1)
    for got in ranks.run(split_logprobs, str(folder), ParallelConfig(2, 1, 1, 1), world_size=2):
        assert got is not None and (got - logprobs).abs().max() <= 1e-5


def test_more_ranks_than_key_value_heads_share_gated_attention(ranks: RankPool, made: Callable[..., Path]) -> None:
    """Two key-value heads on four ranks: each has the gate of its own query head. Other layers are delta-nets."""
    folder = made({"family": "qwen3_5_text", "num_layers": 4, "initializer_range": 0.05})
    [(_, expected)] = ranks.run(logits_and_logprobs, str(folder), world_size=1)
    for got in ranks.run(split_logprobs, str(folder), ParallelConfig(4, 1, 1, 1), world_size=4):
        assert got is not None and (got - expected).abs().max() <= 1e-5
